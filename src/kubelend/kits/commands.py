"""Other programs as child processes: without a shell, bounded in time, and with their last words kept.

A child is the leader of a process group of its own, so that its end is the end of all it has started.
`peerings.liqoctl` runs its programs with it, and `kube.exec_plugins` those that a kubeconfig names.
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
"""Kept of what a program says, from the end; an answer of ours takes some thousand."""

LONGEST_LINE: Final = 200
DEATH_WITHIN: Final = 5.0
"""Seconds in which a killed child is gone, unless the kernel itself hangs."""

_OURS: Final = "KUBELEND_"


async def run(
    program: str,
    *arguments: str,
    within: timedelta,
    environment: Mapping[str, str] | None = None,
    late: str = "",
    missing: str = "install it, or give the path of the program",
) -> bytes:
    """What it writes to standard output. A failure is `Unavailable`: the same may pass later.

    A program that cannot be run at all is `InvalidSettings`. `late` and `missing` say what to do.
    """
    what = " ".join((Path(program).name, *_verbs(arguments)))
    child = await _start(program, arguments, environment, missing)
    try:
        async with asyncio.timeout(within.total_seconds()):
            output, errors, status = await _end_of(child)
    except TimeoutError:
        await _kill(child)
        raise Unavailable(
            f"{what} has not ended within {durations.short(within)}",
            hint=late,
        ) from None
    except asyncio.CancelledError:
        await _kill(child)
        raise
    if status != 0:
        raise Unavailable(f"{what} failed: {last_words(errors) or f'exit status {status}'}")
    return output


def last_words(said: bytes) -> str:
    """The last line that says something, on one printable line and without secrets."""
    text = _HIDDEN.sub(" ", _ESCAPES.sub("", said.decode("utf-8", "replace")))
    lines = [line for line in map(_printable, text.splitlines()) if line]
    return _SECRET.sub("[redacted]", lines[-1])[:LONGEST_LINE] if lines else ""


_ESCAPES: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Up to the end where no end marker follows: half a key is secret too.
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
    """What it was told to do, without the flags: `create resourceslice`."""
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
    # Settings of ours may be secrets, and are no business of any other program.
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
    """What it says until nobody can say anything more, and its exit status."""
    return await asyncio.gather(_read(child.stdout), _read(child.stderr), child.wait())


async def _read(stream: asyncio.StreamReader | None) -> bytes:
    kept = b""
    while stream is not None and (chunk := await stream.read(1 << 16)):
        kept = (kept + chunk)[-MOST_BYTES:]
    return kept


async def _kill(child: Process) -> None:
    """With all that it has started; also if it has ended and left something behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DEATH_WITHIN):
            await _end_of(child)
