"""Cluster namespaces: names, labels, texts and manifests, shared by the broker and the agents.

A cluster namespace is a namespace of the broker's cluster that belongs to one cluster (docs/transports.md).
Its account writes specs and the broker the status, but for ProviderInstructions, where it is the other way
round. `kubelend create clusternamespace` prints the manifests.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import timedelta
from hashlib import sha256
from typing import Any, ClassVar, Final

import msgspec

from kubelend.core import durations
from kubelend.core.errors import InvalidDuration, InvalidInput, KubelendError
from kubelend.wire import bodies, broker_objects, json_types, objects, quantities
from kubelend.wire.broker_objects import ClusterSession
from kubelend.wire.objects import Condition, Metadata, Object

CLUSTER_LABEL: Final = "broker.fluidos.eu/cluster-id"
"""The label of a cluster namespace: its value is the cluster ID."""
IDEMPOTENCY_ANNOTATION: Final = "broker.fluidos.eu/idempotency-key"
"""The annotation of a reservation that an agent requests: the same key gives the same reservation."""
SESSION_NAME: Final = "session"
"""Of the ClusterSession, the one object about the whole cluster."""

_LABEL_VALUE: Final = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?", re.ASCII)


class Namespace(Object, frozen=True):
    """A Namespace with its metadata only."""

    group: ClassVar[str] = ""
    version: ClassVar[str] = "v1"
    kind: ClassVar[str] = "Namespace"
    plural: ClassVar[str] = "namespaces"

    metadata: Metadata

    @property
    def cluster_id(self) -> str:
        """The cluster ID; empty without the label."""
        return self.metadata.labels.get(CLUSTER_LABEL, "")


def check_cluster_label(cluster: str) -> str:
    """Checks that the ID can be a label value: not every common name of a certificate is one."""
    if not _LABEL_VALUE.fullmatch(cluster):
        raise InvalidInput(
            f"{cluster[:64]!r} cannot have a cluster namespace: the cluster ID is not a valid label value",
            hint="use up to 63 letters, digits, dashes, dots and underscores",
        )
    return cluster


def advertisement_object_name(cluster: str) -> str:
    return f"{objects.object_name(cluster)}-adv"


def request_object_name(key: str) -> str:
    """Derived from the key alone, so that a repeated request finds its object."""
    return f"ask-{sha256(key.encode()).hexdigest()[:40]}"


def instruction_object_name(reservation: str) -> str:
    return f"{objects.object_name(reservation)}-provider"


def reservation_object_name(reservation: str) -> str:
    """Of an object that shows a reservation which was requested elsewhere."""
    return objects.object_name(reservation)


def check_request(body: bodies.ReservationRequest) -> None:
    """Raises the error of a request that the API server has rejected, by the same class as the REST API."""
    quantities.parse_reservation_amounts(body.requested_resources)
    if body.duration and durations.parse_duration(body.duration) <= timedelta():
        raise InvalidDuration(f"duration: {body.duration!r} must be greater than zero")
    if body.wait and durations.parse_duration(body.wait) < timedelta():
        raise InvalidDuration(f"wait: {body.wait!r} must not be negative")


def replacement(wanted: msgspec.Struct) -> dict[str, object]:
    """All fields, for a merge patch: those that are not set remove the previous ones."""
    texts: dict[str, object] = msgspec.to_builtins(wanted)
    names = (field.encode_name for field in msgspec.structs.fields(wanted))
    return {name: texts.get(name) for name in names}


ACCEPTED: Final = "Accepted"


def accepted_condition(error: KubelendError | None, generation: int = 0) -> Condition:
    """The condition for a spec: False if it is refused for good, Unknown if the broker will try again."""
    if error is None:
        return Condition(ACCEPTED, "True", ACCEPTED, observed_generation=generation)
    status = "Unknown" if error.retryable else "False"
    return Condition(
        ACCEPTED, status, error.code, error.message, None, generation, error.hint or ""
    )


def find_accepted(conditions: Iterable[Condition]) -> Condition | None:
    return next((one for one in conditions if one.type == ACCEPTED), None)


def error_from_condition(found: Condition | None) -> KubelendError | None:
    """The broker's error by its class; None if it has accepted."""
    if found is None or found.status == "True":
        return None
    kind = json_types.ERRORS_BY_CODE.get(found.reason, KubelendError)
    return kind(found.message, hint=found.hint)


