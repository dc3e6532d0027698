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

from kubelend.api.callers import Authenticator
from kubelend.apps.authorities import ReloadingAuthority
from kubelend.apps.own_certificate import ServerCertificateRenewer
from kubelend.apps.settings import BrokerSettings
from kubelend.broker.metrics import Metrics
from kubelend.broker.writer import LedgerWriter
from kubelend.core.errors import InvalidSettings
from kubelend.kits import keyfiles
from kubelend.pki import files, passphrases, pins
from kubelend.pki.passphrases import Passphrase
from kubelend.transports import tls

log = structlog.get_logger("kubelend.broker")


class CertificateManager:
    """Reloads certificate files and applies them; `follow` is a root task."""

    def __init__(self, settings: BrokerSettings, writer: LedgerWriter, metrics: Metrics) -> None:
        self._directory = settings.certificate_directory
        self._interval = settings.certificate_check_interval.total_seconds()
        self._writer = writer
        self._metrics = metrics
        self._reported_dropped: set[x509.Certificate] = set()
        self.authority = _open_authority(settings)
        self._has_new_authority = False
        authority = self.authority
        self._server_renewer = (
            None if authority is None else ServerCertificateRenewer(self._directory, authority)
        )
        self._server_reloader = tls.ReloadingServerContext(
            self._directory, report=_log_certificate_error, authorities=self._trusted_pem
        )
        # Reads the same files as the context above, which reports their errors.
        self._enrolment_reloader = tls.ReloadingServerContext(
            self._directory, report=lambda _: None, require_certificate=False
        )
        self.server_context = self._server_reloader.context
        """TLS context of the REST interface, which requires a client certificate."""
        self.enrolment_context = self._enrolment_reloader.context
        """TLS context of the enrolment interface, which requests no client certificate."""
        self.authenticator = Authenticator(
            self._directory, writer, self._server_reloader, trust_proxies=settings.trust_proxies
        )

    async def run(self) -> None:
        """Reloads changed files until cancelled. New connections use the new certificate, open ones stay.

        If a CA was removed, open connections are re-authenticated at their next call.
        """
        self._update_metrics()
        while True:
            await self.refresh()
            await asyncio.sleep(self._interval)

    async def refresh(self) -> None:
        """Checks all files once, and renews the broker's own certificate if due."""
        if self.authority is not None and self.authority.refresh():
            self._has_new_authority = True
            log.info("CA reloaded")
        if self._server_renewer is not None:
            await self._server_renewer.renew_if_due(self._writer.clock())
        self._enrolment_reloader.refresh()
        believed = self._server_reloader.generation
        if self._server_reloader.refresh(again=self._has_new_authority):
            self._has_new_authority = False
            log.info("Certificates reloaded", path=str(self._directory))
            self._apply_reloaded()
        if self._server_reloader.generation != believed:
            log.warning("CA is no longer trusted, re-authenticating open connections")
            self._writer.streams.wake_all()

    def _trusted_pem(self) -> str:
        """Returns the CAs that verify clients, in PEM form. Dropped CAs are excluded even if in `ca.crt`."""
        if self.authority is None:
            return ""
        own = files.load_certificates(self._directory / keyfiles.CA_CERTIFICATES)
        dropped = self.authority.dropped
        self._report_dropped(dropped.intersection(own))
        believed = dict.fromkeys((*own, *self.authority.trusted))
        return files.to_pem(each for each in believed if each not in dropped).decode()

    def _report_dropped(self, dropped: set[x509.Certificate]) -> None:
        for each in dropped - self._reported_dropped:
            log.warning(
                "Ignoring CA in ca.crt that was dropped by a rotation",
                path=str(self._directory / keyfiles.CA_CERTIFICATES),
                ca=each.subject.rfc4514_string(),
                pin=str(pins.ca_pin(each)),
            )
        self._reported_dropped |= dropped

    def _apply_reloaded(self) -> None:
        try:
            self.authenticator.refresh()
            if self.authority is not None:
                self.authority.find_trust_anchor()
            self._update_metrics()
        except InvalidSettings as problem:  # the files are being changed, and will be read again
            _log_certificate_error(problem)

    def _update_metrics(self) -> None:
        self._metrics.set_certificate_expiry("server", tls.certificate_expiry(self._directory))
        if self.authority is not None:
            end = self.authority.current.certificate.not_valid_after_utc
            self._metrics.set_certificate_expiry("authority", end)


def _open_authority(settings: BrokerSettings) -> ReloadingAuthority | None:
    if not settings.ca_path:
        return None
    file = Path(settings.ca_passphrase_file) if settings.ca_passphrase_file else None

    def passphrase() -> Passphrase | None:
        return passphrases.load_passphrase(file, os.environ)

    return ReloadingAuthority(
        Path(settings.ca_path),
        passphrase,
        settings.certificate_directory,
        settings.certificate_lifetime,
        _log_authority_error,
    )


def _log_authority_error(problem: InvalidSettings) -> None:
    log.error("CA reload failed, not issuing certificates", error=str(problem))


def _log_certificate_error(problem: InvalidSettings) -> None:
    log.error("Certificate reload failed, keeping the previous ones", error=str(problem))
