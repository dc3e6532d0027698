"""Joining, revoking and coming back as people do it: by pasting what the commands print.

Shells run what is pasted; all other commands run in this process, against one broker.
"""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import applicants
import broker_thread
import openssl
import processes
from waiting import PATIENCE

pytestmark = pytest.mark.timeout(120)

FORBIDDEN, USAGE, UNAVAILABLE = 4, 2, 7


class Machine:
    """A shell in a directory of its own, with `kubelend` on its path and what was exported so far."""

    def __init__(self, directory):
        directory.mkdir()
        self.directory = directory
        kept = {name: text for name, text in os.environ.items() if not name.startswith("KUBELEND_")}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**kept, "PATH": path}

    def start(self, command):
        return subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, command):
        """Exit code, output and errors."""
        shell = self.start(command)
        out, err = shell.communicate(timeout=PATIENCE)
        return shell.returncode, out, err

    def paste(self, command):
        """What must succeed; gives what it printed. Exports stay."""
        code, out, err = self.run(f"{command}\ncode=$?; env | grep ^KUBELEND_ >&2; exit $code")
        assert code == 0, f"{command}\n{out}\n{err}"
        exported = [line for line in err.splitlines() if line.startswith("KUBELEND_")]
        self.environment.update(line.split("=", 1) for line in exported)
        return out, err


@pytest.fixture(scope="module")
def broker(certificates, tmp_path_factory):
    root = tmp_path_factory.mktemp("broker")
    issues = {"ca_path": applicants.authority(certificates, root), "enrol_port": 0}
    with broker_thread.running(certificates.server(), root, **issues) as broker:
        yield broker


@pytest.fixture
def kubelend(broker, run_command, monkeypatch, tmp_path):
    """Runs a command in this process, in a directory of its own."""
    monkeypatch.chdir(tmp_path)

    def run(line, directory="nowhere", **variables):
        return run_command(line, broker.url, directory, **variables)

    return run


@pytest.fixture
def alice(kubelend, certificates):
    return lambda line: kubelend(line, certificates.admin("alice"))


@pytest.fixture
def join(kubelend):
    """Runs a printed command in this process."""

    def run(command):
        variable, _, rest = command.partition(" ")
        name, token = variable.split("=")
        return kubelend(rest.removeprefix("kubelend "), **{name: token})

    return run


def joined(alice, tmp_path, name):
    """Two commands, pasted: the one that the administrator was given, and the next step it prints."""
    machine = Machine(tmp_path / name)
    _, command, _ = alice(f"create token --cluster-id {name}")
    _, err = machine.paste(command)
    (export,) = [line.removeprefix("Next: ") for line in err.splitlines() if "Next: " in line]
    machine.paste(export)
    return machine


@openssl.needed
def test_two_clusters_join_lend_and_borrow_and_one_is_revoked(alice, kubelend, tmp_path):
    machines = [joined(alice, tmp_path, name) for name in ("berlin", "paris")]
    own = [machine.directory / "certs" / machine.directory.name for machine in machines]
    for directory in own:
        assert openssl.accepts(directory / "tls.crt", directory / "ca.crt")
    out, _ = machines[0].paste("kubelend dev advertise --cpu 16 --memory 64Gi --allocated-cpu 5")
    assert out == "cluster/berlin advertised: 11 cpu, 64Gi memory free\n"

    def berlin(line):
        return kubelend(line, own[0])

    def paris(line):
        return kubelend(line, own[1])

    assert "Reserved on berlin" in paris("borrow --cpu 4 --memory 8Gi")[1]
    header, row = alice("get clusters -o wide")[1].splitlines()
    assert row[header.index("CERTIFICATE") :].split()[0] in {"364d", "365d"}
    members = [line.split()[:3] for line in alice("get members")[1].splitlines()]
    assert ["cluster", "berlin", "Approved"] in members
    _, out, _ = alice("revoke berlin --reason 'laptop stolen'")
    assert out.startswith("cluster/berlin revoked; its reservations")
    code, _, err = berlin("dev advertise --cpu 16 --memory 64Gi")
    assert code == FORBIDDEN
    assert err.startswith("error: the certificate of cluster berlin was revoked at")
    assert "Reserved" in paris("get reservations")[1]
    assert "Cordoned" in paris("borrow --cpu 1 --memory 1Gi")[2]
    assert "1 lent reservation moved or released" in alice("revoke berlin --release --yes")[1]
    assert alice("delete cluster berlin")[1] == (
        "cluster/berlin deleted; its certificates stay revoked until it is approved again"
    )
    assert berlin("dev advertise --cpu 16 --memory 64Gi")[0] == FORBIDDEN


