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

from kubelend.broker.ports import Issued, SigningRequest
from kubelend.core.errors import InvalidSettings, Unavailable
from kubelend.core.members import Certificate
from kubelend.kits import keyfiles
from kubelend.pki import chains, files, pins, profiles, requests
from kubelend.pki.authority import Authority
from kubelend.pki.keys import PublicKey
from kubelend.pki.passphrases import Passphrase
from kubelend.transports.following import FileReloader, ReportError

_PUBLIC_FILES = (keyfiles.CA_CERTIFICATES, keyfiles.TLS_CERTIFICATE, files.DROPPED_CERTIFICATES)
_AUTHORITY_FILES = (*files.OWN_LAYOUT, *files.CERT_MANAGER_LAYOUT, files.CROSS_CERTIFICATES)


class _PublicPart(NamedTuple):
    """What can be read without the private key."""

    trusted: tuple[x509.Certificate, ...]
    dropped: tuple[x509.Certificate, ...]


class ReloadingAuthority:
    """Signs with the current CA of a directory and reloads it when its files change."""

    def __init__(
        self,
        directory: Path,
        passphrase: Callable[[], Passphrase | None],
        server: Path,
        lifetime: timedelta,
        report: ReportError,
    ) -> None:
        """`server` is the directory of the broker's own certificate.

        `passphrase` is called whenever the key is read, because a rotation may change it.
        """
        self.lifetime = lifetime
        self._no_longer_trusted: set[x509.Certificate] = set()
        """CAs that this process no longer trusts, whether or not a file lists them as dropped."""
        self._server = server
        self._reloader = FileReloader(
            directory, lambda path: Authority.load(path, passphrase()), report, _AUTHORITY_FILES
        )
        self._public_reloader = FileReloader(directory, _load_public, report, _PUBLIC_FILES)
        self.find_trust_anchor()

    @property
    def current(self) -> Authority:
        return self._reloader.current

    @property
    def trusted(self) -> tuple[x509.Certificate, ...]:
        """CAs that certificate holders have to trust. While the key cannot be read, those in `ca.crt`."""
        if self._reloader.problem is None:
            return self.current.trusted
        return self._public_reloader.current.trusted

    @property
    def dropped(self) -> set[x509.Certificate]:
        """Former CAs that are no longer trusted, because their rotation is finished."""
        return {*self._public_reloader.current.dropped, *self._no_longer_trusted}.difference(
            self.trusted
        )

    def refresh(self) -> bool:
        """Reloads changed files; returns whether anything changed."""
        before = (self.trusted, self.dropped)
        has_new_key = self._reloader.refresh()
        self._public_reloader.refresh()
        self._no_longer_trusted |= set(before[0]).difference(self.trusted)
        if not has_new_key and before == (self.trusted, self.dropped):
            return False
        self._update_published()
        return True

    def find_trust_anchor(self) -> None:
        """Determines which CA joining clusters need to verify the broker; it may be another one than ours.

        Must be called again when the CA or the broker's own certificate has changed.
        """
        shown = files.load_certificates(self._server / keyfiles.TLS_CERTIFICATE)
        others = files.load_certificates(self._server / keyfiles.CA_CERTIFICATES)
        self._anchor = _trust_anchor(shown, (*self.trusted, *others)) or self.current.certificate
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

    @property
    def pin(self) -> str:
        return self._pin

    @property
    def authorities(self) -> str:
        return self._authorities

    def parse_csr(self, csr: str) -> SigningRequest:
        checked = requests.check_csr(csr)
        claims, key = checked.claims, checked.public_key
        profiles.client_profile(claims.name, claims.role)
        return SigningRequest(claims.role, claims.name, pins.pin_of_key(key), key)

    def issue(
        self,
        applicant: SigningRequest,
        now: datetime,
        not_before: datetime | None,
        max_lifetime: timedelta | None = None,
    ) -> Issued:
        profile = profiles.client_profile(applicant.name, applicant.role)
        try:
            authority = self.signing_authority()
            certificate = authority.sign(
                profile,
                cast("PublicKey", applicant.public_key),
                min(self.lifetime, max_lifetime or self.lifetime),
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
            pins.ca_pin(authority.certificate),
        )
        chain = files.to_pem([certificate, *authority.chain]).decode()
        return Issued(chain, self.authorities, known, certificate.not_valid_before_utc)

    def _update_published(self) -> None:
        # Immediately after a CA change: holders of a certificate of the new CA have to trust it.
        self._pin = str(pins.ca_pin(self._anchor))
        trusted = dict.fromkeys((*self.trusted, self._anchor))
        self._authorities = files.to_pem(trusted).decode()


def _load_public(directory: Path) -> _PublicPart:
    return _PublicPart(files.load_trusted(directory), files.load_dropped(directory))


def _trust_anchor(
    shown: Sequence[x509.Certificate], candidates: Iterable[x509.Certificate]
) -> x509.Certificate | None:
    """Returns the candidate that issued the broker's certificate or a link of its chain."""
    for link in shown:
        for candidate in candidates:
            if chains.is_issued_by(link, candidate):
                return candidate
    return None
