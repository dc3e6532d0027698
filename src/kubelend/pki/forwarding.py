"""Client certificates forwarded by a TLS-terminating proxy (RFC 9440, `Client-Cert`).

A proxy can hold thousands of idle connections of a large fleet and share a few to the broker. It
authenticates with a certificate of role `proxy`; only then is the header read. The broker verifies that its
own authority signed the forwarded certificate, so a proxy can only forward existing clients.
"""

from __future__ import annotations

import base64
import binascii
from collections import OrderedDict
from collections.abc import Container, Sequence
from datetime import datetime
from typing import NamedTuple

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from kubelend.core.errors import InvalidIdentity
from kubelend.core.roles import Role
from kubelend.pki import chains, identities
from kubelend.pki.identities import Caller

CLIENT_CERT_HEADER = "Client-Cert"
MAX_HEADER_LENGTH = 16 * 1024
CERTIFICATE_CACHE_SIZE = 20_000
"""Size of the LRU cache of verified certificates."""


class ForwardedCertificate(NamedTuple):
    """A forwarded certificate."""

    caller: Caller
    not_before: datetime
    not_after: datetime


class ForwardedCertificateVerifier:
    """Verifies forwarded certificates against these authorities."""

    def __init__(
        self, authorities: Sequence[x509.Certificate], broker_names: Container[str]
    ) -> None:
        self._authorities = authorities
        self._broker_names = broker_names
        self._cache: OrderedDict[str, ForwardedCertificate] = OrderedDict()

    def verify(self, header: str, now: datetime) -> ForwardedCertificate:
        """Return the forwarded certificate if one of our authorities signed it and it is valid now."""
        known = self._cache.get(header)
        if known is None:
            known = self._add_to_cache(header, self._verify_new(header))
        else:
            self._cache.move_to_end(header)
        if not known.not_before <= now <= known.not_after:
            raise InvalidIdentity(
                f"{CLIENT_CERT_HEADER}: certificate of {known.caller.name} is not valid now"
            )
        return known

    def _add_to_cache(self, header: str, known: ForwardedCertificate) -> ForwardedCertificate:
        self._cache[header] = known
        if len(self._cache) > CERTIFICATE_CACHE_SIZE:
            self._cache.popitem(last=False)
        return known

    def _verify_new(self, header: str) -> ForwardedCertificate:
        certificate = _decode_header(header)
        if not any(chains.is_issued_by(certificate, authority) for authority in self._authorities):
            raise InvalidIdentity(
                f"{CLIENT_CERT_HEADER}: certificate is not signed by an authority of this broker"
            )
        if not _is_client_certificate(certificate):
            raise InvalidIdentity(f"{CLIENT_CERT_HEADER}: certificate is not a client certificate")
        caller = identities.caller_from_certificate(certificate, broker_names=self._broker_names)
        if caller.role is Role.PROXY:
            raise InvalidIdentity(
                f"{CLIENT_CERT_HEADER}: {caller.name} is a proxy; proxies cannot be chained"
            )
        return ForwardedCertificate(
            caller, certificate.not_valid_before_utc, certificate.not_valid_after_utc
        )


def _decode_header(header: str) -> x509.Certificate:
    """Decode a byte sequence of RFC 8941: base64 between two colons."""
    if len(header) > MAX_HEADER_LENGTH or not (len(header) > 2 and header[0] == header[-1] == ":"):
        raise InvalidIdentity(f"{CLIENT_CERT_HEADER}: not a byte sequence", hint="use :base64:")
    try:
        return x509.load_der_x509_certificate(base64.b64decode(header[1:-1], validate=True))
    except (binascii.Error, ValueError, x509.InvalidVersion) as problem:
        raise InvalidIdentity(f"{CLIENT_CERT_HEADER}: not a certificate") from problem


def _is_client_certificate(certificate: x509.Certificate) -> bool:
    """Whether TLS would accept the certificate from a client: not a CA, and client authentication if usages
    are set.
    """
    try:
        values = [extension.value for extension in certificate.extensions]
    except (ValueError, x509.DuplicateExtension):
        return False
    is_authority = any(isinstance(value, x509.BasicConstraints) and value.ca for value in values)
    usages = [value for value in values if isinstance(value, x509.ExtendedKeyUsage)]
    return not is_authority and all(ExtendedKeyUsageOID.CLIENT_AUTH in usage for usage in usages)
