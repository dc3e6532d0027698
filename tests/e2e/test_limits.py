"""The page on limits as an administrator works through it: every block, in order, pasted into one shell."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import broker_thread
from certificates import Certificates
from waiting import PATIENCE

PAGE = Path(__file__).parents[2] / "docs" / "limits.md"

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def place(tmp_path):
    """A directory with the certificates that the page speaks of, and a broker."""
    directory, certificates = tmp_path, Certificates(tmp_path / "pki")
    (directory / "certs").mkdir()
    for name, made in (
        ("alice", certificates.admin("alice")),
        ("milan", certificates.cluster("milan")),
        ("team-a", certificates.cluster("team-a")),
    ):
        (directory / "certs" / name).symlink_to(made)
    with broker_thread.running(certificates.server(), directory) as broker:
        yield directory, broker.url


def test_every_command_of_the_page_succeeds_and_shows_what_it_promises(place):
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
    out = done.stdout
    assert done.returncode == 0, out
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
