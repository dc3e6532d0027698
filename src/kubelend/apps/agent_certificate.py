"""Renews the agent's certificate in child processes.

`cryptography` would cost the agent 11 MB of memory for one renewal a year. So the agent runs
`kubelend certificate show` to find out when renewal is due, and `kubelend certificate renew` to renew.
Open connections reload the files themselves (`transports.tls.FileReloader`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import msgspec

from kubelend.agent.standing import Standing
from kubelend.core.errors import InvalidSettings, KubelendError, Unavailable, UnexpectedAnswer
from kubelend.kits import keyfiles
from kubelend.kits.backoff import Backoff

LOOK_EVERY = timedelta(hours=1)
"""Upper bound of the interval: other programs may replace the files, and clocks are adjusted."""

BACKOFF = Backoff(retries=sys.maxsize, first=timedelta(seconds=10), longest=timedelta(minutes=30))
PATIENCE = timedelta(minutes=2)
PART = "certificate"

_MOMENT = timedelta(seconds=1)


class _Shown(msgspec.Struct, rename="camel"):
    name: str
    renew_at: datetime


class CertificateKeeper:
    """Renews the certificate in one directory; `run` is a root task."""

    def __init__(
        self,
        directory: Path,
        url: str,
        standing: Standing,
        clock: Callable[[], datetime],
        renew_at: datetime | None = None,
    ) -> None:
        """`renew_at` is when the current certificate is due for renewal, if known."""
        self._path = directory / keyfiles.CERTIFICATE
        self._seen = _changed_at(self._path)
        self._due = renew_at
        self._files = ("--cert-path", str(directory))
        self._url = url
        self._standing = standing
        self._clock = clock
        self._delays = BACKOFF.delays()

    async def run(self) -> None:
        while True:
            try:
                pause = await self._look()
            except KubelendError as problem:
                self._standing.report(PART, str(problem))
                pause = timedelta(seconds=next(self._delays))
            else:
                self._standing.report(PART)
                self._delays = BACKOFF.delays()
            await asyncio.sleep(pause.total_seconds())

    async def _look(self) -> timedelta:
        """Renews the certificate if due; returns the time until the next check."""
        changed_at = _changed_at(self._path)
        if self._due is None or changed_at != self._seen:
            self._due, self._seen = await self._ask(), changed_at
        if self._due <= self._clock():
            await _child("certificate", "renew", *self._files, "--broker-url", self._url)
            self._due, self._seen = await self._ask(), _changed_at(self._path)
        return min(max(self._due - self._clock(), _MOMENT), LOOK_EVERY)

    async def _ask(self) -> datetime:
        shown = await _child("certificate", "show", *self._files, "--output", "json")
        try:
            return msgspec.json.decode(shown, type=_Shown).renew_at
        except msgspec.MsgspecError as error:
            raise UnexpectedAnswer(f"`kubelend certificate show`: {error}") from error


def _changed_at(path: Path) -> int:
    """Returns 0 if the file does not exist."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


async def _child(*arguments: str) -> bytes:
    """Runs a `kubelend` command and returns its output; raises with its error message if it fails."""
    command = f"`kubelend {arguments[0]} {arguments[1]}`"
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kubelend", *arguments),
            env=_environment(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise Unavailable(f"{command} cannot be started: {error.strerror}") from error
    try:
        async with asyncio.timeout(PATIENCE.total_seconds()):
            out, err = await process.communicate()
    except TimeoutError:
        raise Unavailable(f"{command} timed out") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    if process.returncode:
        message = err.decode(errors="replace").strip().removeprefix("error: ")
        raise InvalidSettings(f"{command}: {message}")
    return out


def _environment() -> dict[str, str]:
    """Returns the environment without the agent's settings, which the command would misread."""
    return {name: text for name, text in os.environ.items() if not name.startswith("KUBELEND_")}
