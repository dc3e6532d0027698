"""A certificate's successor: asked for with a new key, and checked before anybody relies on it.

The holder's side of `POST /api/v1/certificates`. `kubelend.apps.renewal` sends what `begin` makes, and
writes what `accept` gives.
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
    """What is asked for."""

    old: Credentials
    key: PrivateKey
    """Of the successor. It is written nowhere before its certificate is there."""

    request: str
    """In PEM form; signed with the key, which it does not hold."""


def begin(old: Credentials) -> Renewal:
    """A new key of the old one's kind, and the request for its certificate."""
    key = keys.generate(keys.algorithm_like(old.key))
    holder = identities.holder(old.certificate)
    return Renewal(old, key, requests.make(holder.name, holder.role, key))


def accept(renewal: Renewal, certificate: str, authorities: str, now: datetime) -> Credentials:
    """What the broker answered, both in PEM form; `UnexpectedAnswer` if it is not what was asked for.

    The authorities are taken as they are: the old ones vouch for the connection they came over.
    """
    asked = identities.holder(renewal.old.certificate)
    return checked(renewal.key, asked, certificate, authorities, now)


def checked(
    key: PrivateKey, asked: Caller, certificate: str, authorities: str, now: datetime
) -> Credentials:
    """The same for anybody who asked with this key: `kubelend.apps.joining` has no older certificate."""
    own, *chain = _certificates(certificate)
    trusted = tuple(_certificates(authorities))
    if not files.matches(own, key):
        raise UnexpectedAnswer("the broker's certificate is for another key")
    issued = identities.holder(own)
    if asked != issued:
        raise UnexpectedAnswer(
            f"the broker's certificate is for {issued.role} {issued.name},"
            f" and not for {asked.role} {asked.name}"
        )
    if own.not_valid_after_utc <= now:
        raise UnexpectedAnswer("the broker's certificate has ended before it was used")
    if not _leads_to(own, chain, trusted):
        raise UnexpectedAnswer("the broker's certificate is signed by none of its authorities")
    return Credentials(own, key, trusted, tuple(chain))


def contents(credentials: Credentials) -> dict[str, bytes]:
    """The three files, by name."""
    return {
        keyfiles.KEY: keys.to_pem(credentials.key),
        keyfiles.CERTIFICATE: files.to_pem([credentials.certificate, *credentials.chain]),
        keyfiles.AUTHORITIES: files.to_pem(credentials.authorities),
    }


def _certificates(text: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(text.encode())
    except ValueError as error:
        raise UnexpectedAnswer("the broker's answer holds no certificate in PEM form") from error


def _leads_to(
    certificate: x509.Certificate,
    chain: Iterable[x509.Certificate],
    trusted: Iterable[x509.Certificate],
) -> bool:
    """Whether each link of the chain signed the one before it, up to somebody who is trusted."""
    for link in (certificate, *chain):
        if link is not certificate and not chains.is_issued_by(certificate, link):
            return False
        if any(chains.is_issued_by(link, each) for each in trusted):
            return True
        certificate = link
    return False
