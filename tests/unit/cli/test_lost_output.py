"""Output that nobody reads, or that cannot be written, ends a command in one way only."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kubelend.cli import main
from kubelend.cli.exit_codes import ExitCode
from waiting import PATIENCE

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full here")
KUBELEND = Path(sys.executable).with_name("kubelend")
LARGE = "import sys; from kubelend.cli import main, output, app; {}; main.main(['version'])"
"""More than any buffer holds: each of several writes fails."""


def ended(stdout, *command):
    done = subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, timeout=PATIENCE
    )
    return done.returncode, done.stderr


def large(count):
    told = f"app.kubelend.__version__ = 'x' * {count}"
    return (sys.executable, "-c", LARGE.format(told))


COMMANDS = [
    pytest.param((KUBELEND, "version"), id="small"),
    pytest.param((KUBELEND, "--help"), id="help"),
    pytest.param((KUBELEND, "completion", "bash"), id="script"),
    pytest.param(large(9000), id="buffer"),
    pytest.param(large(1_000_000), id="large"),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_reader_that_has_had_enough_is_no_failure(command):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert ended(writing, *command) == (ExitCode.OK, "")
    finally:
        os.close(writing)


@needs_full
@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_is_told_in_one_line(command):
    with FULL.open("w") as full:
        assert ended(full, *command) == (
            ExitCode.UNEXPECTED,
            "error: the output could not be written: No space left on device\n",
        )


@needs_full
def test_a_command_that_failed_keeps_its_exit_code():
    with FULL.open("w") as full:
        code, told = ended(full, KUBELEND, "get", "bogus")
    assert code == ExitCode.USAGE
    assert told.count("\n") == 1


def test_without_any_output_a_command_works():
    done = subprocess.run(["sh", "-c", f"{KUBELEND} version >&-"], check=False, timeout=PATIENCE)
    assert done.returncode == ExitCode.OK


@needs_full
def test_what_is_under_way_goes_on_and_who_flushes_is_told():
    with FULL.open("wb") as full:
        output = main.TolerantOutput(full, encoding="utf-8")
        for _ in range(3):
            assert output.write("x" * 100_000) == 100_000
        with pytest.raises(main.OutputLost, match="No space left on device"):
            output.flush()
        output.cause = None
        output.detach()
