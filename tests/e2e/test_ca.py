"""The authority's commands as processes: killed at every step, and asked for a passphrase."""

import os
import pty
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

import openssl
from kubelend.pki import authority as pki_authority
from kubelend.pki import files, identity
from kubelend.pki.authority import Authority
from kubelend.pki.passphrases import Passphrase
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
def directory(tmp_path):
    Authority.create("kubelend", now=NOW).save(tmp_path / "ca")
    return tmp_path / "ca"


def written(directory):
    return {path.name for path in directory.iterdir()}


def check_usable(directory, trusted):
    """Who trusts what was trusted before follows whatever is issued now, and the other way round."""
    authority = Authority.load(directory)
    issued = authority.issue(identity.client_profile("a"), now=NOW)
    out = directory.parent / "issued"
    files.save_credentials(out, issued, overwrite=True)
    (out / "before.crt").write_bytes(files.to_pem(trusted))
    assert openssl.accepts(out / "tls.crt", out / "before.crt")
    assert openssl.accepts(out / "tls.crt", out / "ca.crt")
    assert set(trusted) <= set(authority.trusted)


@openssl.needed
@pytest.mark.parametrize("step", range(6))
def test_a_rotation_killed_anywhere_leaves_an_authority_and_can_be_done_again(directory, step):
    old = Authority.load(directory)
    assert killed_before(step, "ca", "rotate", "--ca", directory)
    check_usable(directory, old.trusted)

    if not Authority.load(directory).is_rotating:
        pki_authority.rotate_authority(directory, now=NOW)
    rotated = Authority.load(directory)
    check_usable(directory, old.trusted)
    assert rotated.trusted == (rotated.certificate, old.certificate)
    pki_authority.finish_rotation(directory)
    assert Authority.load(directory).trusted == (rotated.certificate,)
    assert written(directory) == {"ca.crt", "ca.key", "dropped.crt"}


@openssl.needed
@pytest.mark.parametrize("step", range(7))
def test_an_end_killed_anywhere_leaves_an_authority_and_can_be_done_again(directory, step):
    old = Authority.load(directory)
    new = pki_authority.rotate_authority(directory, now=NOW)
    finish = ("ca", "rotate", "--finish", "--yes", "--ca", directory)
    assert killed_before(step, *finish)
    check_usable(directory, [new.certificate])

    assert not killed_before(1000, *finish)
    assert Authority.load(directory).trusted == (new.certificate,)
    assert files.load_dropped(directory) == (old.certificate,)
    assert written(directory) == {"ca.crt", "ca.key", "dropped.crt"}


def test_no_step_is_left_out_above(directory):
    assert not killed_before(6, "ca", "rotate", "--ca", directory)
    assert not killed_before(7, "ca", "rotate", "--finish", "--yes", "--ca", directory)


class Terminal:
    """A command that believes a person sits there."""

    def __init__(self, *arguments):
        self._master, slave = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kubelend", *map(str, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
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


def test_a_passphrase_can_come_from_another_program(tmp_path):
    """Without a file on disk: `--passphrase-file <(pass show kubelend)`."""
    line = f"{sys.executable} -m kubelend ca init --ca {tmp_path}/ca --passphrase-file <(echo x)"
    subprocess.run(["bash", "-c", line], check=True, capture_output=True)
    assert len(Authority.load(tmp_path / "ca", Passphrase("x")).trusted) == 1
    assert Path(tmp_path / "ca" / "ca.key").stat().st_mode & 0o777 == 0o600
