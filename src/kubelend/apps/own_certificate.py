"""Renews the broker's own server certificate if its own CA issued it, before expiry and after a rotation.

Checked once per `--certificate-check-interval`. Files that are not writable or that are managed by others (a
mounted Secret, cert-manager) are not touched.
"""

from __future__ import annotations

import asyncio
from datetime import datetime
from pathlib import Path

import structlog
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from kubelend.apps.authorities import ReloadingAuthority
from kubelend.core.errors import InvalidSettings
from kubelend.kits import keyfiles
from kubelend.kits.generations import AtomicDirectory
from kubelend.pki import certificates, chains, files, keys, lifetimes, renewals
from kubelend.pki.files import Credentials
from kubelend.pki.profiles import Profile

_CERTIFICATE_FILES = (keyfiles.TLS_CERTIFICATE, keyfiles.TLS_KEY, keyfiles.CA_CERTIFICATES)

log = structlog.get_logger("kubelend.broker")


class ServerCertificateRenewer:
    """Renews the server certificate in one directory."""

    def __init__(self, directory: Path, authority: ReloadingAuthority) -> None:
        self._directory = directory
        self._authority = authority
        self._files = AtomicDirectory(directory, _CERTIFICATE_FILES)
        self._logged_reason = ""

    async def renew_if_due(self, now: datetime) -> bool:
        """Renews if due; returns whether it did. A failure is logged once and retried later."""
        try:
            old = files.load_credentials(self._directory)
            if not self._is_due(old, now):
                return False
            if reason := self._files.write_problem():
                self._warn_once("Server certificate is managed externally, not renewing it", reason)
                return False
            return await asyncio.to_thread(self._renew, old, now)
        except (InvalidSettings, OSError) as problem:
            self._warn_once("Server certificate renewal failed, will retry", str(problem))
            return False

    def _is_due(self, old: Credentials, now: datetime) -> bool:
        # Including CAs dropped by a finished rotation: nobody trusts their certificates any more.
        ours = (*self._authority.trusted, *self._authority.dropped)
        if not any(chains.is_issued_by(old.certificate, each) for each in ours):
            return False
        return (
            now >= lifetimes.renewal_time(old.certificate)
            or not chains.is_issued_by(old.certificate, self._authority.current.certificate)
            or self._trusted(old) != old.authorities
        )

    def _renew(self, old: Credentials, now: datetime) -> bool:
        authority = self._authority.signing_authority()
        key = keys.generate(keys.algorithm_of_successor(old.key))
        lifetime = lifetimes.lifetime_of(old.certificate)
        certificate = authority.sign(
            _profile_of(old.certificate), key.public_key(), lifetime, now=now
        )
        new = Credentials(certificate, key, self._trusted(old), authority.chain)
        with self._files.try_lock() as is_ours:
            if not is_ours:
                return False
            self._files.switch_to(self._files.stage(renewals.credential_files(new)))
        self._logged_reason = ""
        end = certificate.not_valid_after_utc
        log.info(
            "Server certificate renewed", path=str(self._directory), expires_at=end.isoformat()
        )
        return True

    def _trusted(self, old: Credentials) -> tuple[x509.Certificate, ...]:
        """Returns our CA and the others in `ca.crt`, without those that were dropped."""
        ours = self._authority.trusted
        others = (
            each
            for each in old.authorities
            if each not in ours and each not in self._authority.dropped
        )
        return (*ours, *others)

    def _warn_once(self, message: str, reason: str) -> None:
        if reason != self._logged_reason:
            self._logged_reason = reason
            log.warning(message, path=str(self._directory), reason=reason)


def _profile_of(certificate: x509.Certificate) -> Profile:
    """Returns the subject and names of the certificate, for its successor."""
    names = certificates.find_extension(certificate, x509.SubjectAlternativeName)
    return Profile(
        certificate.subject, ExtendedKeyUsageOID.SERVER_AUTH, tuple(names) if names else ()
    )
