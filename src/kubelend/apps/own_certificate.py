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

from kubelend.apps.authorities import FollowedAuthority
from kubelend.core.errors import InvalidSettings
from kubelend.kits import keyfiles
from kubelend.kits.generations import Generations
from kubelend.pki import certificates, chains, files, keys, lifetimes, renewals
from kubelend.pki.files import Credentials
from kubelend.pki.profiles import Profile

_NAMES = (keyfiles.CERTIFICATE, keyfiles.KEY, keyfiles.AUTHORITIES)

log = structlog.get_logger("kubelend.broker")


class OwnCertificate:
    """Renews the server certificate in one directory."""

    def __init__(self, directory: Path, authority: FollowedAuthority) -> None:
        self._directory = directory
        self._authority = authority
        self._files = Generations(directory, _NAMES)
        self._told = ""

    async def renew_if_due(self, now: datetime) -> bool:
        """Renews if due; returns whether it did. A failure is logged once and retried later."""
        try:
            old = files.load_credentials(self._directory)
            if not self._is_due(old, now):
                return False
            if reason := self._files.obstacle():
                self._tell("Server certificate is managed externally, not renewing it", reason)
                return False
            return await asyncio.to_thread(self._renew, old, now)
        except (InvalidSettings, OSError) as problem:
            self._tell("Server certificate renewal failed, will retry", str(problem))
            return False

    def _is_due(self, old: Credentials, now: datetime) -> bool:
        # Including CAs dropped by a finished rotation: nobody trusts their certificates any more.
        ours = (*self._authority.trusted, *self._authority.dropped)
        if not any(chains.is_issued_by(old.certificate, each) for each in ours):
            return False
        return (
            now >= lifetimes.renew_at(old.certificate)
            or not chains.is_issued_by(old.certificate, self._authority.current.certificate)
            or self._trusted(old) != old.authorities
        )

    def _renew(self, old: Credentials, now: datetime) -> bool:
        authority = self._authority.signing()
        key = keys.generate(keys.algorithm_like(old.key))
        lifetime = lifetimes.life(old.certificate)
        certificate = authority.sign(_profile(old.certificate), key.public_key(), lifetime, now=now)
        new = Credentials(certificate, key, self._trusted(old), authority.chain)
        with self._files.lock() as is_ours:
            if not is_ours:
                return False
            self._files.take(self._files.stage(renewals.contents(new)))
        self._told = ""
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

    def _tell(self, message: str, reason: str) -> None:
        if reason != self._told:
            self._told = reason
            log.warning(message, path=str(self._directory), reason=reason)


def _profile(certificate: x509.Certificate) -> Profile:
    """Returns the subject and names of the certificate, for its successor."""
    names = certificates.extension(certificate, x509.SubjectAlternativeName)
    return Profile(
        certificate.subject, ExtendedKeyUsageOID.SERVER_AUTH, tuple(names) if names else ()
    )