def test_unbound_applicant_waits_resumes_and_is_accepted(alice, tmp_path):
    machine = Machine(tmp_path / "rome")
    _, out, err = alice("create token --ttl 1h")
    assert "kubelend approve" in err
    command = out.strip().replace("CLUSTER", "rome")
    variable, _, rest = command.partition(" ")
    assert variable.startswith("KUBELEND_TOKEN=kl1.")
    # The shell becomes the command and has its process number.
    waiting = machine.start(f"export {variable}; exec {rest}")
    read_until(waiting.stderr, "kubelend approve rome")
    (seen,) = [one for one in processes.naming(Path("certs/rome")) if one.pid == waiting.pid]
    assert "kl1." not in seen.command
    assert "--ca-hash" in seen.command
    waiting.send_signal(signal.SIGINT)
    assert waiting.wait(PATIENCE) == 130
    waiting.communicate()
    key = (machine.directory / "certs/rome/tls.key").read_bytes()
    code, _, err = machine.run(f"{command} --wait 1s")
    assert code == UNAVAILABLE
    assert "rome has not been accepted yet" in err
    pin = alice("get members --status Pending")[1].split()[-1]
    assert pin.startswith("sha256:")
    assert pin in err
    assert "another key has requested" in alice(f"approve rome --key sha256:{'0' * 64}")[2]
    assert alice(f"approve rome --key {pin}")[1] == "cluster/rome approved"
    out, _ = machine.paste(command)
    assert out.startswith("wrote the certificate of cluster rome to certs/rome, valid until")
    assert (machine.directory / "certs/rome/tls.key").read_bytes() == key


@pytest.mark.parametrize("place", ["file", "stdin"])
def test_token_may_come_from_a_file_or_stdin_too(alice, kubelend, tmp_path, monkeypatch, place):
    made = json.loads(alice(f"create token --cluster-id by-{place} -o json")[1])
    source = "-" if place == "stdin" else "token"
    Path("token").write_text(made["token"] + "\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO(made["token"] + "\n"))
    url = f"https://localhost:{made['enrolPort']}"
    flags = f"--ca-hash {made['caHash']} --cluster-id by-{place} --token-file {source} --out here"
    code, _, err = kubelend(f"join {url} {flags}")
    assert code == 0, err
    assert Path("here/tls.crt").exists()


def test_mistakes_are_reported_in_one_line_with_what_to_do(alice, join):
    command = alice("create token --cluster-id oslo")[1].strip()
    url = command.split()[3]
    for change, code, text in (
        (("sha256:", "sha256:0"), USAGE, "must be sha256: followed by 64 hex digits"),
        (("--cluster-id oslo", "--cluster-id paris"), FORBIDDEN, "is bound to 'oslo'"),
        (("--cluster-id oslo", "--name oslo --role admin"), FORBIDDEN, "is for role cluster"),
        ((url, "http://localhost"), USAGE, "is not a broker URL"),
        ((url, "https://localhost:1"), UNAVAILABLE, "connection refused"),
        ((" --cluster-id oslo", ""), USAGE, "--cluster-id is required"),
    ):
        found, out, err = join(command.replace(*change))
        assert (found, out) == (code, ""), err
        assert text in err
        assert len(err.splitlines()) == 1
        assert "kl1." not in err


def test_people_join_and_are_put_out(alice, kubelend, join):
    _, command, _ = alice("create token --role viewer --name bob")
    assert "--name bob --role viewer --out certs/bob" in command
    assert join(command)[0] == 0
    assert kubelend("get clusters", "certs/bob")[0] == 0
    assert alice("revoke bob --role viewer")[1] == "viewer/bob revoked"
    assert kubelend("get clusters", "certs/bob")[0] == FORBIDDEN
    unknown = "viewer/bbo never joined through this broker: check the name"
    assert unknown in alice("revoke bbo --role viewer")[2]
    assert "cannot revoke or remove themselves" in alice("revoke alice --role admin")[2]


def test_administrator_is_put_out_with_its_tokens_and_who_it_let_in_is_named(
    alice, kubelend, join, certificates
):
    mallory = certificates.admin("mallory")
    eve, oscar = (
        kubelend(f"create token --role admin --name {name}", mallory)[1]
        for name in ("eve", "oscar")
    )
    assert join(eve)[0] == 0
    _, out, err = alice("revoke mallory --role admin")
    assert out == "admin/mallory revoked; 2 tokens that it created deleted"
    assert "It approved admin/eve, who stay members: check whether they should." in err
    code, _, err = join(oscar)
    assert (code, "unknown token or wrong secret" in err) == (FORBIDDEN, True)


def read_until(stream, text):
    """Lines of a process until one has the text."""
    while text not in (line := stream.readline()):
        assert line, f"it ended without saying {text!r}"
