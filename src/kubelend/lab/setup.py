"""Prepares a bare cluster for a broker or an agent: CRDs, service account, RBAC, fixture nodes and pods.

Uses our own client as administrator, for clusters of `envtest` and of kind alike.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from kubelend.core.errors import AlreadyExists, Unavailable
from kubelend.envtest import credentials, servers
from kubelend.envtest.assets import KubernetesVersion
from kubelend.kube import config
from kubelend.kube.client import Client
from kubelend.wire import broker_objects, cluster_namespaces, crds, objects
from kubelend.wire.objects import Object


class NodeFixture(msgspec.Struct, frozen=True):
    """A node in condition Ready."""

    name: str
    cpu: str
    memory: str
    gpu: str = ""


class PodFixture(msgspec.Struct, frozen=True):
    """A pod in phase Running."""

    name: str
    cpu: str
    memory: str = "0"
    namespace: str = "kube-system"


class ClusterFixture(msgspec.Struct, frozen=True):
    """Nodes and pods of one cluster. All pods are on the first node."""

    nodes: tuple[NodeFixture, ...]
    pods: tuple[PodFixture, ...]


_SYSTEM_PODS = (
    PodFixture("coredns-1", "100m", "70Mi"),
    PodFixture("coredns-2", "100m", "70Mi"),
    PodFixture("etcd", "100m", "100Mi"),
    PodFixture("kindnet", "100m", "50Mi"),
    PodFixture("kube-apiserver", "250m"),
    PodFixture("kube-controller-manager", "200m"),
    PodFixture("kube-scheduler", "100m"),
)
"""The system pods of an idle cluster."""

CLUSTER_FIXTURES = {
    "agent-cluster-1": ClusterFixture(
        (
            NodeFixture("agent-cluster-1-control-plane", "4", "4Gi"),
            NodeFixture("agent-cluster-1-gpu", "2", "4Gi", gpu="1"),
        ),
        _SYSTEM_PODS,
    ),
    "agent-cluster-2": ClusterFixture(
        (NodeFixture("agent-cluster-2-control-plane", "10", "8025424Ki"),),
        (*_SYSTEM_PODS, PodFixture("web", "100m", "128Mi", "default")),
    ),
}


def node_manifests(population: ClusterFixture) -> list[Manifest]:
    return [_node_manifest(node) for node in population.nodes]


def pod_manifests(population: ClusterFixture) -> list[Manifest]:
    return [_pod_manifest(pod, population.nodes[0].name) for pod in population.pods]


_READY_CONDITION = {"type": "Ready", "status": "True"}

RUNNING_STATUS = {
    "status": {
        "phase": "Running",
        "conditions": [_READY_CONDITION],
        "containerStatuses": [
            {
                "name": "main",
                "image": "none",
                "imageID": "",
                "ready": True,
                "restartCount": 0,
                "state": {"running": {}},
            }
        ],
    }
}
"""The status that a kubelet reports for a running pod."""


def _node_manifest(node: NodeFixture) -> Manifest:
    amounts = {"cpu": node.cpu, "memory": node.memory, "pods": "110"}
    if node.gpu:
        amounts["nvidia.com/gpu"] = node.gpu
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node.name, "labels": {"kubernetes.io/hostname": node.name}},
        "status": {"capacity": amounts, "allocatable": amounts, "conditions": [_READY_CONDITION]},
    }


def _pod_manifest(pod: PodFixture, node: str) -> Manifest:
    requests = {"cpu": pod.cpu, "memory": pod.memory}
    container = {"name": "main", "image": "none", "resources": {"requests": requests}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": pod.name, "namespace": pod.namespace},
        "spec": {"nodeName": node, "containers": [container]},
    }


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
    (f"{BROKER_ACCOUNT}-cluster-namespaces", ""): cluster_namespaces.policy_rules(
        cluster_namespaces.BROKER_RULES
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


_TOKEN_SECONDS = 30 * 24 * 3600
_ESTABLISHED_TIMEOUT = 30.0
_POLL = 0.05

_COLLECTION_PATHS = {
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
    "Namespace": "/api/v1/namespaces",
    "Node": "/api/v1/nodes",
    "Pod": "/api/v1/namespaces/{namespace}/pods",
    "ServiceAccount": "/api/v1/namespaces/{namespace}/serviceaccounts",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings",
}


class InstalledCluster(msgspec.Struct, frozen=True):
    """A cluster that is ready for its broker or agent."""

    version: KubernetesVersion
    account: Path
    """Kubeconfig of the service account of the broker or agent."""


class InstallPlan(msgspec.Struct, frozen=True):
    """What to install in a cluster."""

    account: str
    roles: dict[tuple[str, str], list[Manifest]]
    kinds: tuple[type[Object], ...]
    fixture: ClusterFixture | None = None
    """Fixture nodes and pods; None for a cluster with real ones."""


async def install_cluster(administrator: Path, plan: InstallPlan) -> InstalledCluster:
    """Installs everything and waits until the CRDs are established."""
    async with Client.open(config.config_from_kubeconfig(administrator)) as client:
        version = await _server_version(client)
        await _install_crds(client, plan.kinds, version)
        for document in rbac_manifests(plan.account, plan.roles):
            await _create_object(client, document)
        if plan.fixture is not None:
            await _create_fixtures(client, plan.fixture)
        token = await _request_token(client, plan.account)
    path = administrator.with_name(f"{plan.account}.kubeconfig")
    return InstalledCluster(
        version, credentials.write_token_kubeconfig(administrator, path, plan.account, token)
    )


async def _server_version(client: Client) -> KubernetesVersion:
    found = msgspec.json.decode(await client.raw("GET", "/version"), type=dict[str, str])
    numbers = re.findall(r"\d+", found["gitVersion"])
    return KubernetesVersion(*map(int, numbers[:3]))


async def _install_crds(
    client: Client, kinds: Iterable[type[Object]], version: KubernetesVersion
) -> None:
    has_rules = version >= servers.CEL_SINCE
    definitions = [crds.crd(kind, cel=has_rules) for kind in kinds]
    for definition in definitions:
        await _create_object(client, definition)
    try:
        async with asyncio.timeout(_ESTABLISHED_TIMEOUT):
            for definition in definitions:
                await _wait_established(client, definition["metadata"]["name"])
    except TimeoutError:
        raise Unavailable(
            f"the CRDs were not established within {_ESTABLISHED_TIMEOUT:g} s"
        ) from None


async def _wait_established(client: Client, name: str) -> None:
    while True:
        content = await client.raw("GET", f"{_COLLECTION_PATHS['CustomResourceDefinition']}/{name}")
        # A new CRD has null in place of the list.
        conditions = msgspec.json.decode(content).get("status", {}).get("conditions") or []
        if any(one["type"] == "Established" and one["status"] == "True" for one in conditions):
            return
        await asyncio.sleep(_POLL)


async def _create_fixtures(client: Client, population: ClusterFixture) -> None:
    for node in node_manifests(population):
        await _create_object(client, node)
    for pod in pod_manifests(population):
        await _create_object(client, pod)
        where = f"{_collection_path(pod)}/{pod['metadata']['name']}/status"
        await client.raw("PUT", where, pod | RUNNING_STATUS)


async def _request_token(client: Client, account: str) -> str:
    where = _COLLECTION_PATHS["ServiceAccount"].format(namespace=ACCOUNT_NAMESPACE)
    order = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": _TOKEN_SECONDS},
    }
    answer = await client.raw("POST", f"{where}/{account}/token", order)
    return str(msgspec.json.decode(answer)["status"]["token"])


async def _create_object(client: Client, document: Manifest) -> None:
    """Creates an object; an existing one, such as a namespace, is left unchanged."""
    with suppress(AlreadyExists):
        await client.raw("POST", _collection_path(document), document)


def _collection_path(document: Manifest) -> str:
    return _COLLECTION_PATHS[document["kind"]].format(**document["metadata"])
