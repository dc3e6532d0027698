"""Commands as processes of their own, and a look at what they leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kubelend.apps.agent_launcher import SETTINGS_VARIABLE
from waiting import FACTOR, PATIENCE


def kubelend(*arguments: str, temporary: Path) -> subprocess.Popen[str]:
    """Start a command whose temporary files go to this directory."""
    environment = {
        **{name: text for name, text in os.environ.items() if not name.startswith("KUBELEND_")},
        "KUBELEND_PATIENCE": str(FACTOR),
        "TMPDIR": str(temporary),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "kubelend", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        process_group=0,
    )


def finished(process: subprocess.Popen[str], patience: float = PATIENCE) -> tuple[int, str, str]:
    """Wait for its end: exit code, output and errors."""
    try:
        out, err = process.communicate(timeout=patience)
    finally:
        process.kill()
    return process.returncode, out, err


def output(*command: str | Path) -> str:
    """What a program prints that goes well."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Running(NamedTuple):
    """A process as /proc shows it."""

    pid: int
    command: str


def naming(directory: Path) -> list[Running]:
    """The running processes whose command line, or settings of an agent, mention a directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        # It may end while we look.
        with suppress(OSError):
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(directory) in command + _settings(path.parent):
                found.append(Running(int(path.parent.name), command))
    return found


def _settings(process: Path) -> str:
    """An agent's command line is short: it is started anew with its settings in a variable."""
    variables = (process / "environ").read_bytes().split(b"\0")
    ours = (text for text in variables if text.startswith(SETTINGS_VARIABLE.encode()))
    return next(ours, b"").decode(errors="replace")
