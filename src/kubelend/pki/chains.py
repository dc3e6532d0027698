"""X.509 helpers: issuer checks, chains, validity periods and renewal times.

A peer that trusts only a root needs the intermediates: certificates of intermediate authorities, or during
a rotation the new authority's certificate signed by the old one.
"""

from __future__ import annotations

from collections.abc import Iterable

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm


def is_issued_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    """Whether the issuer's name is in the certificate and its key signed it."""
    try:
        certificate.verify_directly_issued_by(issuer)
    except (InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError):
        return False
    return True


def is_self_signed(certificate: x509.Certificate) -> bool:
    """Whether the certificate is a root."""
    return is_issued_by(certificate, certificate)


def have_same_key(one: x509.Certificate, other: x509.Certificate) -> bool:
    """Whether both certificates have the same key."""
    return one.public_key() == other.public_key()


def chain_for(
    authority: x509.Certificate, known: Iterable[x509.Certificate]
) -> tuple[x509.Certificate, ...]:
    """Return the intermediates to present after certificates signed by `authority`, in order; often none."""
    candidates = [each for each in dict.fromkeys(known) if not is_self_signed(each)]
    found: list[x509.Certificate] = []
    link = _first_intermediate(authority, candidates)
    while link is not None:
        found.append(link)
        link = _find_issuer(link, [each for each in candidates if each not in found])
    return tuple(found)


def _first_intermediate(
    authority: x509.Certificate, candidates: Iterable[x509.Certificate]
) -> x509.Certificate | None:
    """The authority itself if it is an intermediate, else a cross-signed certificate of it."""
    if not is_self_signed(authority):
        return authority
    for each in candidates:
        if each.subject == authority.subject and have_same_key(each, authority):
            return each
    return None


def _find_issuer(
    certificate: x509.Certificate, candidates: Iterable[x509.Certificate]
) -> x509.Certificate | None:
    return next((each for each in candidates if is_issued_by(certificate, each)), None)
