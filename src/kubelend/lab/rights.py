"""Minimal RBAC of the service accounts of broker and agent in the lab's clusters.

A test compares the agent's rules with docs/agent.md and the broker's with the Helm chart.
"""

from __future__ import annotations

from typing import Any, Final

from kubelend.wire import broker_objects, mailbox_manifests, objects

Document = dict[str, Any]
Rule = dict[str, Any]

NAMESPACE: Final = "kubelend"
"""Namespace of the service accounts."""
OBJECTS: Final = "default"
"""Namespace of the broker's objects and of an agent's instructions."""

AGENT: Final = "kubelend-agent"
BROKER: Final = "kubelend-broker"
LEASE: Final = "kubelend-broker"

_GROUP: Final = "rbac.authorization.k8s.io"
_CHANGE: Final = ("create", "patch", "delete")


def _rule(group: str, resources: str, *verbs: str, names: tuple[str, ...] = ()) -> Rule:
    named = {"resourceNames": list(names)} if names else {}
    return {"apiGroups": [group], "resources": resources.split(), **named, "verbs": list(verbs)}


AGENTS_ROLES: Final[dict[tuple[str, str], list[Rule]]] = {
    (AGENT, ""): [
        _rule("", "nodes pods", "list", "watch"),
        _rule("", "namespaces", "get", names=("kube-system",)),
        _rule(objects.GROUP, "resourcerequests", "get", "list", "watch", "patch"),
        _rule(objects.GROUP, "resourcerequests/status", "patch"),
    ],
    (f"{AGENT}-instructions", OBJECTS): [
        _rule(
            objects.GROUP,
            "reservationinstructions providerinstructions",
            *("get", "list", "watch", *_CHANGE),
        ),
        _rule(objects.GROUP, "reservationinstructions/status providerinstructions/status", "patch"),
    ],
    (f"{AGENT}-advertisement", OBJECTS): [
        _rule(objects.GROUP, "advertisements", "get", "create", "patch"),
        _rule(objects.GROUP, "advertisements/status", "patch"),
    ],
}
"""Rules by role name and namespace; without a namespace it is a ClusterRole."""

BROKERS_ROLES: Final[dict[tuple[str, str], list[Rule]]] = {
    (BROKER, OBJECTS): [
        _rule(
            broker_objects.GROUP,
            "clusteradvertisements reservations",
            *("get", "list", "watch", *_CHANGE),
        ),
        _rule(broker_objects.GROUP, "clusteradvertisements/status reservations/status", "patch"),
        _rule(broker_objects.GROUP, "ledgerrecords", "get", "list", *_CHANGE),
        _rule(broker_objects.GROUP, "ledgerrecords", "update", "watch", names=("head",)),
        _rule("coordination.k8s.io", "leases", "create"),
        _rule("coordination.k8s.io", "leases", "get", "update", names=(LEASE,)),
        _rule("", "events", "create"),
    ],
    (f"{BROKER}-cluster-namespaces", ""): mailbox_manifests.rules(mailbox_manifests.BROKERS_RULES),
}
"""For a broker with a Kubernetes store and interface."""


def documents(account: str, roles: dict[tuple[str, str], list[Rule]]) -> list[Document]:
    """Returns the manifests of a service account and its roles, in the order of creation."""
    found: list[Document] = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": account, "namespace": NAMESPACE},
        },
    ]
    for (name, namespace), rules in roles.items():
        found.append(_placed("Role", name, namespace) | {"rules": rules})
        found.append(_bound(name, namespace, account))
    return found


def _bound(name: str, namespace: str, account: str) -> Document:
    kind = "Role" if namespace else "ClusterRole"
    return _placed("RoleBinding", name, namespace) | {
        "roleRef": {"apiGroup": _GROUP, "kind": kind, "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}],
    }


def _placed(kind: str, name: str, namespace: str) -> Document:
    where = {"namespace": namespace} if namespace else {}
    return {
        "apiVersion": f"{_GROUP}/v1",
        "kind": kind if namespace else f"Cluster{kind}",
        "metadata": {"name": name, **where},
    }
