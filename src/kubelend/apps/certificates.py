"""Certificates of the broker: its CA, its server certificate and the trusted CAs, all reloaded at run time.

`ReloadingAuthority` implements the port `CertificateAuthority` of the broker with `kubelend.pki`. It also
determines the CA that issued the broker's own certificate, because joining clusters verify the broker by the
hash of that CA. `ServerCertificateRenewer` renews the broker's certificate if that CA is its own.
"""

from __future__ import annotations

import asyncio
import os
from datetime import datetime, timedelta
from pathlib import Path
from typing import cast

import structlog
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from kubelend.api.authentication import Authenticator
from kubelend.apps.settings import BrokerSettings
from kubelend.broker.metrics import BrokerMetrics
from kubelend.broker.ports import Issued, SigningRequest
from kubelend.broker.writer import LedgerWriter
from kubelend.core.errors import InvalidSettings, Unavailable
from kubelend.core.members import Certificate
from kubelend.kits import files
from kubelend.kits.files import AtomicDirectory
from kubelend.pki import csr as pki_csr
from kubelend.pki import files as pki_files
from kubelend.pki import identity, keys, passphrases, tokens
from kubelend.pki import x509 as pki_x509
from kubelend.pki.authority import Authority
from kubelend.pki.files import Credentials
from kubelend.pki.identity import Profile
from kubelend.pki.keys import PublicKey
from kubelend.transports import tls
from kubelend.transports.tls import FileReloader


class ReloadingAuthority:
    """Signs with the current CA of a directory and reloads it when its files change."""

    def __init__(self, settings: BrokerSettings) -> None:
        directory, file = Path(settings.ca_path), settings.ca_passphrase_file

        def load(path: Path) -> Authority:
            # The passphrase is read with the key, because a rotation may change it.
            passphrase = passphrases.load_passphrase(Path(file) if file else None, os.environ)
            return Authority.load(path, passphrase)

        self.lifetime = settings.certificate_lifetime
        self._server = settings.certificate_directory
        layouts = (*pki_files.OWN_LAYOUT, *pki_files.CERT_MANAGER_LAYOUT)
        self._reloader = FileReloader(directory, load, _log_authority_error, layouts)
        # Apart from the key: a CA is added or removed even while the key cannot be loaded.
        self._bundle_reloader = FileReloader(
            directory,
            pki_files.load_trusted,
            _log_authority_error,
            (files.CA_CERTIFICATES, files.TLS_CERTIFICATE),
        )
        self._known = set(self.trusted)
        """CAs that were in the bundle since this process started."""
        self.find_trust_anchor()

    @property
    def current(self) -> Authority:
        return self._reloader.current

    @property
    def trusted(self) -> tuple[x509.Certificate, ...]:
        """CAs that certificate holders have to trust. While the key cannot be read, those in `ca.crt`."""
        if self._reloader.problem is None:
            return self.current.trusted
        return self._bundle_reloader.current

    def refresh(self) -> bool:
        """Reloads changed files; returns whether anything changed."""
        changes = [self._reloader.refresh(), self._bundle_reloader.refresh()]
        self._known |= set(self.trusted)
        if any(changes):
            self._update_published()
        return any(changes)

    def has_issued(self, certificate: x509.Certificate) -> bool:
        """Whether a CA of the bundle has issued the certificate, or one that was in it."""
        return any(pki_x509.is_issued_by(certificate, each) for each in self._known)

    def client_authorities(self) -> list[x509.Certificate]:
        """Returns the CAs that verify clients: the bundle, whose changes are a rotation's.

        The server's own `ca.crt` counts too if another CA has issued its certificate.
        """
        shown = pki_files.load_certificates(self._server / files.TLS_CERTIFICATE)
        if any(map(self.has_issued, shown)):
            return list(self.trusted)
        own = pki_files.load_certificates(self._server / files.CA_CERTIFICATES)
        return list(dict.fromkeys((*self.trusted, *own)))

    def find_trust_anchor(self) -> None:
        """Determines which CA joining clusters need to verify the broker; it may differ from the issuing one.

        Must be called again when the CA or the broker's own certificate has changed.
        """
        shown = pki_files.load_certificates(self._server / files.TLS_CERTIFICATE)
        others = pki_files.load_certificates(self._server / files.CA_CERTIFICATES)
        issuers = (
            candidate
            for link in shown
            for candidate in (*self.trusted, *others)
            if pki_x509.is_issued_by(link, candidate)
        )
        self._anchor = next(issuers, self.current.certificate)
        self._update_published()

    def signing_authority(self) -> Authority:
        """Returns the CA for signing; raises `InvalidSettings` if changed files cannot be loaded.

        It does not fall back to the previous CA, which may have been replaced because its key was stolen.
        """
        if self._reloader.problem is not None:
            raise InvalidSettings(
                "the CA on disk cannot be loaded", hint="see the broker's log for the reason"
            )
        return self.current

    # -- port CertificateAuthority

    def parse_csr(self, csr: str) -> SigningRequest:
        checked = pki_csr.check_csr(csr)
        claims, key = checked.claims, checked.public_key
        identity.client_profile(claims.name, claims.role)
        return SigningRequest(claims.role, claims.name, tokens.pin_of_key(key), key)

    def issue(
        self,
        applicant: SigningRequest,
        now: datetime,
        not_before: datetime | None,
        max_lifetime: timedelta | None = None,
    ) -> Issued:
        profile = identity.client_profile(applicant.name, applicant.role)
        try:
            authority = self.signing_authority()
            certificate = authority.sign(
                profile,
                cast("PublicKey", applicant.public_key),
                min(self.lifetime, max_lifetime or self.lifetime),
                now=now,
                not_before=not_before,
            )
        except InvalidSettings as error:
            raise Unavailable(
                f"certificates cannot be issued at present: {error.message}", hint=error.hint
            ) from error
        known = Certificate(
            f"{certificate.serial_number:x}",
            now,
            certificate.not_valid_after_utc,
            tokens.ca_pin(authority.certificate),
            self._bundle_digest,
        )
        chain = pki_files.to_pem([certificate, *authority.chain]).decode()
        return Issued(chain, self.authorities, known, certificate.not_valid_before_utc)

    def is_current(self, certificate: Certificate) -> bool:
        signer = tokens.ca_pin(self.current.certificate)
        return (certificate.authority, certificate.bundle) == (signer, self._bundle_digest)

    def _update_published(self) -> None:
        # Immediately after a CA change: holders of a certificate of the new CA have to trust it.
        self.pin = str(tokens.ca_pin(self._anchor))
        trusted = dict.fromkeys((*self.trusted, self._anchor))
        self.authorities = pki_files.to_pem(trusted).decode()
        self._bundle_digest = tokens.bundle_digest(trusted)


