"""Certificate profiles: subject, alternative names and usage by role."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

import msgspec
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kubelend.core.errors import InvalidIdentity, InvalidSettings
from kubelend.core.roles import Role
from kubelend.pki import identities

BROKER_NAME = "liqo-resource-broker"

ORGANISATIONS = {
    Role.CLUSTER: "LiqoResourceAgent",
    **{role: organisation for organisation, role in identities.ROLES_BY_ORGANISATION.items()},
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
    identities.check_common_name(name)
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
