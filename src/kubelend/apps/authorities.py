"""The broker's authority: read from its directory, followed through rotations, and what newcomers see of it.

It is the port `CertificateAuthority` of the broker, made of `kubelend.pki`. It also knows who vouches for
the broker's own certificate, since that is what a newcomer must be given the hash of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import cast

from cryptography import x509

from kubelend.broker.ports import Applicant, Issued
from kubelend.core.errors import InvalidSettings, Unavailable
from kubelend.core.members import Certificate
from kubelend.kits import keyfiles
from kubelend.pki import chains, files, pins, profiles, requests
from kubelend.pki.authority import Authority
from kubelend.pki.keys import PublicKey
from kubelend.pki.passphrases import Passphrase
from kubelend.transports.following import Following, Report

_NAMES = (*files.OURS, *files.CERT_MANAGERS, files.CROSS)


class FollowedAuthority:
    """Signs with the newest authority of a directory."""

    def __init__(
        self,
        directory: Path,
        passphrase: Passphrase | None,
        server: Path,
        lifetime: timedelta,
        report: Report,
    ) -> None:
        """`server` is the directory of the broker's own certificate."""
        self.lifetime = lifetime
        self.dropped: set[x509.Certificate] = set()
        """Predecessors that were trusted here once, and are no more: a rotation was finished."""
        self._server = server
        self._following = Following(
            directory, lambda path: Authority.load(path, passphrase), report, _NAMES
        )
        self.look()

    @property
    def current(self) -> Authority:
        return self._following.current

    @property
    def trusted(self) -> tuple[x509.Certificate, ...]:
        return self.current.trusted

    @property
    def trusted_text(self) -> str:
        return files.to_pem(self.trusted).decode()

    def refresh(self) -> bool:
        """Take up changed files; True if it did."""
        before = self.trusted
        if not self._following.refresh():
            return False
        self.dropped |= set(before) - set(self.trusted)
        self._put_together()
        return True

    def look(self) -> None:
        """Work out what newcomers need to trust the broker, which another authority may vouch for.

        To be done again when the authority or the broker's own certificate has changed.
        """
        shown = files.load_certificates(self._server / keyfiles.CERTIFICATE)
        others = files.load_certificates(self._server / keyfiles.AUTHORITIES)
        self._anchor = _anchor(shown, (*self.trusted, *others)) or self.current.certificate
        self._put_together()

    # -- the port

    @property
    def pin(self) -> str:
        return self._pin

    @property
    def authorities(self) -> str:
        return self._authorities

    def read(self, request: str) -> Applicant:
        checked = requests.check(request)
        claims, key = checked.claims, checked.public_key
        profiles.client(claims.name, claims.role)
        return Applicant(claims.role, claims.name, pins.of_key(key), key)

    def issue(self, applicant: Applicant, now: datetime, not_before: datetime | None) -> Issued:
        authority = self.current
        profile = profiles.client(applicant.name, applicant.role)
        try:
            certificate = authority.sign(
                profile,
                cast("PublicKey", applicant.public_key),
                self.lifetime,
                now=now,
                not_before=not_before,
            )
        except InvalidSettings as problem:
            raise Unavailable(
                f"no certificate can be issued now: {problem.message}", hint=problem.hint
            ) from problem
        known = Certificate(
            f"{certificate.serial_number:x}",
            now,
            certificate.not_valid_after_utc,
            pins.pin(authority.certificate),
        )
        chain = files.to_pem([certificate, *authority.chain]).decode()
        return Issued(chain, self.authorities, known, certificate.not_valid_before_utc)

    def _put_together(self) -> None:
        # At once when the authority changes: who gets a certificate of the new one has to trust it.
        self._pin = str(pins.pin(self._anchor))
        trusted = dict.fromkeys((*self.trusted, self._anchor))
        self._authorities = files.to_pem(trusted).decode()


def _anchor(
    shown: Sequence[x509.Certificate], candidates: Iterable[x509.Certificate]
) -> x509.Certificate | None:
    """Who of the candidates vouches for what the broker shows."""
    for link in shown:
        for candidate in candidates:
            if chains.is_issued_by(link, candidate):
                return candidate
    return None
