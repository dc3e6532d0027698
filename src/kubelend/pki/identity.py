"""Identity: the caller of a verified certificate, certificate subjects by role, and forwarded certificates.

Identity comes from the certificate only, never from a body. `Profile` defines how certificates of brokers,
clusters and people look: the common name is the cluster's ID, the organisation its role, and the broker has
the names of its service.
"""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from collections.abc import Container, Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, cast

import msgspec
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kubelend.core.errors import Forbidden, InvalidIdentity, InvalidSettings
from kubelend.core.lifecycle import Role
from kubelend.core.models import ClusterId
from kubelend.pki import x509 as pki_x509

MAX_NAME_LENGTH = 64
"""Maximum length of a common name: the upper bound of X.520, which issuers and libraries enforce."""


# Organisations with another role than cluster. Older certificates have LiqoResourceBroker,
# LiqoResourceAgent or no organisation, which all mean cluster.
ROLES_BY_ORGANISATION = {
    "kubelend:viewer": Role.VIEWER,
    "kubelend:admin": Role.ADMIN,
    "kubelend:proxy": Role.PROXY,
}


class Caller(msgspec.Struct, frozen=True):
    """An authenticated caller: a cluster by its ID, or a person by name."""

    name: str
    role: Role = Role.CLUSTER
    since: datetime | None = None
    until: datetime | None = None
    """Validity of the certificate, if known."""
    via: Caller | None = None
    """The proxy that forwarded the request, if any."""

    @property
    def rate_key(self) -> str:
        """What the rate limit counts by: names are unique only within a role."""
        return f"{self.role} {self.name}"

    @property
    def proxy(self) -> str:
        """Name of the proxy; empty if there is none."""
        return "" if self.via is None else self.via.name

    @property
    def cluster(self) -> ClusterId:
        """ID of the calling cluster. `Forbidden` if the caller has another role."""
        if self.role is not Role.CLUSTER:
            raise Forbidden(
                f"{self.name} is not a cluster but a {self.role}",
                hint="use the certificate of a cluster",
            )
        return ClusterId(self.name)


def caller_from_peercert(
    peercert: Mapping[str, object], *, broker_names: Container[str] = ()
) -> Caller:
    """Return the caller of a verified certificate as returned by `getpeercert()`.

    `broker_names` are the broker's own names, which no client may have.
    """
    # A tuple of relative names, each a tuple of (attribute, value) pairs.
    subject = cast("tuple[tuple[tuple[str, str], ...], ...]", peercert.get("subject", ()))
    attributes = [attribute for relative in subject for attribute in relative]
    return caller_from_subject(attributes, broker_names=broker_names)


def caller_from_subject(
    attributes: Iterable[tuple[str, str]], *, broker_names: Container[str] = ()
) -> Caller:
    """Return the caller of subject attributes, named as in `getpeercert()`."""
    name, role = _name_and_role(attributes)
    check_common_name(name)
    if name in broker_names:
        raise InvalidIdentity(
            f"{name} is the broker's own name",
            hint="issue a certificate with the cluster's ID as its common name",
        )
    return Caller(name, role)


def caller_from_certificate(
    certificate: x509.Certificate, *, broker_names: Container[str] = ()
) -> Caller:
    """Return the caller that the holder of a certificate authenticates as."""
    return caller_from_subject(subject_attributes(certificate.subject), broker_names=broker_names)


def subject_attributes(subject: Iterable[x509.NameAttribute[Any]]) -> list[tuple[str, str]]:
    """Return the attributes of a subject that make an identity, named as in `getpeercert()`."""
    return [
        (_ATTRIBUTES[each.oid], value if isinstance(value, str) else value.decode(errors="replace"))
        for each in subject
        if each.oid in _ATTRIBUTES and (value := each.value) is not None
    ]


def check_common_name(name: str) -> None:
    """Validate a common name. Any printable text is allowed, DNS label or not."""
    if not name.strip():
        raise InvalidIdentity("common name of the certificate is empty")
    if len(name) > MAX_NAME_LENGTH:
        raise InvalidIdentity(
            f"common name has {len(name)} characters; at most {MAX_NAME_LENGTH} are allowed"
        )
    # Such characters could forge log lines and headers, or make two names look alike.
    if not name.isprintable():
        raise InvalidIdentity(f"common name {name!r} contains control or invisible characters")
    if name[0] == " " or name[-1] == " ":
        raise InvalidIdentity(f"common name {name!r} begins or ends with a space")


_ATTRIBUTES = {NameOID.COMMON_NAME: "commonName", NameOID.ORGANIZATION_NAME: "organizationName"}


def _name_and_role(attributes: Iterable[tuple[str, str]]) -> tuple[str, Role]:
    name: str | None = None
    role = Role.CLUSTER
    for attribute, value in attributes:
        if attribute == "commonName":
            if name is not None:
                raise InvalidIdentity("certificate has several common names")
            name = value
        elif attribute == "organizationName" and role is not Role.ADMIN:
            role = ROLES_BY_ORGANISATION.get(value, role)
    if name is None:
        raise InvalidIdentity("certificate has no common name")
    return name, role


BROKER_NAME = "liqo-resource-broker"

ORGANISATIONS = {
    Role.CLUSTER: "LiqoResourceAgent",
    **{role: organisation for organisation, role in ROLES_BY_ORGANISATION.items()},
}

