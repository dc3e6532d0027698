"""Manifests of a cluster namespace: the namespace with its label, and an account limited to it.

`kubelend create clusternamespace` prints them. They grant the least verbs that the transport needs.
"""

from __future__ import annotations

from typing import Any, Final

from kubelend.wire import broker_objects, mailboxes, objects

Document = dict[str, Any]

ACCOUNT: Final = "kubelend-agent"
_RBAC: Final = "rbac.authorization.k8s.io"
_LOOK: Final = ("get", "list", "watch")

RULES: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
    (broker_objects.GROUP, "clusteradvertisements", (*_LOOK, "create", "update")),
    (broker_objects.GROUP, "reservations", (*_LOOK, "create", "patch", "delete")),
    (broker_objects.GROUP, "clustersessions", (*_LOOK, "patch")),
    (objects.GROUP, "providerinstructions", _LOOK),
    (objects.GROUP, "providerinstructions/status", ("patch",)),
)
"""Group, resource and verbs of the account's Role."""

BROKERS_RULES: Final[tuple[tuple[str, str, tuple[str, ...]], ...]] = (
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


def documents(cluster: str, namespace: str, *, user: str = "") -> list[Document]:
    """For `kubectl apply`. The account is a ServiceAccount, or a user that the API server knows."""
    mailboxes.check_owner(cluster)
    group, version = broker_objects.GROUP, objects.VERSION
    found: list[Document] = [
        _object("v1", "Namespace", namespace, ""),
        _object(f"{group}/{version}", broker_objects.Mailbox.kind, mailboxes.NAME, namespace),
    ]
    found[0]["metadata"]["labels"] = {mailboxes.OWNER: cluster}
    if not user:
        found.append(_object("v1", "ServiceAccount", ACCOUNT, namespace))
    role = _object(f"{_RBAC}/v1", "Role", ACCOUNT, namespace) | {"rules": rules(RULES)}
    return [*found, role, _binding(namespace, user)]


def rules(of: tuple[tuple[str, str, tuple[str, ...]], ...]) -> list[Document]:
    return [
        {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}
        for group, resource, verbs in of
    ]


def _binding(namespace: str, user: str) -> Document:
    subject = (
        {"apiGroup": _RBAC, "kind": "User", "name": user}
        if user
        else {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": namespace}
    )
    return _object(f"{_RBAC}/v1", "RoleBinding", ACCOUNT, namespace) | {
        "roleRef": {"apiGroup": _RBAC, "kind": "Role", "name": ACCOUNT},
        "subjects": [subject],
    }


def _object(api_version: str, kind: str, name: str, namespace: str) -> Document:
    metadata: Document = {"name": name}
    if namespace:
        metadata["namespace"] = namespace
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata}
