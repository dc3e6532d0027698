"""Client side of certificate renewal: a new key, its request, and verification of the response.

`kubelend.apps.renewal` sends what `begin_renewal` returns to `POST /api/v1/certificates`, and writes what
`accept_renewal` returns.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

import msgspec
from cryptography import x509

from kubelend.core.errors import UnexpectedAnswer
from kubelend.kits import keyfiles
from kubelend.pki import chains, files, identities, keys, requests
from kubelend.pki.files import Credentials
from kubelend.pki.identities import Caller
from kubelend.pki.keys import PrivateKey


class Renewal(msgspec.Struct, frozen=True):
    """A renewal in progress."""

    old: Credentials
    key: PrivateKey
    """The new key. Not written before its certificate is issued."""

    request: str
    """Certificate signing request in PEM form."""


def begin(old: Credentials) -> Renewal:
    """Create a new key of the same algorithm, and its certificate signing request."""
    key = keys.generate(keys.algorithm_like(old.key))
    holder = identities.holder(old.certificate)
    return Renewal(old, key, requests.make(holder.name, holder.role, key))


def accept(renewal: Renewal, certificate: str, authorities: str, now: datetime) -> Credentials:
    """Verify the issued certificate; `UnexpectedAnswer` if it is not what was requested.

    The authorities are trusted as they are, because the old ones verified the connection.
    """
    asked = identities.holder(renewal.old.certificate)
    return checked(renewal.key, asked, certificate, authorities, now)


def checked(
    key: PrivateKey, asked: Caller, certificate: str, authorities: str, now: datetime
) -> Credentials:
    """Verify a certificate issued for `key`. Also used by `kubelend.apps.join`, which has no older
    certificate.
    """
    own, *chain = _certificates(certificate)
    trusted = tuple(_certificates(authorities))
    if not files.matches(own, key):
        raise UnexpectedAnswer("issued certificate is for another key")
    issued = identities.holder(own)
    if asked != issued:
        raise UnexpectedAnswer(
            f"issued certificate is for {issued.role} {issued.name},"
            f" not for {asked.role} {asked.name}"
        )
    if own.not_valid_after_utc <= now:
        raise UnexpectedAnswer("issued certificate has already expired")
    if not _leads_to(own, chain, trusted):
        raise UnexpectedAnswer(
            "issued certificate is not signed by any of the broker's authorities"
        )
    return Credentials(own, key, trusted, tuple(chain))


def contents(credentials: Credentials) -> dict[str, bytes]:
    """Return the contents of the three files by name."""
    return {
        keyfiles.KEY: keys.to_pem(credentials.key),
        keyfiles.CERTIFICATE: files.to_pem([credentials.certificate, *credentials.chain]),
        keyfiles.AUTHORITIES: files.to_pem(credentials.authorities),
    }


def _certificates(text: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(text.encode())
    except ValueError as error:
        raise UnexpectedAnswer(
            "response of the broker contains no certificate in PEM form"
        ) from error


def _leads_to(
    certificate: x509.Certificate,
    chain: Iterable[x509.Certificate],
    trusted: Iterable[x509.Certificate],
) -> bool:
    """Whether each certificate of the chain signed the previous one, up to a trusted one."""
    for link in (certificate, *chain):
        if link is not certificate and not chains.is_issued_by(certificate, link):
            return False
        if any(chains.is_issued_by(link, each) for each in trusted):
            return True
        certificate = link
    return False
