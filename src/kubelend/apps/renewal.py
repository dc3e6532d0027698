"""Certificates that renew themselves: the holder asks the broker for a successor before its own ends.

An agent runs `Renewer.run` beside its work, and the commands ask after each call whether it is time. Who
follows the directory (`transports.sessions`, `transports.tls`) takes up the new files by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from pathlib import Path

import structlog
from cryptography import x509

from kubelend.core.errors import InvalidSettings, KubelendError
from kubelend.kits import backoff, clock, keyfiles
from kubelend.kits.backoff import Backoff
from kubelend.kits.generations import Generations
from kubelend.pki import files, lifetimes, renewals
from kubelend.pki.files import Credentials
from kubelend.transports.http_client import BrokerClient
from kubelend.wire import certificate_bodies

BACKOFF = Backoff(retries=sys.maxsize, first=timedelta(seconds=10), longest=timedelta(minutes=30))
LOOK_EVERY = timedelta(hours=1)
"""Others may exchange the files as well, and clocks are set."""

_MOMENT = timedelta(milliseconds=100)
_NAMES = (keyfiles.CERTIFICATE, keyfiles.KEY, keyfiles.AUTHORITIES)

log = structlog.get_logger("kubelend.renewal")

Ask = Callable[[str], Awaitable[certificate_bodies.IssuedCertificate]]
"""Sends a certificate request to the broker, over a connection that the old certificate vouches for."""

Prove = Callable[[Path], Awaitable[object]]
"""Calls the broker with the files of another directory, and raises if that does not work."""


def by_client(client: BrokerClient, url: str, directory: Path, timeout: timedelta) -> Renewer:
    """A renewer that asks over an open client."""

    async def prove(staged: Path) -> None:
        async with BrokerClient(url, staged, timeout=timeout, backoff=backoff.NONE) as fresh:
            await fresh.version()

    return Renewer(directory, client.certificates.renew, prove)


class Renewer:
    """Keeps the certificate of one directory fresh. One process at a time does so."""

    def __init__(
        self, directory: Path, ask: Ask, prove: Prove, now: Callable[[], datetime] = clock.utc_now
    ) -> None:
        self._directory = directory
        self._ask = ask
        self._prove = prove
        self._now = now
        self._files = Generations(directory, _NAMES)
        self._delays = BACKOFF.delays()
        self._not_before: datetime | None = None
        self._told = ""

    def renew_at(self) -> datetime:
        """When it is time: with 20 to 25 % of life left, at random but the same in every process."""
        return lifetimes.renew_at(self._certificate())

    def due(self, now: datetime) -> bool:
        return now >= self.renew_at()

    async def run(self) -> None:
        """For ever: the root task of a process that lives long."""
        while True:
            await self.renew_if_due(self._now())
            await asyncio.sleep(self._pause(self._now()).total_seconds())

    async def renew_if_due(self, now: datetime) -> Credentials | None:
        """The successor, if it was time and worked. What goes wrong is logged once and tried again later."""
        if self._not_before is not None and now < self._not_before:
            return None
        try:
            if not self.due(now):
                return None
            if reason := self._files.obstacle():
                self._leave(reason, now)
                return None
            renewed = await self.renew(now)
        except KubelendError as error:
            self._put_off(error, now)
            return None
        self._tell(renewed, now)
        return renewed

    async def renew(self, now: datetime, *, force: bool = False) -> Credentials | None:
        """The successor, which is in use from here on; None if another process was faster."""
        if reason := self._files.obstacle():
            raise InvalidSettings(reason, hint="let whoever put the files there renew them")
        with self._files.lock() as is_ours:
            if not is_ours or not (force or self.due(now)):
                return None
            old = files.load_credentials(self._directory)
            # Off the loop: an RSA key takes a while, and so does a disk.
            renewal = await asyncio.to_thread(renewals.begin, old)
            answer = await self._ask(renewal.request)
            new = renewals.accept(renewal, answer.certificate, answer.authorities, now)
            await self._exchange(new)
            return new

    async def _exchange(self, new: Credentials) -> None:
        """Only for files with which the broker was reached: a broken set would shut the holder out."""
        try:
            staged = await asyncio.to_thread(self._files.stage, renewals.contents(new))
            await self._prove(staged)
            await asyncio.to_thread(self._files.take, staged)
        finally:
            self._files.sweep()

    def _tell(self, renewed: Credentials | None, now: datetime) -> None:
        if renewed is None:
            # Another process is at it; should it fail, it is our turn.
            self._not_before = now + self._delay(now)
            return
        self._delays, self._not_before, self._told = BACKOFF.delays(), None, ""
        end = renewed.certificate.not_valid_after_utc
        log.info("certificate renewed", path=str(self._directory), until=end.isoformat())

    def _leave(self, reason: str, now: datetime) -> None:
        if self._is_news(reason):
            log.info("certificate is left to others to renew", reason=reason)
        self._not_before = now + LOOK_EVERY

    def _put_off(self, error: KubelendError, now: datetime) -> None:
        if self._is_news(str(error)):
            log.warning("certificate not renewed", path=str(self._directory), problem=str(error))
        self._not_before = now + self._delay(now)

    def _is_news(self, text: str) -> bool:
        before, self._told = self._told, text
        return text != before

    def _delay(self, now: datetime) -> timedelta:
        """Longer each time, but never so long that the rest of the certificate's life goes by."""
        delay = timedelta(seconds=next(self._delays))
        with contextlib.suppress(InvalidSettings):
            left = self._certificate().not_valid_after_utc - now
            delay = min(delay, left / 8) if left > timedelta(0) else delay
        return max(delay, _MOMENT)

    def _pause(self, now: datetime) -> timedelta:
        """Until there may be something to do."""
        try:
            wanted = self._not_before or self.renew_at()
        except InvalidSettings:
            wanted = now
        return min(max(wanted - now, _MOMENT), LOOK_EVERY)

    def _certificate(self) -> x509.Certificate:
        return files.load_certificates(self._directory / keyfiles.CERTIFICATE)[0]
