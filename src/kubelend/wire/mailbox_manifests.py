"""Manifests of a cluster namespace: the namespace with its label, and an account limited to it.

`kubelend create clusternamespace` prints them. They grant the least verbs that the transport needs.
"""

from __future__ import annotations

from typing import Any, Final

from kubelend.wire import broker_objects, mailboxes, objects

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
    mailboxes.check_cluster_label(cluster)
    group, version = broker_objects.GROUP, objects.VERSION
    found: list[Manifest] = [
        _manifest("v1", "Namespace", namespace, ""),
        _manifest(
            f"{group}/{version}",
            broker_objects.ClusterSession.kind,
            mailboxes.SESSION_NAME,
            namespace,
        ),
    ]
    found[0]["metadata"]["labels"] = {mailboxes.CLUSTER_LABEL: cluster}
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
