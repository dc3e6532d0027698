"""From a verified peer certificate to a caller: who calls, and as what.

The API asks here on every request, so it is quick. What is read here is what
`kubelend.pki.profiles` writes. Identity comes from nowhere else, least of all from a body.
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

LONGEST_NAME = 64
"""Characters of a common name: X.520's upper bound, which issuers and libraries enforce."""


# Only these make something else of a caller. Older certificates carry LiqoResourceBroker,
# LiqoResourceAgent or nothing: clusters all.
ROLES = {
    "kubelend:viewer": Role.VIEWER,
    "kubelend:admin": Role.ADMIN,
    "kubelend:proxy": Role.PROXY,
}


class Caller(msgspec.Struct, frozen=True):
    """Who calls: a cluster by its ID, or a person by name."""

    name: str
    role: Role = Role.CLUSTER
    since: datetime | None = None
    until: datetime | None = None
    """When the certificate begins and ends that says so, where that is known."""
    via: Caller | None = None
    """The proxy that passed the call on, if one did."""

    @property
    def proxy(self) -> str:
        """The name of that proxy; empty if there is none."""
        return "" if self.via is None else self.via.name

    @property
    def cluster(self) -> ClusterId:
        """The cluster in whose name this caller acts. A person has none, whatever the name."""
        if self.role is not Role.CLUSTER:
            raise Forbidden(
                f"{self.name} is no cluster but a {self.role}",
                hint="use a cluster's certificate",
            )
        return ClusterId(self.name)


def caller_of(peercert: Mapping[str, object], *, broker_names: Container[str] = ()) -> Caller:
    """The caller in what `getpeercert()` tells of a verified certificate.

    `broker_names` are the broker's own (from `own_names`): whoever holds its key is no cluster.
    """
    # A tuple of relative names, each a tuple of (attribute, value): ssl flattens nothing.
    subject = cast("tuple[tuple[tuple[str, str], ...], ...]", peercert.get("subject", ()))
    attributes = [attribute for relative in subject for attribute in relative]
    return caller_from(attributes, broker_names=broker_names)


def caller_from(
    attributes: Iterable[tuple[str, str]], *, broker_names: Container[str] = ()
) -> Caller:
    """The caller in a subject's attributes, by their names in `getpeercert()`."""
    name, role = _name_and_role(attributes)
    check_name(name)
    if name in broker_names:
        raise InvalidIdentity(
            f"{name} is the broker's own name, and no cluster's",
            hint="issue a certificate with the cluster's ID as its common name",
        )
    return Caller(name, role)


def holder(certificate: x509.Certificate, *, broker_names: Container[str] = ()) -> Caller:
    """As whom the holder of a certificate calls."""
    attributes = (
        (_ATTRIBUTES[each.oid], str(each.value))
        for each in certificate.subject
        if each.oid in _ATTRIBUTES
    )
    return caller_from(attributes, broker_names=broker_names)


def check_name(name: str) -> None:
    """Refuse what cannot name a cluster or a person. Any printable text can, DNS label or not."""
    if not name.strip():
        raise InvalidIdentity("the certificate's common name is empty")
    if len(name) > LONGEST_NAME:
        raise InvalidIdentity(
            f"the common name has {len(name)} characters, and at most {LONGEST_NAME} are allowed"
        )
    # Such characters forge log lines and headers, or make two names look alike on a screen.
    if not name.isprintable():
        raise InvalidIdentity(f"the common name {name!r} has control or invisible characters")
    if name[0] == " " or name[-1] == " ":
        raise InvalidIdentity(f"the common name {name!r} begins or ends with a space")


def own_names(directory: Path) -> frozenset[str]:
    """The common names of the certificate in `directory`. Ask again when its files have changed."""
    return frozenset(files.common_names(directory))


_ATTRIBUTES = {NameOID.COMMON_NAME: "commonName", NameOID.ORGANIZATION_NAME: "organizationName"}


def _name_and_role(attributes: Iterable[tuple[str, str]]) -> tuple[str, Role]:
    name: str | None = None
    role = Role.CLUSTER
    for attribute, value in attributes:
        if attribute == "commonName":
            if name is not None:
                raise InvalidIdentity("the certificate has several common names, and one counts")
            name = value
        elif attribute == "organizationName" and role is not Role.ADMIN:
            role = ROLES.get(value, role)
    if name is None:
        raise InvalidIdentity("the certificate has no common name")
    return name, role
