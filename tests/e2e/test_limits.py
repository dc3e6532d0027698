"""The page on limits as an administrator works through it: every block, in order, pasted into one shell."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import broker_thread
from certificates import Certificates
from kubelend.cli import main
from waiting import PATIENCE

PAGE = Path(__file__).parents[2] / "docs" / "limits.md"

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with the certificates that the page speaks of, and a broker."""
    directory = tmp_path_factory.mktemp("limits")
    certificates = Certificates(directory / "pki")
    (directory / "certs").mkdir()
    for name, made in (
        ("alice", certificates.admin("alice")),
        ("milan", certificates.cluster("milan")),
        ("team-a", certificates.cluster("team-a")),
    ):
        (directory / "certs" / name).symlink_to(made)
    with broker_thread.running(certificates.server(), directory) as broker:
        yield directory, broker.url


@pytest.fixture(scope="module")
def pasted(place):
    """Exit code and all that was printed."""
    directory, url = place
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) > 5
    kept = {name: text for name, text in os.environ.items() if not name.startswith("KUBELEND_")}
    done = subprocess.run(
        ["bash", "-c", "set -euo pipefail\n" + "\n".join(blocks)],
        cwd=directory,
        env={
            **kept,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "KUBELEND_BROKER_URL": url,
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=4 * PATIENCE,
    )
    return done.returncode, done.stdout


def test_every_command_of_the_page_succeeds_and_shows_what_it_promises(pasted):
    code, out = pasted
    assert code == 0, out
    shown = [
        "4 cpu, 8Gi memory",
        "WITHHELD",
        "0 of 8 cpu",
        "is Reserved on milan for 2h",
        "team-a holds 4 of 8 cpu, and 6 more would exceed its quota; request 2 cpu less",
        "exit code 6",
        " of 2 EUR\n\nRESOURCE  USED  PENDING  LIMIT\ncpu       4 ",
        "Quota: team-a holds 4 of 8 cpu",
        "a cluster fits if you request 4 cpu less",
        "a cluster fits if you request less, or for a shorter time (your budget leaves",
        "0.4 EUR/h",
        "PolicySet",
        "quota/team-a deleted",
        "policy/milan deleted",
    ]
    assert [text for text in shown if text not in out] == [], out
    assert sorted(shown, key=out.index) == shown


# -- one command at a time


@pytest.fixture
def kubelend(place, monkeypatch, capsys):
    """Runs a command; gives exit code, output and errors."""

    def run(*words, who="alice"):
        directory, url = place
        monkeypatch.setenv("KUBELEND_BROKER_URL", url)
        monkeypatch.setenv("KUBELEND_CERT_PATH", str(directory / "certs" / who))
        capsys.readouterr()
        code = main.run(list(words))
        out, err = capsys.readouterr()
        return code, out.strip(), err.strip()

    return run


def test_policy_comes_from_a_file_or_from_flags(kubelend, tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text("deny: [team-x]\nkeepBack: {cpu: 4, memory: 8Gi}\nhours: ['22:00-06:00']\n")
    code, from_file, err = kubelend("set", "policy", "berlin", "-f", str(path), "-o", "json")
    assert (code, err) == (0, "")
    flags = ("--deny", "team-x", "--keep-back", "cpu=4,memory=8Gi", "--hours", "22:00-06:00")
    assert kubelend("set", "policy", "berlin", *flags, "-o", "json") == (0, from_file, "")
    assert kubelend("get", "policy", "berlin", "-o", "json") == (0, from_file, "")
    assert kubelend("set", "policy", "berlin", *flags, "-f", str(path))[0] == 2


@pytest.mark.parametrize(
    "words, code, problem",
    [
        ("set policy x", 2, "the policy is empty; `kubelend delete policy x` deletes it"),
        ("set policy x --keep-back 4", 2, "--keep-back: '4' has no name"),
        ("set policy x --keep-back cpu=much", 2, "--keep-back cpu: 'much'"),
        ("set policy x --hours noon", 2, "--hours: 'noon' is not a valid opening-hours text"),
        ("set policy x -f /nowhere", 2, "--file: /nowhere cannot be read: No such file"),
        ("get policy nobody", 3, "no cluster 'nobody'"),
        ("delete policy nobody", 3, "no policy is set for 'nobody'"),
        ("set quota x", 2, "the quota is empty"),
        ("set quota x --budget lots", 2, "--budget: 'lots' is no amount of money"),
        ("get quota nobody", 3, "'nobody' has no quota"),
        ("delete quota nobody", 3, "'nobody' has no quota"),
    ],
)
def test_mistakes_are_one_line_with_what_to_do(kubelend, words, code, problem):
    found, out, err = kubelend(*words.split())
    assert (found, out) == (code, "")
    assert err.startswith(f"error: {problem}")
    assert "\n" not in err


def test_file_that_is_no_policy_is_refused(kubelend, tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text("keepback: {cpu: 4}\n")
    code, _, err = kubelend("set", "policy", "x", "--file", str(path))
    assert code == 2
    assert "is no policy: Object contains unknown field `keepback`" in err


def test_limits_are_for_administrators_to_set_and_for_clusters_to_see(kubelend):
    assert kubelend("set", "quota", "team-a", "--budget", "7.5", who="team-a")[0] == 4
    assert kubelend("set", "quota", "team-a", "--budget", "7.5")[0] == 0
    code, out, _ = kubelend("get", "quota", "team-a", who="team-a")
    assert code == 0
    assert "of 7.5 USD" in out
    assert kubelend("get", "quotas", who="team-a")[0] == 4
    assert kubelend("get", "quotas", "-o", "name")[1] == "quota/team-a"
    assert kubelend("delete", "quota", "team-a") == (0, "quota/team-a deleted", "")
    assert kubelend("get", "quotas") == (0, "", "No quotas found.")
