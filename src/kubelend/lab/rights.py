"""Minimal RBAC of the service accounts of broker and agent in the lab's clusters.

A test compares the agent's rules with docs/agent.md and the broker's with the Helm chart.
"""

from __future__ import annotations

from typing import Any, Final

from kubelend.wire import broker_objects, mailbox_manifests, objects

Manifest = dict[str, Any]
Rule = dict[str, Any]

ACCOUNT_NAMESPACE: Final = "kubelend"
"""Namespace of the service accounts."""
OBJECT_NAMESPACE: Final = "default"
"""Namespace of the broker's objects and of an agent's instructions."""

AGENT_ACCOUNT: Final = "kubelend-agent"
BROKER_ACCOUNT: Final = "kubelend-broker"
LEASE_NAME: Final = "kubelend-broker"

_RBAC_GROUP: Final = "rbac.authorization.k8s.io"
_WRITE_VERBS: Final = ("create", "patch", "delete")


def _rule(group: str, resources: str, *verbs: str, names: tuple[str, ...] = ()) -> Rule:
    named = {"resourceNames": list(names)} if names else {}
    return {"apiGroups": [group], "resources": resources.split(), **named, "verbs": list(verbs)}


AGENT_ROLES: Final[dict[tuple[str, str], list[Rule]]] = {
    (AGENT_ACCOUNT, ""): [
        _rule("", "nodes pods", "list", "watch"),
        _rule("", "namespaces", "get", names=("kube-system",)),
        _rule(objects.GROUP, "resourcerequests", "get", "list", "watch", "patch"),
        _rule(objects.GROUP, "resourcerequests/status", "patch"),
    ],
    (f"{AGENT_ACCOUNT}-instructions", OBJECT_NAMESPACE): [
        _rule(
            objects.GROUP,
            "reservationinstructions providerinstructions",
            *("get", "list", "watch", *_WRITE_VERBS),
        ),
        _rule(objects.GROUP, "reservationinstructions/status providerinstructions/status", "patch"),
    ],
    (f"{AGENT_ACCOUNT}-advertisement", OBJECT_NAMESPACE): [
        _rule(objects.GROUP, "advertisements", "get", "create", "patch"),
        _rule(objects.GROUP, "advertisements/status", "patch"),
    ],
}
"""Rules by role name and namespace; without a namespace it is a ClusterRole."""

BROKER_ROLES: Final[dict[tuple[str, str], list[Rule]]] = {
    (BROKER_ACCOUNT, OBJECT_NAMESPACE): [
        _rule(
            broker_objects.GROUP,
            "clusteradvertisements reservations",
            *("get", "list", "watch", *_WRITE_VERBS),
        ),
        _rule(broker_objects.GROUP, "clusteradvertisements/status reservations/status", "patch"),
        _rule(broker_objects.GROUP, "ledgerrecords", "get", "list", *_WRITE_VERBS),
        _rule(broker_objects.GROUP, "ledgerrecords", "update", "watch", names=("head",)),
        _rule("coordination.k8s.io", "leases", "create"),
        _rule("coordination.k8s.io", "leases", "get", "update", names=(LEASE_NAME,)),
        _rule("", "events", "create"),
    ],
    (f"{BROKER_ACCOUNT}-cluster-namespaces", ""): mailbox_manifests.policy_rules(
        mailbox_manifests.BROKER_RULES
    ),
}
"""For a broker with a Kubernetes store and interface."""


def rbac_manifests(account: str, roles: dict[tuple[str, str], list[Rule]]) -> list[Manifest]:
    """Returns the manifests of a service account and its roles, in the order of creation."""
    found: list[Manifest] = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": ACCOUNT_NAMESPACE}},
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": account, "namespace": ACCOUNT_NAMESPACE},
        },
    ]
    for (name, namespace), rules in roles.items():
        found.append(_rbac_object("Role", name, namespace) | {"rules": rules})
        found.append(_binding_manifest(name, namespace, account))
    return found


def _binding_manifest(name: str, namespace: str, account: str) -> Manifest:
    kind = "Role" if namespace else "ClusterRole"
    return _rbac_object("RoleBinding", name, namespace) | {
        "roleRef": {"apiGroup": _RBAC_GROUP, "kind": kind, "name": name},
        "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": ACCOUNT_NAMESPACE}],
    }


def _rbac_object(kind: str, name: str, namespace: str) -> Manifest:
    where = {"namespace": namespace} if namespace else {}
    return {
        "apiVersion": f"{_RBAC_GROUP}/v1",
        "kind": kind if namespace else f"Cluster{kind}",
        "metadata": {"name": name, **where},
    }
