"""A secret on the command line is gone from what other processes see, and nothing else is."""

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from kubelend.kits import arguments

SECRET = "kl1.abcdefghij.very-secret-ünd-long"

_PROGRAM = """
import sys
from kubelend.kits import arguments
print(arguments.hide_argument(sys.argv[1]), sys.argv[1] == sys.argv[3], flush=True)
sys.stdin.read()
"""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/mem").exists(), reason="only Linux shows and changes a command line"
)


@contextmanager
def hiding(wanted, *others):
    """A process that hides an argument; gives what it says of it, and the process."""
    command = [sys.executable, "-c", _PROGRAM, wanted, *others]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().decode().strip(), process
        finally:
            process.kill()


def listed(process):
    """Its command line as `ps` shows it to everybody."""
    command = ["ps", "-ww", "-o", "args=", "-p", str(process.pid)]
    return subprocess.run(command, capture_output=True, check=True).stdout


def test_secret_is_seen_in_a_list_of_processes_until_it_is_hidden():
    with hiding("other", "--token", SECRET) as (_, process):
        assert SECRET.encode() in listed(process)


def test_hidden_secret_is_gone_everywhere_and_the_rest_is_as_it_was():
    with hiding(SECRET, "--token", SECRET, f"--again={SECRET}", "--out", "dir") as (said, process):
        assert said == "True True"
        shown = listed(process)
        raw = Path(f"/proc/{process.pid}/cmdline").read_bytes()
    assert SECRET.encode() not in shown + raw
    assert b"very-secret" not in shown + raw
    stars = b"*" * len(SECRET.encode())
    assert raw.split(b"\0")[-7:] == [
        *(stars, b"--token", stars, b"--again=" + stars, b"--out", b"dir", b"")
    ]


@pytest.mark.parametrize("secret", ["", "this is in no argument of pytest"])
def test_what_is_not_there_is_not_hidden(secret):
    before = Path("/proc/self/cmdline").read_bytes()
    assert arguments.hide_argument(secret) is False
    assert Path("/proc/self/cmdline").read_bytes() == before


@pytest.mark.parametrize("text", ["", "1 (x) S 2", "1 (a b) c) " + "0 " * 60])
def test_system_that_does_not_tell_where_arguments_are_is_left_alone(tmp_path, monkeypatch, text):
    status = tmp_path / "stat"
    status.write_text(text)
    monkeypatch.setattr(arguments, "_STATUS", status)
    assert arguments.hide_argument(sys.executable) is False


def test_system_without_such_files_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(arguments, "_STATUS", tmp_path / "none")
    assert arguments.hide_argument(sys.executable) is False
