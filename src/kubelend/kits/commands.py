"""Child processes: no shell, a timeout, and the last line of stderr as the error.

Each child leads its own process group, so that killing the group also kills its descendants.
`peerings.liqoctl` and `kube.exec_plugins` run programs with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Final

from kubelend.core import durations
from kubelend.core.errors import InvalidSettings, Unavailable

MOST_BYTES: Final = 1 << 20
"""Limit of captured output; only the end is kept. Expected outputs have a few thousand bytes."""

LONGEST_LINE: Final = 200
DEATH_WITHIN: Final = 5.0
"""Seconds to wait for a killed child."""

_OURS: Final = "KUBELEND_"


async def run(
    program: str,
    *arguments: str,
    within: timedelta,
    environment: Mapping[str, str] | None = None,
    late: str = "",
    missing: str = "install it, or give the path of the program",
) -> bytes:
    """Run a program and return its standard output. A failure is `Unavailable`, because a retry may
    succeed.

    A program that cannot be started is `InvalidSettings`. `late` and `missing` are the hints for a timeout
    and for a program that cannot be started.
    """
    what = " ".join((Path(program).name, *_verbs(arguments)))
    child = await _start(program, arguments, environment, missing)
    try:
        async with asyncio.timeout(within.total_seconds()):
            output, errors, status = await _end_of(child)
    except TimeoutError:
        await _kill(child)
        raise Unavailable(
            f"{what} timed out after {durations.short(within)}",
            hint=late,
        ) from None
    except asyncio.CancelledError:
        await _kill(child)
        raise
    if status != 0:
        raise Unavailable(f"{what} failed: {last_words(errors) or f'exit status {status}'}")
    return output


def last_words(said: bytes) -> str:
    """Return the last non-empty line, printable and with secrets redacted."""
    text = _HIDDEN.sub(" ", _ESCAPES.sub("", said.decode("utf-8", "replace")))
    lines = [line for line in map(_printable, text.splitlines()) if line]
    return _SECRET.sub("[redacted]", lines[-1])[:LONGEST_LINE] if lines else ""


_ESCAPES: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Without an end marker everything up to the end: a truncated key is secret too.
_HIDDEN: Final = re.compile(r"-----BEGIN.*?(?:-----END[^-]*+-----|\Z)", re.DOTALL)
_SECRET: Final = re.compile(
    r"eyJ[\w-]+\.[\w.-]+"  # a signed token
    r"|(?<=://)[^/\s@]+(?=@)"
    r"|(?i:(?:bearer|token|password|secret)['\"]?[ =:]+)\S+"
    r"|[A-Za-z0-9+/=]{60,}"  # a key or certificate in base64
)


def _printable(line: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in line).split())


def _verbs(arguments: tuple[str, ...]) -> list[str]:
    """Return the subcommands without flags, for messages: `create resourceslice`."""
    verbs = []
    for argument in arguments[:2]:
        if not argument.isalpha():
            break
        verbs.append(argument)
    return verbs


async def _start(
    program: str,
    arguments: tuple[str, ...],
    environment: Mapping[str, str] | None,
    missing: str,
) -> Process:
    known = os.environ if environment is None else environment
    # Our own settings may be secrets, so other programs do not inherit them.
    passed = {name: value for name, value in known.items() if not name.startswith(_OURS)}
    try:
        return await asyncio.create_subprocess_exec(
            program,
            *arguments,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            env=passed,
            start_new_session=True,
        )
    except OSError as problem:
        raise InvalidSettings(
            f"{program} cannot be run: {problem.strerror}", hint=missing
        ) from None


async def _end_of(child: Process) -> tuple[bytes, bytes, int]:
    """Return stdout, stderr and the exit status once all writers have closed the pipes."""
    return await asyncio.gather(_read(child.stdout), _read(child.stderr), child.wait())


async def _read(stream: asyncio.StreamReader | None) -> bytes:
    tail = b""
    while stream is not None and (chunk := await stream.read(1 << 16)):
        tail = (tail + chunk)[-MOST_BYTES:]
    return tail


async def _kill(child: Process) -> None:
    """Kill the process group, also if the child itself has already exited."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DEATH_WITHIN):
            await _end_of(child)
