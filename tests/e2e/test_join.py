"""Joining, revoking and coming back as people do it: by pasting what the commands print."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import applicants
import broker_process
import openssl
import processes
from waiting import PATIENCE

pytestmark = pytest.mark.timeout(120)

FORBIDDEN, USAGE, UNAVAILABLE = 4, 2, 7


class Machine:
    """A shell in a directory of its own, with `kubelend` on its path and what was exported so far."""

    def __init__(self, directory, **variables):
        directory.mkdir(exist_ok=True)
        self.directory = directory
        kept = {name: text for name, text in os.environ.items() if not name.startswith("KUBELEND_")}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**kept, "PATH": path, **variables}

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


@pytest.fixture
def broker(certificates, tmp_path):
    authority = applicants.authority(certificates, tmp_path)
    flags = (f"--ca-path={authority}", "--enrol-port=0")
    with broker_process.running(certificates.server(), tmp_path, *flags) as broker:
        yield broker


@pytest.fixture
def alice(broker, certificates, tmp_path):
    return Machine(
        tmp_path / "alice",
        KUBELEND_BROKER_URL=broker.url,
        KUBELEND_CERT_PATH=str(certificates.admin("alice")),
    )


def joined(alice, tmp_path, name):
    """Two commands, pasted: the one that the administrator was given, and the next step it prints."""
    machine = Machine(tmp_path / name)
    command, _ = alice.paste(f"kubelend create token --cluster-id {name}")
    _, err = machine.paste(command)
    (export,) = [line.removeprefix("Next: ") for line in err.splitlines() if "Next: " in line]
    machine.paste(export)
    return machine


@openssl.needed
def test_two_clusters_join_lend_and_borrow_and_one_is_revoked(alice, tmp_path):
    berlin, paris = joined(alice, tmp_path, "berlin"), joined(alice, tmp_path, "paris")
    for machine, name in ((berlin, "berlin"), (paris, "paris")):
        files = machine.directory / "certs" / name
        assert openssl.accepts(files / "tls.crt", files / "ca.crt")
    out, _ = berlin.paste("kubelend dev advertise --cpu 16 --memory 64Gi --allocated-cpu 5")
    assert out == "cluster/berlin advertised: 11 cpu, 64Gi memory free\n"
    out, _ = paris.paste("kubelend borrow --cpu 4 --memory 8Gi")
    assert "Reserved on berlin" in out
    out, _ = alice.paste("kubelend get clusters -o wide")
    header, row = out.splitlines()
    assert row[header.index("CERTIFICATE") :].split()[0] in {"364d", "365d"}
    out, _ = alice.paste("kubelend get members")
    assert [line.split()[:3] for line in out.splitlines()[1:]] == [
        ["cluster", "berlin", "Accepted"],
        ["cluster", "paris", "Accepted"],
    ]
    out, _ = alice.paste("kubelend revoke berlin --reason 'laptop stolen'")
    assert out.startswith("cluster/berlin revoked; its reservations")
    code, _, err = berlin.run("kubelend dev advertise --cpu 16 --memory 64Gi")
    assert code == FORBIDDEN
    assert err.startswith("error: the certificate of cluster berlin was revoked at")
    out, _ = paris.paste("kubelend get reservations")
    assert "Reserved" in out
    _, _, err = paris.run("kubelend borrow --cpu 1 --memory 1Gi")
    assert "Cordoned" in err
    out, _ = alice.paste("kubelend revoke berlin --release --yes")
    assert "1 lent reservation moved or released" in out
    out, _ = alice.paste("kubelend delete cluster berlin")
    assert out == (
        "cluster/berlin deleted; its certificates stay revoked until it is approved again\n"
    )
    code, _, _ = berlin.run("kubelend dev advertise --cpu 16 --memory 64Gi")
    assert code == FORBIDDEN


def test_unbound_applicant_waits_resumes_and_is_accepted(alice, tmp_path):
    machine = Machine(tmp_path / "rome")
    out, err = alice.paste("kubelend create token --ttl 1h")
    assert "kubelend approve" in err
    command = out.strip().replace("CLUSTER", "rome")
    waiting = machine.start(in_its_place(command))
    read_until(waiting.stderr, "kubelend approve rome")
    waiting.send_signal(signal.SIGINT)
    assert waiting.wait(PATIENCE) == 130
    waiting.communicate()
    key = (machine.directory / "certs/rome/tls.key").read_bytes()
    code, _, err = machine.run(f"{command} --wait 1s")
    assert code == UNAVAILABLE
    assert "rome has not been accepted yet" in err
    out, _ = alice.paste("kubelend get members --status Pending")
    pin = out.split()[-1]
    assert pin.startswith("sha256:")
    assert pin in err
    _, _, err = alice.run(f"kubelend approve rome --key sha256:{'0' * 64}")
    assert "another key has requested" in err
    assert alice.paste(f"kubelend approve rome --key {pin}")[0] == "cluster/rome approved\n"
    out, _ = machine.paste(command)
    assert out.startswith("wrote the certificate of cluster rome to certs/rome, valid until")
    assert (machine.directory / "certs/rome/tls.key").read_bytes() == key


def test_token_is_in_no_argument_of_the_command_that_is_pasted(alice):
    variable, *arguments = shlex.split(alice.paste("kubelend create token")[0])
    assert variable.startswith("KUBELEND_TOKEN=kl1.")
    assert arguments[:2] == ["kubelend", "join"]
    assert "kl1." not in " ".join(arguments)


def test_token_of_a_pasted_join_is_not_in_the_process_list(alice, tmp_path):
    machine = Machine(tmp_path / "rome")
    command = alice.paste("kubelend create token")[0].strip().replace("CLUSTER", "rome")
    token = command.partition(" ")[0].removeprefix("KUBELEND_TOKEN=")
    waiting = machine.start(in_its_place(command))
    try:
        read_until(waiting.stderr, "kubelend approve rome")
        (seen,) = [one for one in processes.naming(Path("certs/rome")) if one.pid == waiting.pid]
        assert token.split(".")[2] not in seen.command
        assert "--ca-hash" in seen.command
    finally:
        waiting.kill()
        waiting.communicate()


@pytest.mark.parametrize("place", ["file", "stdin", "variable"])
def test_token_may_come_from_a_file_stdin_or_the_environment(alice, tmp_path, place):
    machine = Machine(tmp_path / "rome")
    made = json.loads(alice.paste("kubelend create token --cluster-id rome -o json")[0])
    rest = f"kubelend join https://localhost:{made['enrolPort']} --ca-hash {made['caHash']}"
    rest += " --cluster-id rome"
    if place == "file":
        (machine.directory / "token").write_text(made["token"] + "\n")
        machine.paste(f"{rest} --token-file token --out here")
    elif place == "stdin":
        machine.paste(f"echo {made['token']} | {rest} --token-file - --out here")
    else:
        machine.paste(f"KUBELEND_TOKEN={made['token']} {rest} --out here")
    assert (machine.directory / "here/tls.crt").exists()


def test_mistakes_are_told_in_one_line_with_what_to_do(alice, tmp_path):
    machine = Machine(tmp_path / "rome")
    command = alice.paste("kubelend create token --cluster-id rome")[0].strip()
    url = command.split()[3]
    for change, code, text in (
        (("sha256:", "sha256:0"), USAGE, "must be sha256: followed by 64 hex digits"),
        (("--cluster-id rome", "--cluster-id paris"), FORBIDDEN, "is bound to 'rome'"),
        (("--cluster-id rome", "--name rome --role admin"), FORBIDDEN, "is for role cluster"),
        ((url, "http://localhost"), USAGE, "is not a broker URL"),
        ((url, "https://localhost:1"), UNAVAILABLE, "connection refused"),
        ((" --cluster-id rome", ""), USAGE, "--cluster-id is required"),
    ):
        found, out, err = machine.run(command.replace(*change))
        assert (found, out) == (code, ""), err
        assert text in err
        assert len(err.splitlines()) == 1
        assert "kl1." not in err


def test_tokens_are_listed_and_deleted(alice, tmp_path):
    alice.paste("kubelend create token --role viewer --name bob --uses 2")
    out, _ = alice.paste("kubelend get tokens")
    header, row = out.splitlines()
    assert header.split()[:4] == ["ID", "STATE", "ROLE", "NAME"]
    token, *rest = row.split()
    assert rest[:4] == ["Valid", "viewer", "bob", "2"]
    assert alice.paste(f"kubelend delete token {token}")[0] == f"token/{token} deleted\n"
    _, err = alice.paste("kubelend get tokens")
    assert "No tokens found." in err


def test_people_join_and_are_put_out(alice, broker, tmp_path):
    machine = Machine(tmp_path / "bob")
    command, _ = alice.paste("kubelend create token --role viewer --name bob")
    assert "--name bob --role viewer --out certs/bob" in command
    machine.paste(command)
    get = f"kubelend get clusters --broker-url {broker.url} --cert-path certs/bob"
    assert machine.run(get)[0] == 0
    out, _ = alice.paste("kubelend revoke bob --role viewer")
    assert out == "viewer/bob revoked\n"
    assert machine.run(get)[0] == FORBIDDEN
    _, err = alice.paste("kubelend revoke bbo --role viewer")
    assert "viewer/bbo never joined through this broker: check the name" in err
    _, _, err = alice.run("kubelend revoke alice --role admin")
    assert "cannot revoke or remove themselves" in err


def test_administrator_is_put_out_with_its_tokens_and_who_it_let_in_is_named(
    alice, certificates, tmp_path
):
    own = {**alice.environment, "KUBELEND_CERT_PATH": str(certificates.admin("mallory"))}
    mallory = Machine(tmp_path / "mallory", **own)
    first, second = (
        mallory.paste(f"kubelend create token --role admin --name {name}")[0]
        for name in ("eve", "oscar")
    )
    Machine(tmp_path / "eve").paste(first)
    out, err = alice.paste("kubelend revoke mallory --role admin")
    assert out == "admin/mallory revoked; 2 tokens that it created deleted\n"
    assert "It approved admin/eve, who stay members: check whether they should." in err
    code, _, err = Machine(tmp_path / "oscar").run(second)
    assert (code, "unknown token or wrong secret" in err) == (FORBIDDEN, True)


def in_its_place(command):
    """The same, so that the shell becomes the command and has its process number."""
    variable, _, rest = command.partition(" ")
    return f"export {variable}; exec {rest}"


def read_until(stream, text):
    """Lines of a process until one has the text."""
    while True:
        line = stream.readline()
        assert line, f"it ended without saying {text!r}"
        if text in line:
            return
