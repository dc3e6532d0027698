"""Child processes: no shell, a timeout, and the last line of stderr as the error.

Each child leads its own process group, so that killing the group also kills its descendants.
`peerings.liqoctl` and `kube.auth` run programs with it.
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

MAX_OUTPUT_BYTES: Final = 1 << 20
"""Limit of captured output; only the end is retained. Expected outputs have a few thousand bytes."""

MAX_LINE_LENGTH: Final = 200
KILL_TIMEOUT: Final = 5.0
"""Seconds to wait for a killed child."""

_OWN_VARIABLES: Final = "KUBELEND_"


async def run_program(
    program: str,
    *arguments: str,
    timeout: timedelta,
    name: str = "",
    environment: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    timeout_hint: str = "",
    missing_hint: str = "install it, or give the path of the program",
) -> bytes:
    """Run a program and return its standard output. A failure is `Unavailable`, because a retry may
    succeed.

    A program that cannot be started is `InvalidSettings`. `timeout_hint` and `missing_hint` are for a
    timeout and for a program that cannot be started. `name` replaces its name in messages. `stdin` is for
    input that others must not see, as they see arguments.
    """
    what = name or " ".join((Path(program).name, *_subcommands(arguments)))
    child = await _start_child(program, arguments, environment, missing_hint, has_input=bool(stdin))
    try:
        async with asyncio.timeout(timeout.total_seconds()):
            if child.stdin is not None:
                await _write_all(child.stdin, stdin)
            output, errors, status = await _communicate(child)
    except TimeoutError:
        await _kill_group(child)
        raise Unavailable(
            f"{what} timed out after {durations.format_duration_short(timeout)}",
            hint=timeout_hint,
        ) from None
    except asyncio.CancelledError:
        await _kill_group(child)
        raise
    if status != 0:
        raise Unavailable(f"{what} failed: {last_error_line(errors) or f'exit status {status}'}")
    return output


def last_error_line(output: bytes) -> str:
    """Return the last non-empty line, printable and with secrets redacted."""
    text = _PEM_BLOCK.sub(" ", _ESCAPES.sub("", output.decode("utf-8", "replace")))
    lines = [line for line in map(_printable, text.splitlines()) if line]
    return _SECRET.sub("[redacted]", lines[-1])[:MAX_LINE_LENGTH] if lines else ""


_ESCAPES: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Without an end marker everything up to the end: a truncated key is secret too.
_PEM_BLOCK: Final = re.compile(r"-----BEGIN.*?(?:-----END[^-]*+-----|\Z)", re.DOTALL)
_SECRET: Final = re.compile(
    r"eyJ[\w-]+\.[\w.-]+"  # a signed token
    r"|(?<=://)[^/\s@]+(?=@)"
    r"|(?i:(?:bearer|token|password|secret)['\"]?[ =:]+)\S+"
    r"|[A-Za-z0-9+/=]{60,}"  # a key or certificate in base64
)


def _printable(line: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in line).split())


def _subcommands(arguments: tuple[str, ...]) -> list[str]:
    """Return the subcommands without flags, for messages: `create resourceslice`."""
    verbs = []
    for argument in arguments[:2]:
        if not argument.isalpha():
            break
        verbs.append(argument)
    return verbs


async def _start_child(
    program: str,
    arguments: tuple[str, ...],
    environment: Mapping[str, str] | None,
    missing_hint: str,
    *,
    has_input: bool,
) -> Process:
    known = os.environ if environment is None else environment
    # Our own settings may be secrets, so other programs do not inherit them.
    passed = {name: value for name, value in known.items() if not name.startswith(_OWN_VARIABLES)}
    try:
        return await asyncio.create_subprocess_exec(
            program,
            *arguments,
            stdin=PIPE if has_input else DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            env=passed,
            start_new_session=True,
        )
    except OSError as error:
        raise InvalidSettings(
            f"{program} cannot be run: {error.strerror}", hint=missing_hint
        ) from None


async def _write_all(stream: asyncio.StreamWriter, content: bytes) -> None:
    with contextlib.suppress(OSError):  # it ended without reading: its exit status says why
        stream.write(content)
        await stream.drain()
    stream.close()


async def _communicate(child: Process) -> tuple[bytes, bytes, int]:
    """Return stdout, stderr and the exit status once all writers have closed the pipes."""
    return await asyncio.gather(_read_tail(child.stdout), _read_tail(child.stderr), child.wait())


async def _read_tail(stream: asyncio.StreamReader | None) -> bytes:
    tail = b""
    while stream is not None and (chunk := await stream.read(1 << 16)):
        tail = (tail + chunk)[-MAX_OUTPUT_BYTES:]
    return tail


async def _kill_group(child: Process) -> None:
    """Kill the process group, also if the child itself has already exited."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(KILL_TIMEOUT):
            await _communicate(child)
