"""Everything of the broker that depends on certificate files, reloaded when they change.

`CertificateManager` owns the TLS contexts, the authenticator, the CA that issues certificates
(`ReloadingAuthority`) and the renewal of the broker's own certificate (`ServerCertificateRenewer`).
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import structlog
from cryptography import x509

from kubelend.api.callers import Callers
from kubelend.apps.authorities import FollowedAuthority
from kubelend.apps.own_certificate import OwnCertificate
from kubelend.apps.settings import BrokerSettings
from kubelend.broker.metrics import Metrics
from kubelend.broker.writer import Writer
from kubelend.core.errors import InvalidSettings
from kubelend.kits import keyfiles
from kubelend.pki import files, passphrases, pins
from kubelend.pki.passphrases import Passphrase
from kubelend.transports import tls

log = structlog.get_logger("kubelend.broker")


class Trust:
    """Reloads certificate files and applies them; `follow` is a root task."""

    def __init__(self, settings: BrokerSettings, writer: Writer, metrics: Metrics) -> None:
        self._directory = settings.certificates
        self._interval = settings.certificate_check_interval.total_seconds()
        self._writer = writer
        self._metrics = metrics
        self._told_of: set[x509.Certificate] = set()
        self.authority = _authority(settings)
        self._has_new_authority = False
        authority = self.authority
        self._own = None if authority is None else OwnCertificate(self._directory, authority)
        self._server = tls.ReloadingServerContext(
            self._directory, report=_keeps_old, authorities=self._believed
        )
        # Reads the same files as the context above, which reports their errors.
        self._enrolment = tls.ReloadingServerContext(
            self._directory, report=lambda _: None, ask=False
        )
        self.server = self._server.context
        """TLS context of the REST interface, which requires a client certificate."""
        self.enrolment = self._enrolment.context
        """TLS context of the enrolment interface, which requests no client certificate."""
        self.callers = Callers(
            self._directory, writer, self._server, trust_proxies=settings.trust_proxies
        )

    async def follow(self) -> None:
        """Reloads changed files until cancelled. New connections use the new certificate, open ones stay.

        If a CA was removed, open connections are re-authenticated at their next call.
        """
        self._measure()
        while True:
            await self.refresh()
            await asyncio.sleep(self._interval)

    async def refresh(self) -> None:
        """Checks all files once, and renews the broker's own certificate if due."""
        if self.authority is not None and self.authority.refresh():
            self._has_new_authority = True
            log.info("CA reloaded")
        if self._own is not None:
            await self._own.renew_if_due(self._writer.clock())
        self._enrolment.refresh()
        believed = self._server.generation
        if self._server.refresh(again=self._has_new_authority):
            self._has_new_authority = False
            log.info("Certificates reloaded", path=str(self._directory))
            self._take_up()
        if self._server.generation != believed:
            log.warning("CA is no longer trusted, re-authenticating open connections")
            self._writer.feeds.wake_all()

    def _believed(self) -> str:
        """Returns the CAs that verify clients, in PEM form. Dropped CAs are excluded even if in `ca.crt`."""
        if self.authority is None:
            return ""
        own = files.load_certificates(self._directory / keyfiles.AUTHORITIES)
        dropped = self.authority.dropped
        self._tell_of(dropped.intersection(own))
        believed = dict.fromkeys((*own, *self.authority.trusted))
        return files.to_pem(each for each in believed if each not in dropped).decode()

    def _tell_of(self, dropped: set[x509.Certificate]) -> None:
        for each in dropped - self._told_of:
            log.warning(
                "Ignoring CA in ca.crt that was dropped by a rotation",
                path=str(self._directory / keyfiles.AUTHORITIES),
                ca=each.subject.rfc4514_string(),
                pin=str(pins.pin(each)),
            )
        self._told_of |= dropped

    def _take_up(self) -> None:
        try:
            self.callers.refresh()
            if self.authority is not None:
                self.authority.look()
            self._measure()
        except InvalidSettings as problem:  # the files are being changed, and will be read again
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

    def passphrase() -> Passphrase | None:
        return passphrases.find(file, os.environ)

    return FollowedAuthority(
        Path(settings.ca_path),
        passphrase,
        settings.certificates,
        settings.certificate_lifetime,
        _cannot_sign,
    )


def _cannot_sign(problem: InvalidSettings) -> None:
    log.error("CA reload failed, not issuing certificates", error=str(problem))


def _keeps_old(problem: InvalidSettings) -> None:
    log.error("Certificate reload failed, keeping the previous ones", error=str(problem))