log = structlog.get_logger("kubelend.broker")


class ServerCertificateRenewer:
    """Renews the server certificate in one directory."""

    def __init__(self, directory: Path, authority: ReloadingAuthority) -> None:
        self._directory = directory
        self._authority = authority
        self._files = AtomicDirectory(directory, files.CREDENTIAL_FILES)
        self._logged_reason = ""

    async def renew_if_due(self, now: datetime) -> None:
        """Renews if due. A failure is logged once and retried later."""
        try:
            old = pki_files.load_credentials(self._directory)
            if not self._is_due(old, now):
                return
            if reason := self._files.write_problem():
                self._warn_once("Server certificate is managed externally, not renewing it", reason)
            else:
                await asyncio.to_thread(self._renew, old, now)
        except (InvalidSettings, OSError) as error:
            self._warn_once("Server certificate renewal failed, will retry", str(error))

    def _is_due(self, old: Credentials, now: datetime) -> bool:
        if not self._authority.has_issued(old.certificate):
            return False
        return (
            now >= pki_x509.renewal_time(old.certificate)
            or not pki_x509.is_issued_by(old.certificate, self._authority.current.certificate)
            or set(self._authority.trusted) != set(old.authorities)
        )

    def _renew(self, old: Credentials, now: datetime) -> None:
        authority = self._authority.signing_authority()
        key = keys.generate(keys.algorithm_of_successor(old.key))
        lifetime = pki_x509.lifetime_of(old.certificate)
        certificate = authority.sign(
            _profile_of(old.certificate), key.public_key(), lifetime, now=now
        )
        new = Credentials(certificate, key, self._authority.trusted, authority.chain)
        with self._files.try_lock() as is_ours:
            if not is_ours:
                return
            self._files.switch_to(self._files.stage(pki_csr.credential_files(new)))
        self._logged_reason = ""
        end = certificate.not_valid_after_utc
        log.info(
            "Server certificate renewed", path=str(self._directory), expires_at=end.isoformat()
        )

    def _warn_once(self, message: str, reason: str) -> None:
        if reason != self._logged_reason:
            self._logged_reason = reason
            log.warning(message, path=str(self._directory), reason=reason)


def _profile_of(certificate: x509.Certificate) -> Profile:
    """Returns the subject and names of the certificate, for its successor."""
    names = pki_x509.find_extension(certificate, x509.SubjectAlternativeName)
    return Profile(
        certificate.subject, ExtendedKeyUsageOID.SERVER_AUTH, tuple(names) if names else ()
    )


class CertificateManager:
    """Reloads certificate files and applies them; `run` is a root task."""

    def __init__(
        self, settings: BrokerSettings, writer: LedgerWriter, metrics: BrokerMetrics
    ) -> None:
        self._directory = settings.certificate_directory
        self._interval = settings.certificate_check_interval.total_seconds()
        self._writer = writer
        self._metrics = metrics
        self.authority = ReloadingAuthority(settings) if settings.ca_path else None
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
        """Returns the CAs that verify clients, in PEM form; empty for those of `ca.crt`."""
        if self.authority is None:
            return ""
        return pki_files.to_pem(self.authority.client_authorities()).decode()

    def _apply_reloaded(self) -> None:
        try:
            self.authenticator.refresh()
            if self.authority is not None:
                self.authority.find_trust_anchor()
            self._update_metrics()
        except InvalidSettings as error:  # the files are being changed, and will be read again
            _log_certificate_error(error)

    def _update_metrics(self) -> None:
        self._metrics.set_certificate_expiry(
            "server", tls.own_certificate(self._directory).not_valid_after_utc
        )
        if self.authority is not None:
            end = self.authority.current.certificate.not_valid_after_utc
            self._metrics.set_certificate_expiry("authority", end)


def _log_authority_error(problem: InvalidSettings) -> None:
    log.error("CA reload failed, not issuing certificates", error=str(problem))


def _log_certificate_error(problem: InvalidSettings) -> None:
    log.error("Certificate reload failed, keeping the previous ones", error=str(problem))
