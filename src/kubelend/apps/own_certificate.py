"""The broker's own certificate, if its own authority signed it: renewed in time, and after a rotation.

The broker looks once per `--certificate-check-interval`. Files that it may not write, or that somebody else
exchanges (a mounted secret, cert-manager), are left alone.
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
    """Keeps one directory fresh."""

    def __init__(self, directory: Path, authority: FollowedAuthority) -> None:
        self._directory = directory
        self._authority = authority
        self._files = Generations(directory, _NAMES)
        self._told = ""

    async def renew_if_due(self, now: datetime) -> bool:
        """Whether there are new files. What goes wrong is logged once, and tried again later."""
        try:
            old = files.load_credentials(self._directory)
            if not self._is_due(old, now):
                return False
            if reason := self._files.obstacle():
                self._tell(f"the broker's certificate is left to others to renew: {reason}")
                return False
            return await asyncio.to_thread(self._renew, old, now)
        except (InvalidSettings, OSError) as problem:
            self._tell(f"the broker's certificate is not renewed: {problem}")
            return False

    def _is_due(self, old: Credentials, now: datetime) -> bool:
        # Those that a finished rotation dropped, too: what they signed nobody trusts any more.
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
        log.info("own certificate renewed", path=str(self._directory), until=end.isoformat())
        return True

    def _trusted(self, old: Credentials) -> tuple[x509.Certificate, ...]:
        """The authority and who is trusted beside it, without those whose time is over."""
        ours = self._authority.trusted
        others = (
            each
            for each in old.authorities
            if each not in ours and each not in self._authority.dropped
        )
        return (*ours, *others)

    def _tell(self, text: str) -> None:
        if text != self._told:
            self._told = text
            log.warning(text)


def _profile(certificate: x509.Certificate) -> Profile:
    """What the certificate says of its holder, to be said again."""
    names = certificates.extension(certificate, x509.SubjectAlternativeName)
    return Profile(
        certificate.subject, ExtendedKeyUsageOID.SERVER_AUTH, tuple(names) if names else ()
    )
