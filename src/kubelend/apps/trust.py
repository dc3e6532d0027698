"""All of the broker that hangs on certificate files, and follows them while it runs.

Its own certificate and whom it lets in, the authority that signs for newcomers, and who a caller is.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import structlog

from kubelend.api.callers import Callers
from kubelend.apps.authorities import FollowedAuthority
from kubelend.apps.own_certificate import OwnCertificate
from kubelend.apps.settings import BrokerSettings
from kubelend.broker.metrics import Metrics
from kubelend.broker.ports import Clock
from kubelend.core.errors import InvalidSettings
from kubelend.core.registry import Registry
from kubelend.pki import passphrases
from kubelend.transports import tls

log = structlog.get_logger("kubelend.broker")


class Trust:
    """Made by the composition root; `follow` is a root task."""

    def __init__(
        self,
        settings: BrokerSettings,
        now: Clock,
        registry: Callable[[], Registry],
        metrics: Metrics,
    ) -> None:
        self._directory = settings.http_cert_path
        self._interval = settings.certificate_check_interval.total_seconds()
        self._now = now
        self._metrics = metrics
        self.authority = _authority(settings)
        self._has_new_authority = False
        authority = self.authority
        self._own = None if authority is None else OwnCertificate(self._directory, authority)
        self._server = tls.ReloadingServerContext(
            self._directory,
            report=_keeps_old,
            authorities=lambda: "" if authority is None else authority.trusted_text,
        )
        # It reads the same files as the one above, which reports what is wrong with them.
        self._enrolment = tls.ReloadingServerContext(
            self._directory, report=lambda _: None, ask=False
        )
        self.server = self._server.context
        """For those who have a certificate."""
        self.enrolment = self._enrolment.context
        """For newcomers, who have none."""
        self.callers = Callers(
            self._directory,
            now,
            registry,
            trust_proxies=settings.trust_proxies,
            authorities=lambda: () if authority is None else authority.trusted,
        )

    async def follow(self) -> None:
        """Take up changed files: new connections see the new certificate, open ones go on."""
        self._measure()
        while True:
            await self.refresh()
            await asyncio.sleep(self._interval)

    async def refresh(self) -> None:
        """Look at all files once, and renew the broker's own certificate if that is due and ours to do."""
        if self.authority is not None and self.authority.refresh():
            self._has_new_authority = True
            log.info("authority reloaded")
        if self._own is not None:
            await self._own.renew_if_due(self._now())
        self._enrolment.refresh()
        if self._server.refresh(again=self._has_new_authority):
            self._has_new_authority = False
            log.info("certificates reloaded", path=str(self._directory))
            self._take_up()

    def _take_up(self) -> None:
        try:
            self.callers.refresh()
            if self.authority is not None:
                self.authority.look()
            self._measure()
        except InvalidSettings as problem:  # they change again, and so are read again
            _keeps_old(problem)

    def _measure(self) -> None:
        self._metrics.certificate("server", tls.expires_at(self._directory))
        if self.authority is not None:
            end = self.authority.current.certificate.not_valid_after_utc
            self._metrics.certificate("authority", end)


def _authority(settings: BrokerSettings) -> FollowedAuthority | None:
    if not settings.ca_path:
        return None
    file = Path(settings.ca_passphrase_file) if settings.ca_passphrase_file else None
    return FollowedAuthority(
        Path(settings.ca_path),
        passphrases.find(file, os.environ),
        settings.http_cert_path,
        settings.certificate_lifetime,
        _keeps_old,
    )


def _keeps_old(problem: InvalidSettings) -> None:
    log.error("certificates not reloaded, the old ones stay in use", problem=str(problem))
