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


def begin_renewal(old: Credentials) -> Renewal:
    """Create a new key of the same algorithm, and its certificate signing request."""
    key = keys.generate(keys.algorithm_of_successor(old.key))
    holder = identities.caller_from_certificate(old.certificate)
    return Renewal(old, key, requests.make_csr(holder.name, holder.role, key))


def accept_renewal(
    renewal: Renewal, certificate: str, authorities: str, now: datetime
) -> Credentials:
    """Verify the issued certificate; `UnexpectedAnswer` if it is not what was requested.

    The authorities are trusted as they are, because the old ones verified the connection.
    """
    asked = identities.caller_from_certificate(renewal.old.certificate)
    return verify_issued(renewal.key, asked, certificate, authorities, now)


def verify_issued(
    key: PrivateKey, requested: Caller, certificate: str, authorities: str, now: datetime
) -> Credentials:
    """Verify a certificate issued for `key`. Also used by `kubelend.apps.join`, which has no older
    certificate.
    """
    own, *chain = _parse_certificates(certificate)
    trusted = tuple(_parse_certificates(authorities))
    if not files.is_certificate_of(own, key):
        raise UnexpectedAnswer("issued certificate is for another key")
    issued = identities.caller_from_certificate(own)
    if requested != issued:
        raise UnexpectedAnswer(
            f"issued certificate is for {issued.role} {issued.name},"
            f" not for {requested.role} {requested.name}"
        )
    if own.not_valid_after_utc <= now:
        raise UnexpectedAnswer("issued certificate has already expired")
    if not _is_trusted_chain(own, chain, trusted):
        raise UnexpectedAnswer(
            "issued certificate is not signed by any of the broker's authorities"
        )
    return Credentials(own, key, trusted, tuple(chain))


def credential_files(credentials: Credentials) -> dict[str, bytes]:
    """Return the contents of the three files by name."""
    return {
        keyfiles.TLS_KEY: keys.to_pem(credentials.key),
        keyfiles.TLS_CERTIFICATE: files.to_pem([credentials.certificate, *credentials.chain]),
        keyfiles.CA_CERTIFICATES: files.to_pem(credentials.authorities),
    }


def _parse_certificates(text: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(text.encode())
    except ValueError as error:
        raise UnexpectedAnswer(
            "response of the broker contains no certificate in PEM form"
        ) from error


def _is_trusted_chain(
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
