"""The broker's CA: loaded from its directory, reloaded after a rotation, and published to joining clusters.

Implements the port `CertificateAuthority` of the broker with `kubelend.pki`. It also determines the CA that
issued the broker's own certificate, because joining clusters verify the broker by the hash of that CA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple, cast

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

_PUBLIC = (keyfiles.AUTHORITIES, keyfiles.CERTIFICATE, files.DROPPED)
_NAMES = (*files.OURS, *files.CERT_MANAGERS, files.CROSS)


class _Public(NamedTuple):
    """What can be read without the private key."""

    trusted: tuple[x509.Certificate, ...]
    dropped: tuple[x509.Certificate, ...]


class FollowedAuthority:
    """Signs with the current CA of a directory and reloads it when its files change."""

    def __init__(
        self,
        directory: Path,
        passphrase: Callable[[], Passphrase | None],
        server: Path,
        lifetime: timedelta,
        report: Report,
    ) -> None:
        """`server` is the directory of the broker's own certificate.

        `passphrase` is called whenever the key is read, because a rotation may change it.
        """
        self.lifetime = lifetime
        self._gone: set[x509.Certificate] = set()
        """CAs that this process no longer trusts, whether or not a file lists them as dropped."""
        self._server = server
        self._following = Following(
            directory, lambda path: Authority.load(path, passphrase()), report, _NAMES
        )
        self._public = Following(directory, _public, report, _PUBLIC)
        self.look()

    @property
    def current(self) -> Authority:
        return self._following.current

    @property
    def trusted(self) -> tuple[x509.Certificate, ...]:
        """CAs that certificate holders have to trust. While the key cannot be read, those in `ca.crt`."""
        if self._following.problem is None:
            return self.current.trusted
        return self._public.current.trusted

    @property
    def dropped(self) -> set[x509.Certificate]:
        """Former CAs that are no longer trusted, because their rotation is finished."""
        return {*self._public.current.dropped, *self._gone}.difference(self.trusted)

    def refresh(self) -> bool:
        """Reloads changed files; returns whether anything changed."""
        before = (self.trusted, self.dropped)
        has_new_key = self._following.refresh()
        self._public.refresh()
        self._gone |= set(before[0]).difference(self.trusted)
        if not has_new_key and before == (self.trusted, self.dropped):
            return False
        self._put_together()
        return True

    def look(self) -> None:
        """Determines which CA joining clusters need to verify the broker; it may be another one than ours.

        Must be called again when the CA or the broker's own certificate has changed.
        """
        shown = files.load_certificates(self._server / keyfiles.CERTIFICATE)
        others = files.load_certificates(self._server / keyfiles.AUTHORITIES)
        self._anchor = _anchor(shown, (*self.trusted, *others)) or self.current.certificate
        self._put_together()

    def signing(self) -> Authority:
        """Returns the CA for signing; raises `InvalidSettings` if changed files cannot be loaded.

        It does not fall back to the previous CA, which may have been replaced because its key was stolen.
        """
        if self._following.problem is not None:
            raise InvalidSettings(
                "the CA on disk cannot be loaded", hint="see the broker's log for the reason"
            )
        return self.current

    # -- port CertificateAuthority

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

    def issue(
        self,
        applicant: Applicant,
        now: datetime,
        not_before: datetime | None,
        longest: timedelta | None = None,
    ) -> Issued:
        profile = profiles.client(applicant.name, applicant.role)
        try:
            authority = self.signing()
            certificate = authority.sign(
                profile,
                cast("PublicKey", applicant.public_key),
                min(self.lifetime, longest or self.lifetime),
                now=now,
                not_before=not_before,
            )
        except InvalidSettings as problem:
            raise Unavailable(
                f"certificates cannot be issued at present: {problem.message}", hint=problem.hint
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
        # Immediately after a CA change: holders of a certificate of the new CA have to trust it.
        self._pin = str(pins.pin(self._anchor))
        trusted = dict.fromkeys((*self.trusted, self._anchor))
        self._authorities = files.to_pem(trusted).decode()


def _public(directory: Path) -> _Public:
    return _Public(files.load_trusted(directory), files.load_dropped(directory))


def _anchor(
    shown: Sequence[x509.Certificate], candidates: Iterable[x509.Certificate]
) -> x509.Certificate | None:
    """Returns the candidate that issued the broker's certificate or a link of its chain."""
    for link in shown:
        for candidate in candidates:
            if chains.is_issued_by(link, candidate):
                return candidate
    return None
