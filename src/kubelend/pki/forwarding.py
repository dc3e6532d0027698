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

HEADER = "Client-Cert"
LONGEST = 16 * 1024
REMEMBERED = 20_000
"""Size of the LRU cache of verified certificates."""


class Forwarded(NamedTuple):
    """A forwarded certificate."""

    caller: Caller
    not_before: datetime
    not_after: datetime


class ForwardedCertificates:
    """Verifies forwarded certificates against these authorities."""

    def __init__(
        self, authorities: Sequence[x509.Certificate], broker_names: Container[str]
    ) -> None:
        self._authorities = authorities
        self._broker_names = broker_names
        self._known: OrderedDict[str, Forwarded] = OrderedDict()

    def read(self, header: str, now: datetime) -> Forwarded:
        """Return the forwarded certificate if one of our authorities signed it and it is valid now."""
        known = self._known.get(header)
        if known is None:
            known = self._remember(header, self._read(header))
        else:
            self._known.move_to_end(header)
        if not known.not_before <= now <= known.not_after:
            raise InvalidIdentity(f"{HEADER}: certificate of {known.caller.name} is not valid now")
        return known

    def _remember(self, header: str, known: Forwarded) -> Forwarded:
        self._known[header] = known
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return known

    def _read(self, header: str) -> Forwarded:
        certificate = _certificate(header)
        if not any(chains.is_issued_by(certificate, authority) for authority in self._authorities):
            raise InvalidIdentity(
                f"{HEADER}: certificate is not signed by an authority of this broker"
            )
        if not _is_clients(certificate):
            raise InvalidIdentity(f"{HEADER}: certificate is not a client certificate")
        caller = identities.holder(certificate, broker_names=self._broker_names)
        if caller.role is Role.PROXY:
            raise InvalidIdentity(f"{HEADER}: {caller.name} is a proxy; proxies cannot be chained")
        return Forwarded(caller, certificate.not_valid_before_utc, certificate.not_valid_after_utc)


def _certificate(header: str) -> x509.Certificate:
    """Decode a byte sequence of RFC 8941: base64 between two colons."""
    if len(header) > LONGEST or not (len(header) > 2 and header[0] == header[-1] == ":"):
        raise InvalidIdentity(f"{HEADER}: not a byte sequence", hint="use :base64:")
    try:
        return x509.load_der_x509_certificate(base64.b64decode(header[1:-1], validate=True))
    except (binascii.Error, ValueError, x509.InvalidVersion) as problem:
        raise InvalidIdentity(f"{HEADER}: not a certificate") from problem


def _is_clients(certificate: x509.Certificate) -> bool:
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
