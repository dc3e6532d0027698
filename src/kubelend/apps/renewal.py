"""Renews a client certificate through the broker before it expires.

Commands check after each call whether renewal is due; a long-running process can use `Renewer.run`. Open
sessions reload the new files from the directory (`transports.session`, `transports.tls`).
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
from kubelend.kits import backoff, clock, files
from kubelend.kits.backoff import Backoff
from kubelend.kits.files import AtomicDirectory
from kubelend.pki import csr
from kubelend.pki import files as pki_files
from kubelend.pki import x509 as pki_x509
from kubelend.pki.files import Credentials
from kubelend.transports.client import BrokerClient
from kubelend.wire import admin_bodies

RENEWAL_BACKOFF = Backoff(
    retries=sys.maxsize, first=timedelta(seconds=10), longest=timedelta(minutes=30)
)
CHECK_INTERVAL = timedelta(hours=1)
"""Upper bound of the interval: other programs may replace the files, and clocks are adjusted."""

_MIN_PAUSE = timedelta(milliseconds=100)
_CERTIFICATE_FILES = (files.TLS_CERTIFICATE, files.TLS_KEY, files.CA_CERTIFICATES)

log = structlog.get_logger("kubelend.renewal")

RequestCertificate = Callable[[str], Awaitable[admin_bodies.IssuedCertificate]]
"""Sends a CSR to the broker over a connection authenticated with the old certificate."""

VerifyCredentials = Callable[[Path], Awaitable[object]]
"""Calls the broker with the certificate in another directory; raises if that fails."""


def renewer_for(client: BrokerClient, url: str, directory: Path, timeout: timedelta) -> Renewer:
    """Returns a renewer that uses an open client."""

    async def prove(staged: Path) -> None:
        async with BrokerClient(url, staged, timeout=timeout, backoff=backoff.NO_RETRIES) as fresh:
            await fresh.version()

    return Renewer(directory, client.certificates.renew, prove)


class Renewer:
    """Renews the certificate in one directory. A file lock ensures that one process at a time does so."""

    def __init__(
        self,
        directory: Path,
        request: RequestCertificate,
        verify: VerifyCredentials,
        now: Callable[[], datetime] = clock.utc_now,
    ) -> None:
        self._directory = directory
        self._request = request
        self._verify = verify
        self._now = now
        self._files = AtomicDirectory(directory, _CERTIFICATE_FILES)
        self._delays = RENEWAL_BACKOFF.delays()
        self._retry_at: datetime | None = None
        self._last_message = ""

    def renew_at(self) -> datetime:
        """When renewal is due: with 20 to 25 % of the lifetime left, random but equal in all processes."""
        return pki_x509.renewal_time(self._certificate())

    def is_due(self, now: datetime) -> bool:
        return now >= self.renew_at()

    async def run(self) -> None:
        """Renews whenever due. A root task; runs until cancelled."""
        while True:
            await self.renew_if_due(self._now())
            await asyncio.sleep(self._pause(self._now()).total_seconds())

    async def renew_if_due(self, now: datetime) -> Credentials | None:
        """Renews if due; returns the new credentials. A failure is logged once and retried later."""
        if self._retry_at is not None and now < self._retry_at:
            return None
        try:
            if not self.is_due(now):
                return None
            if reason := self._files.write_problem():
                self._on_managed_externally(reason, now)
                return None
            renewed = await self.renew(now)
        except KubelendError as error:
            self._on_failure(error, now)
            return None
        self._on_renewed(renewed, now)
        return renewed

    async def renew(self, now: datetime, *, force: bool = False) -> Credentials | None:
        """Renews and installs the new credentials; returns None if another process was faster."""
        if reason := self._files.write_problem():
            raise InvalidSettings(reason, hint="renew the files with the tool that manages them")
        with self._files.try_lock() as is_ours:
            if not is_ours or not (force or self.is_due(now)):
                return None
            old = pki_files.load_credentials(self._directory)
            # In a thread: creating an RSA key and writing to disk take time.
            renewal = await asyncio.to_thread(csr.begin_renewal, old)
            answer = await self._request(renewal.request)
            new = csr.accept_renewal(renewal, answer.certificate, answer.authorities, now)
            await self._install(new)
            return new

    async def _install(self, new: Credentials) -> None:
        """Installs files only after a successful call with them; broken ones would lock the client out."""
        try:
            staged = await asyncio.to_thread(self._files.stage, csr.credential_files(new))
            await self._verify(staged)
            await asyncio.to_thread(self._files.switch_to, staged)
        finally:
            self._files.remove_unused()

    def _on_renewed(self, renewed: Credentials | None, now: datetime) -> None:
        if renewed is None:
            # Another process is renewing; try again in case it fails.
            self._retry_at = now + self._delay(now)
            return
        self._delays, self._retry_at, self._last_message = RENEWAL_BACKOFF.delays(), None, ""
        end = renewed.certificate.not_valid_after_utc
        log.info("Certificate renewed", path=str(self._directory), expires_at=end.isoformat())

    def _on_managed_externally(self, reason: str, now: datetime) -> None:
        if self._is_new_message(reason):
            log.info("Certificate is managed externally, not renewing it", reason=reason)
        self._retry_at = now + CHECK_INTERVAL

    def _on_failure(self, error: KubelendError, now: datetime) -> None:
        if self._is_new_message(str(error)):
            log.warning(
                "Certificate renewal failed, will retry",
                path=str(self._directory),
                error=str(error),
            )
        self._retry_at = now + self._delay(now)

    def _is_new_message(self, text: str) -> bool:
        before, self._last_message = self._last_message, text
        return text != before

    def _delay(self, now: datetime) -> timedelta:
        """Exponential backoff, limited to an eighth of the certificate's remaining lifetime."""
        delay = timedelta(seconds=next(self._delays))
        with contextlib.suppress(InvalidSettings):
            left = self._certificate().not_valid_after_utc - now
            delay = min(delay, left / 8) if left > timedelta(0) else delay
        return max(delay, _MIN_PAUSE)

    def _pause(self, now: datetime) -> timedelta:
        """Returns the time until the next check."""
        try:
            wanted = self._retry_at or self.renew_at()
        except InvalidSettings:
            wanted = now
        return min(max(wanted - now, _MIN_PAUSE), CHECK_INTERVAL)

    def _certificate(self) -> x509.Certificate:
        return pki_files.load_certificates(self._directory / files.TLS_CERTIFICATE)[0]
