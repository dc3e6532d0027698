"""Output that nobody reads, or that cannot be written, never hides the exit code of a command."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kubelend.cli.output import ExitCode
from waiting import PATIENCE

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full here")
KUBELEND = Path(sys.executable).with_name("kubelend")
PROGRAM = """
from kubelend.cli import app, main
from kubelend.core.errors import NotFound

def print_and_fail(*_):
    print("x")
    raise NotFound("gone")

{change}
main.main(["version"])
"""


def run(stdout, *command):
    """As a user's shell would: with a buffer."""
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        command,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=PATIENCE,
        env=environment,
    )
    return done.returncode, done.stderr


def program(change):
    return sys.executable, "-c", PROGRAM.format(change=change)


COMMANDS = [
    pytest.param((KUBELEND, "version"), id="small"),
    pytest.param((KUBELEND, "--help"), id="help"),
    pytest.param(program("app.kubelend.__version__ = 'x' * 1_000_000"), id="large"),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_reader_that_stops_early_is_no_failure(command):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert run(writing, *command) == (ExitCode.OK, "")
    finally:
        os.close(writing)


@needs_full
@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_is_one_line_and_exit_code_1(command):
    with FULL.open("w") as full:
        assert run(full, *command) == (
            ExitCode.UNEXPECTED,
            "error: the output could not be written: No space left on device\n",
        )


@needs_full
@pytest.mark.parametrize(
    "command, code",
    [
        pytest.param((KUBELEND, "get", "bogus"), ExitCode.USAGE, id="no output"),
        pytest.param(
            program("app.Versions = print_and_fail"), ExitCode.NOT_FOUND, id="some output"
        ),
    ],
)
def test_a_command_that_failed_keeps_its_exit_code(command, code):
    with FULL.open("w") as full:
        found, err = run(full, *command)
    assert (found, err.count("\n")) == (code, 1)


def test_a_command_works_without_standard_output():
    command = ["sh", "-c", f"{KUBELEND} version >&-"]
    assert subprocess.run(command, check=False, timeout=PATIENCE).returncode == ExitCode.OK
