"""Prepares a bare cluster for a broker or an agent: CRDs, service account, RBAC, fixture nodes and pods.

Uses our own client as administrator, for clusters of `envtest` and of kind alike.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import yaml

from kubelend.core.errors import AlreadyExists, InvalidSettings
from kubelend.envtest import credentials, servers, waiting
from kubelend.envtest.assets import KubernetesVersion
from kubelend.kube import config
from kubelend.kube.client import Client
from kubelend.wire import crds, objects
from kubelend.wire.objects import Object

Manifest = dict[str, Any]

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


def _node(name: str, cpu: str, memory: str, gpu: str = "") -> Manifest:
    amounts = {"cpu": cpu, "memory": memory, "pods": "110"}
    if gpu:
        amounts["nvidia.com/gpu"] = gpu
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "status": {"capacity": amounts, "allocatable": amounts, "conditions": [_READY_CONDITION]},
    }


def _pod(node: str, name: str, cpu: str, memory: str, namespace: str = "kube-system") -> Manifest:
    resources = {"requests": {"cpu": cpu, "memory": memory}}
    containers = [{"name": "main", "image": "none", "resources": resources}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"nodeName": node, "containers": containers},
    }


def _system_pods(node: str) -> list[Manifest]:
    """The system pods of an idle cluster."""
    return [
        _pod(node, "coredns-1", "100m", "70Mi"),
        _pod(node, "coredns-2", "100m", "70Mi"),
        _pod(node, "etcd", "100m", "100Mi"),
        _pod(node, "kindnet", "100m", "50Mi"),
        _pod(node, "kube-apiserver", "250m", "0"),
        _pod(node, "kube-controller-manager", "200m", "0"),
        _pod(node, "kube-scheduler", "100m", "0"),
    ]


CLUSTER_FIXTURES: Final = {
    "agent-cluster-1": [
        _node("agent-cluster-1-control-plane", "4", "4Gi"),
        _node("agent-cluster-1-gpu", "2", "4Gi", gpu="1"),
        *_system_pods("agent-cluster-1-control-plane"),
    ],
    "agent-cluster-2": [
        _node("agent-cluster-2-control-plane", "10", "8025424Ki"),
        *_system_pods("agent-cluster-2-control-plane"),
        _pod("agent-cluster-2-control-plane", "web", "100m", "128Mi", "default"),
    ],
    # The third agent: less room than agent-cluster-2, so that only what does not fit there comes here.
    "agent-cluster-3": [
        _node("agent-cluster-3-control-plane", "4", "4Gi"),
        *_system_pods("agent-cluster-3-control-plane"),
    ],
}
"""Nodes in condition Ready and pods in phase Running, by cluster."""

ACCOUNT_NAMESPACE: Final = "kubelend"
"""Namespace of the service accounts."""
OBJECT_NAMESPACE: Final = "default"
"""Namespace of the broker's objects and of an agent's instructions."""

AGENT_ACCOUNT: Final = "kubelend-agent"
BROKER_ACCOUNT: Final = "kubelend-broker"
LIQO_NAMESPACE: Final = "liqo"

SHIPPED: Final = Path(__file__).parents[3] / "deploy" / "kustomize"
"""What we ship, rendered from the charts."""

_ADMISSION_GROUP: Final = "admissionregistration.k8s.io"
_RBAC_KINDS: Final = ("ServiceAccount", "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding")


def broker_manifests() -> list[Manifest]:
    """Returns the account and the roles of a broker with a Kubernetes store and interface."""
    parts = ("broker/overlays/replicated", "broker/components/cluster-namespaces")
    return [one for part in parts for one in _read_shipped(part) if one["kind"] in _RBAC_KINDS]


def agent_manifests() -> list[Manifest]:
    """Returns the account and the roles of an agent."""
    return [one for one in _read_shipped("agent/base") if one["kind"] in _RBAC_KINDS]


def liqo_manifests() -> list[Manifest]:
    """Returns what an agent needs besides in a cluster with Liqo: the PriorityClass of placeholders,
    admission policies, and the roles for peering.
    """
    policies = filter(_is_policy, _read_shipped("agent/base"))
    components = ("agent/components/hold-gate", "agent/components/liqo")
    return [*policies, *(one for part in components for one in _read_shipped(part))]


def _read_shipped(part: str) -> list[Manifest]:
    """Returns the objects, with roles and parameters in the namespace of the objects."""
    path = SHIPPED / part / "manifests.yaml"
    try:
        found = [one for one in yaml.safe_load_all(path.read_text("utf-8")) if one]
    except OSError as error:
        raise InvalidSettings(f"{path} cannot be read", hint="run it in a clone") from error
    for one in found:
        is_role = one["kind"] in ("Role", "RoleBinding")
        if is_role and one["metadata"]["namespace"] == ACCOUNT_NAMESPACE:
            one["metadata"]["namespace"] = OBJECT_NAMESPACE
        if parameters := one.get("spec", {}).get("paramRef"):
            parameters["namespace"] = OBJECT_NAMESPACE
    return found


def _is_policy(document: Manifest) -> bool:
    is_admission = str(document["apiVersion"]).startswith(f"{_ADMISSION_GROUP}/")
    return is_admission or document["kind"] == "PriorityClass"


def _namespace_manifest(name: str) -> Manifest:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}


_TOKEN_SECONDS = 30 * 24 * 3600
_ESTABLISHED_TIMEOUT = 30.0

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
    "PriorityClass": "/apis/scheduling.k8s.io/v1/priorityclasses",
    **{
        f"{kind}{part}": f"/apis/{_ADMISSION_GROUP}/v1/{kind.lower()[:-1]}{plural}"
        for kind in ("ValidatingAdmissionPolicy", "MutatingAdmissionPolicy")
        for part, plural in (("", "ies"), ("Binding", "ybindings"))
    },
}


class InstalledCluster(NamedTuple):
    """A cluster that is ready for its broker or agent."""

    version: KubernetesVersion
    account: Path
    """Kubeconfig of the service account of the broker or agent."""


async def install_broker_cluster(administrator: Path) -> InstalledCluster:
    """Installs what a broker with a Kubernetes store needs."""
    return await _install(administrator, BROKER_ACCOUNT, broker_manifests(), crds.ALL_KINDS)


async def install_agent_cluster(
    administrator: Path, fixture: Sequence[Manifest], *, has_liqo: bool = False
) -> InstalledCluster:
    """Installs what an agent needs, and creates fixture nodes and pods.

    With Liqo there is also what placeholders and peering need; without it no scheduler would place them.
    """
    if has_liqo:
        async with _open_client(administrator) as client:
            await _create_object(client, _namespace_manifest(LIQO_NAMESPACE))
    found = await _install(administrator, AGENT_ACCOUNT, agent_manifests(), objects.KINDS)
    async with _open_client(administrator) as client:
        for manifest in (*(liqo_manifests() if has_liqo else ()), *fixture):
            await _create_object(client, manifest)
            path = f"{collection_path(manifest)}/{manifest['metadata']['name']}"
            if manifest["kind"] == "Pod":
                await client.raw("PUT", f"{path}/status", manifest | RUNNING_STATUS)
            elif manifest["kind"] == "Node":
                # Without the taint of a new node, which only a controller manager would remove.
                await client.raw("PUT", path, manifest)
    return found


async def _install(
    administrator: Path,
    account: str,
    manifests: Sequence[Manifest],
    kinds: Sequence[type[Object]],
) -> InstalledCluster:
    """Installs everything and waits until the CRDs are established."""
    async with _open_client(administrator) as client:
        version = await _server_version(client)
        await _install_crds(client, kinds, version)
        for manifest in (_namespace_manifest(ACCOUNT_NAMESPACE), *manifests):
            await _create_object(client, manifest)
        token = await _request_token(client, account)
    path = administrator.with_name(f"{account}.kubeconfig")
    return InstalledCluster(
        version, credentials.write_token_kubeconfig(administrator, path, account, token)
    )


def _open_client(administrator: Path) -> AbstractAsyncContextManager[Client]:
    return Client.open(config.config_from_kubeconfig(administrator))


async def _server_version(client: Client) -> KubernetesVersion:
    found = msgspec.json.decode(await client.raw("GET", "/version"), type=dict[str, str])
    numbers = re.findall(r"\d+", found["gitVersion"])
    return KubernetesVersion(*map(int, numbers[:3]))


async def _install_crds(
    client: Client, kinds: Sequence[type[Object]], version: KubernetesVersion
) -> None:
    for kind in kinds:
        await _create_object(client, crds.crd(kind, cel=version >= servers.CEL_SINCE))
    for kind in kinds:
        name = f"{kind.plural}.{kind.group}"
        await waiting.until(
            functools.partial(_is_established, client, name),
            f"CRD {name} was not established",
            _ESTABLISHED_TIMEOUT,
        )


async def _is_established(client: Client, name: str) -> bool:
    content = await client.raw("GET", f"{_COLLECTION_PATHS['CustomResourceDefinition']}/{name}")
    # A new CRD has null in place of the list.
    conditions = msgspec.json.decode(content).get("status", {}).get("conditions") or []
    return any(one["type"] == "Established" and one["status"] == "True" for one in conditions)


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
        await client.raw("POST", collection_path(document), document)


def collection_path(document: Manifest) -> str:
    return _COLLECTION_PATHS[document["kind"]].format(**document["metadata"])