Manifest = dict[str, Any]

AGENT_ACCOUNT: Final = "kubelend-agent"
_RBAC_GROUP: Final = "rbac.authorization.k8s.io"
_READ_VERBS: Final = ("get", "list", "watch")

AGENT_RULES: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    (broker_objects.GROUP, "clusteradvertisements", (*_READ_VERBS, "create", "update")),
    (broker_objects.GROUP, "reservations", (*_READ_VERBS, "create", "patch", "delete")),
    (broker_objects.GROUP, "clustersessions", (*_READ_VERBS, "patch")),
    (objects.GROUP, "providerinstructions", _READ_VERBS),
    (objects.GROUP, "providerinstructions/status", ("patch",)),
    ("coordination.k8s.io", "leases", ("get", "create", "update")),
)
"""Group, resource and verbs of the account's Role."""

BROKER_RULES: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    ("", "namespaces", ("list", "watch")),
    (broker_objects.GROUP, "clusteradvertisements", ("list", "watch")),
    (broker_objects.GROUP, "clusteradvertisements/status", ("patch",)),
    (broker_objects.GROUP, "reservations", ("list", "watch", "create", "patch", "delete")),
    (broker_objects.GROUP, "reservations/status", ("patch",)),
    (broker_objects.GROUP, "clustersessions", ("list", "watch")),
    (broker_objects.GROUP, "clustersessions/status", ("patch",)),
    (objects.GROUP, "providerinstructions", ("list", "watch", "create", "patch", "delete")),
)
"""The broker's ClusterRole for all cluster namespaces."""


def cluster_namespace_manifests(cluster: str, namespace: str, *, user: str = "") -> list[Manifest]:
    """For `kubectl apply`. The account is a ServiceAccount, or a user that the API server knows."""
    check_cluster_label(cluster)
    group, version = broker_objects.GROUP, objects.VERSION
    found: list[Manifest] = [
        _manifest("v1", "Namespace", namespace, ""),
        _manifest(f"{group}/{version}", ClusterSession.kind, SESSION_NAME, namespace),
    ]
    found[0]["metadata"]["labels"] = {CLUSTER_LABEL: cluster}
    if not user:
        found.append(_manifest("v1", "ServiceAccount", AGENT_ACCOUNT, namespace))
    role = _manifest(f"{_RBAC_GROUP}/v1", "Role", AGENT_ACCOUNT, namespace) | {
        "rules": policy_rules(AGENT_RULES)
    }
    return [*found, role, _role_binding(namespace, user)]


def policy_rules(rules: tuple[tuple[str, str, tuple[str, ...]], ...]) -> list[Manifest]:
    return [
        {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}
        for group, resource, verbs in rules
    ]


def _role_binding(namespace: str, user: str) -> Manifest:
    subject = (
        {"apiGroup": _RBAC_GROUP, "kind": "User", "name": user}
        if user
        else {"kind": "ServiceAccount", "name": AGENT_ACCOUNT, "namespace": namespace}
    )
    return _manifest(f"{_RBAC_GROUP}/v1", "RoleBinding", AGENT_ACCOUNT, namespace) | {
        "roleRef": {"apiGroup": _RBAC_GROUP, "kind": "Role", "name": AGENT_ACCOUNT},
        "subjects": [subject],
    }


def _manifest(api_version: str, kind: str, name: str, namespace: str) -> Manifest:
    metadata: Manifest = {"name": name}
    if namespace:
        metadata["namespace"] = namespace
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}
