"""The authority's commands as processes, killed at every step; and renewal at a broker with an authority."""

import os
import pty
import shutil
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

import broker_thread
import openssl
from certificates import Certificates
from issuers import due
from kubelend.cli import main
from kubelend.pki import authority as pki_authority
from kubelend.pki import files, identity, tokens
from kubelend.pki.authority import Authority
from kubelend.pki.passphrases import Passphrase
from tls_peers import serial_in
from waiting import PATIENCE

NOW = datetime.now(UTC)
SECRET = "corre\u00e7t horse"

# The hook runs before each change of a name, so the file system is as the step before left it.
KILLED = """
import os, signal, sys
from kubelend.cli import main

left = int(sys.argv[1])

def strike(event, arguments):
    global left
    if event in {"os.rename", "os.link", "os.remove"}:
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

sys.addaudithook(strike)
sys.exit(main.run(sys.argv[2:]))
"""


def killed_before(step, *arguments):
    """Run a command and kill it before it changes its `step`th name; False if it ended before."""
    command = [sys.executable, "-c", KILLED, str(step), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in {0, -signal.SIGKILL}, done.stderr
    return done.returncode != 0


@pytest.fixture
def ca(tmp_path):
    Authority.create("kubelend", now=NOW).save(tmp_path / "ca")
    return tmp_path / "ca"


def check_usable(ca, trusted):
    """Who trusts what was trusted before follows whatever is issued now, and the other way round."""
    authority = Authority.load(ca)
    issued = authority.issue(identity.client_profile("a"), now=NOW)
    out = ca.parent / "issued"
    files.save_credentials(out, issued, overwrite=True)
    (out / "before.crt").write_bytes(files.to_pem(trusted))
    assert openssl.accepts(out / "tls.crt", out / "before.crt")
    assert openssl.accepts(out / "tls.crt", out / "ca.crt")
    assert set(trusted) <= set(authority.trusted)


@openssl.needed
@pytest.mark.parametrize("step", range(4))
def test_a_rotation_killed_anywhere_leaves_an_authority_and_can_be_done_again(ca, step):
    old = Authority.load(ca)
    assert killed_before(step, "ca", "rotate", "--ca", ca)
    check_usable(ca, old.trusted)
    if pki_authority.next_authority(ca) is None:
        pki_authority.start_rotation(ca, now=NOW)
    check_usable(ca, old.trusted)
    assert len(Authority.load(ca).trusted) == 2


@openssl.needed
@pytest.mark.parametrize("flags, steps", [(["--sign"], 1), (["--drop"], 2)], ids=["sign", "drop"])
def test_its_other_steps_killed_anywhere_leave_an_authority_and_can_be_done_again(ca, flags, steps):
    old, new = Authority.load(ca).certificate, pki_authority.start_rotation(ca, now=NOW)
    if flags == ["--drop"]:
        pki_authority.finish_rotation(ca)
        flags = ["--drop", tokens.ca_pin(old)]
    for step in range(steps):
        assert killed_before(step, "ca", "rotate", *flags, "--ca", ca)
        check_usable(ca, [new, old] if step == 0 else [new])
    if flags == ["--sign"]:
        assert main.run(["ca", "rotate", *flags, "--ca", str(ca)]) == 0
    assert Authority.load(ca).certificate == new


def test_no_step_is_left_out_above(ca):
    old = tokens.ca_pin(Authority.load(ca).certificate)
    assert not killed_before(4, "ca", "rotate", "--ca", ca)
    assert not killed_before(1, "ca", "rotate", "--sign", "--ca", ca)
    assert not killed_before(2, "ca", "rotate", "--drop", old, "--ca", ca)


class Terminal:
    """A command that believes a person sits there."""

    def __init__(self, *arguments):
        self._master, slave = pty.openpty()
        command = [sys.executable, "-m", "kubelend", *map(str, arguments)]
        self._process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self.seen = ""

    def answer(self, question, text):
        """Wait for the question, then type."""
        while question not in self.seen:
            self.seen += os.read(self._master, 1000).decode()
        os.write(self._master, f"{text}\n".encode())

    def ended(self):
        """Its exit code."""
        code = self._process.wait(PATIENCE)
        try:
            while more := os.read(self._master, 1000):
                self.seen += more.decode()
        except OSError:  # so does Linux say that nobody has the other end open
            os.close(self._master)
        return code


def test_a_person_is_asked_twice_for_a_new_passphrase_and_once_for_a_known_one(tmp_path):
    ca = tmp_path / "ca"
    terminal = Terminal("ca", "init", "--passphrase-prompt", "--ca", ca)
    terminal.answer("New passphrase for the authority's key: ", SECRET)
    terminal.answer("Repeat the passphrase: ", SECRET)
    assert terminal.ended() == 0
    assert "horse" not in terminal.seen
    assert len(Authority.load(ca, Passphrase(SECRET)).trusted) == 1

    out = tmp_path / "a"
    terminal = Terminal("ca", "issue", "a", "--passphrase-prompt", "--ca", ca, "--out", out)
    terminal.answer("Passphrase of the authority's key: ", SECRET)
    assert terminal.ended() == 0
    assert files.common_names(out) == ["a"]


def test_two_different_passphrases_make_no_authority(tmp_path):
    terminal = Terminal("ca", "init", "--passphrase-prompt", "--ca", tmp_path / "ca")
    terminal.answer("New passphrase for the authority's key: ", "hunter2")
    terminal.answer("Repeat the passphrase: ", "hunter3")
    assert terminal.ended() == 2
    assert "error: the two passphrases differ" in terminal.seen
    assert "hunter" not in terminal.seen
    assert not (tmp_path / "ca").exists()


# -- renewal


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return Certificates(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def issuing(certificates, tmp_path_factory):
    """A broker that issues for thirty days."""
    root = tmp_path_factory.mktemp("issuing")
    certificates.authority.save(root / "ca")
    issues = {"ca_path": root / "ca", "enrol_port": 0}
    lifetime = timedelta(days=30)
    with broker_thread.running(
        certificates.server(), root, certificate_lifetime=lifetime, **issues
    ) as broker:
        yield broker


@pytest.fixture
def directory(certificates, tmp_path):
    """Of cluster a, with a tenth of its life left."""
    return shutil.copytree(due(certificates), tmp_path / "live")


@pytest.fixture
def kubelend(run_command):
    return lambda broker, directory, line: run_command(line, broker.url, directory)


def test_a_certificate_that_is_due_is_renewed_once_after_a_call(
    issuing, directory, certificates, kubelend
):
    old = serial_in(directory)
    code, out, err = kubelend(issuing, directory, "get reservations -o name")
    assert (code, out) == (0, "")
    note, nothing = err.splitlines()
    assert note.startswith(f"renewed the certificate in {directory}, valid until ")
    assert note.endswith("(in 30d)")
    assert nothing == "No reservations found."
    found = files.load_credentials(directory)
    assert found.certificate.serial_number != old
    assert identity.caller_from_certificate(found.certificate).name == "a"
    assert found.authorities == certificates.authority.trusted
    again = kubelend(issuing, directory, "get reservations -o json")
    assert again == (0, '{\n  "kind": "ReservationList",\n  "items": []\n}', "")


@pytest.mark.parametrize(
    "line",
    ["get reservations --no-auto-renew", "get reservations nothing", "certificate show"],
    ids=["flag", "failed call", "no call"],
)
def test_nothing_is_renewed(issuing, directory, kubelend, line):
    old = serial_in(directory)
    kubelend(issuing, directory, line)
    assert serial_in(directory) == old


def test_a_broker_without_an_authority_does_not_fail_the_command(
    certificates, directory, kubelend, tmp_path
):
    old = serial_in(directory)
    with broker_thread.running(certificates.server(), tmp_path) as broker:
        done = kubelend(broker, directory, "get reservations -o name")
        assert done == (0, "", "No reservations found.")
        assert serial_in(directory) == old
        code, out, err = kubelend(broker, directory, "certificate renew")
        assert (code != 0, out) == (True, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 0


def test_certificate_renew_renews_if_due_or_forced(issuing, directory, kubelend):
    code, out, _ = kubelend(issuing, directory, "certificate renew")
    assert code == 0
    assert out.startswith(f"renewed the certificate in {directory}, valid until ")
    renewed = serial_in(directory)
    code, out, err = kubelend(issuing, directory, "certificate renew")
    assert code == 0
    assert f"the certificate in {directory} is not due for renewal before " in out
    assert "--force" in err
    assert serial_in(directory) == renewed
    assert kubelend(issuing, directory, "certificate renew --force")[0] == 0
    assert serial_in(directory) != renewed
