"""Identity: the caller of a verified certificate, certificate subjects by role, and forwarded certificates.

Identity comes from the certificate only, never from a body. `Profile` defines how certificates of brokers,
clusters and people look: the common name is the cluster's ID, the organisation its role, and the broker has
the names of its service.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import cast

import msgspec
from cryptography import x509
from cryptography.x509.oid import NameOID

from kubelend.core.errors import Forbidden, InvalidIdentity
from kubelend.core.models import ClusterId
from kubelend.core.roles import Role
from kubelend.pki import files

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

    `broker_names` are the broker's own names (`own_names`), which no client may have.
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
    attributes = (
        (_ATTRIBUTES[each.oid], str(each.value))
        for each in certificate.subject
        if each.oid in _ATTRIBUTES
    )
    return caller_from_subject(attributes, broker_names=broker_names)


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


def certificate_names(directory: Path) -> frozenset[str]:
    """Return the common names of the certificate in `directory`, to be read again when its files change."""
    return frozenset(files.common_names(directory))


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