_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_HOST_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")


class Profile(msgspec.Struct, frozen=True):
    """The part of a certificate that depends on its holder."""

    subject: x509.Name
    usage: x509.ObjectIdentifier
    names: tuple[x509.GeneralName, ...] = ()


def server_profile(*, namespace: str = "default", names: Iterable[str] = ()) -> Profile:
    """Profile of the broker: names of its service in `namespace`, loopback, and `names` (hosts or
    addresses).
    """
    if not _NAMESPACE.fullmatch(namespace):
        raise InvalidSettings(f"{namespace!r} is not a valid Kubernetes namespace")
    service = f"{BROKER_NAME}.{namespace}"
    hosts = (BROKER_NAME, service, f"{service}.svc", f"{service}.svc.cluster.local", "localhost")
    return Profile(
        _subject_name(BROKER_NAME, "LiqoResourceBroker"),
        ExtendedKeyUsageOID.SERVER_AUTH,
        tuple(_general_name(name) for name in dict.fromkeys((*hosts, "127.0.0.1", *names))),
    )


def client_profile(name: str, role: Role = Role.CLUSTER) -> Profile:
    """Profile of a cluster or a person. Rejects names that the broker would reject."""
    check_common_name(name)
    if name == BROKER_NAME:
        raise InvalidIdentity(f"{name} is the broker's own name", hint="choose another cluster ID")
    return Profile(_subject_name(name, ORGANISATIONS[role]), ExtendedKeyUsageOID.CLIENT_AUTH)


def _subject_name(name: str, organisation: str) -> x509.Name:
    try:
        common_name = x509.NameAttribute(NameOID.COMMON_NAME, name)
    except ValueError as error:
        # The library counts bytes where X.520 counts characters.
        raise InvalidIdentity(f"the common name {name!r} has more than 64 bytes") from error
    return x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, organisation), common_name])


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    labels = name.removeprefix("*.").split(".")
    if len(name) > 253 or not all(_HOST_LABEL.fullmatch(label) for label in labels):
        raise InvalidSettings(
            f"{name!r} is neither a host name nor an IP address",
            hint="give names such as broker.example.org or 192.0.2.1, without scheme and port",
        )
    return x509.DNSName(name)


CLIENT_CERT_HEADER = "Client-Cert"
MAX_HEADER_LENGTH = 16 * 1024
CERTIFICATE_CACHE_SIZE = 20_000
"""Size of the LRU cache of verified certificates."""


class ForwardedCertificateVerifier:
    """Verifies forwarded certificates against these authorities."""

    def __init__(
        self, authorities: Iterable[x509.Certificate], broker_names: Container[str]
    ) -> None:
        self._authorities = list(authorities)
        self._broker_names = broker_names
        self._cached = lru_cache(CERTIFICATE_CACHE_SIZE)(self._verify_signature)

    def verify(self, header: str, proxy: Caller, now: datetime) -> Caller:
        """Return the caller of a certificate that one of our authorities signed and that is valid now."""
        caller, since, until = self._cached(header)
        if not since <= now <= until:
            raise InvalidIdentity(
                f"{CLIENT_CERT_HEADER}: certificate of {caller.name} is not valid now"
            )
        return Caller(caller.name, caller.role, since, until, proxy)

    def _verify_signature(self, header: str) -> tuple[Caller, datetime, datetime]:
        certificate = _decode_header(header)
        if not any(pki_x509.is_issued_by(certificate, each) for each in self._authorities):
            raise InvalidIdentity(
                f"{CLIENT_CERT_HEADER}: certificate is not signed by an authority of this broker"
            )
        if not _is_client_certificate(certificate):
            raise InvalidIdentity(f"{CLIENT_CERT_HEADER}: certificate is not a client certificate")
        caller = caller_from_certificate(certificate, broker_names=self._broker_names)
        if caller.role is Role.PROXY:
            raise InvalidIdentity(
                f"{CLIENT_CERT_HEADER}: {caller.name} is a proxy; proxies cannot be chained"
            )
        return caller, certificate.not_valid_before_utc, certificate.not_valid_after_utc


def _decode_header(header: str) -> x509.Certificate:
    """Decode a byte sequence of RFC 8941: base64 between two colons."""
    if len(header) > MAX_HEADER_LENGTH or not (len(header) > 2 and header[0] == header[-1] == ":"):
        raise InvalidIdentity(f"{CLIENT_CERT_HEADER}: not a byte sequence", hint="use :base64:")
    try:
        return x509.load_der_x509_certificate(base64.b64decode(header[1:-1], validate=True))
    except (binascii.Error, ValueError, x509.InvalidVersion) as error:
        raise InvalidIdentity(f"{CLIENT_CERT_HEADER}: not a certificate") from error


def _is_client_certificate(certificate: x509.Certificate) -> bool:
    """Whether TLS would accept the certificate from a client: not a CA, and client authentication if usages
    are set.
    """
    try:
        constraints = pki_x509.find_extension(certificate, x509.BasicConstraints)
        usage = pki_x509.find_extension(certificate, x509.ExtendedKeyUsage)
    except (ValueError, x509.DuplicateExtension):
        return False
    is_authority = constraints is not None and constraints.ca
    return not is_authority and (usage is None or ExtendedKeyUsageOID.CLIENT_AUTH in usage)
