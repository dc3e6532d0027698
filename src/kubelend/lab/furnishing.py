"""Prepares a bare cluster for a broker or an agent: CRDs, service account, RBAC, fixture nodes and pods.

Uses our own client as administrator, for clusters of `envtest` and of kind alike.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from kubelend.core.errors import AlreadyExists, Unavailable
from kubelend.kube import access
from kubelend.kube.client import Client
from kubelend.lab import accounts, inhabitants, manifests, rights
from kubelend.lab.assets import KubernetesVersion
from kubelend.lab.inhabitants import ClusterFixture
from kubelend.lab.rights import Manifest
from kubelend.wire import crds
from kubelend.wire.objects import Object

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
    async with Client.open(access.config_from_kubeconfig(administrator)) as client:
        version = await _server_version(client)
        await _install_crds(client, plan.kinds, version)
        for document in rights.rbac_manifests(plan.account, plan.roles):
            await _create_object(client, document)
        if plan.fixture is not None:
            await _create_fixtures(client, plan.fixture)
        token = await _request_token(client, plan.account)
    path = administrator.with_name(f"{plan.account}.kubeconfig")
    return InstalledCluster(
        version, accounts.write_token_kubeconfig(administrator, path, plan.account, token)
    )


async def _server_version(client: Client) -> KubernetesVersion:
    found = msgspec.json.decode(await client.raw("GET", "/version"), type=dict[str, str])
    numbers = re.findall(r"\d+", found["gitVersion"])
    return KubernetesVersion(*map(int, numbers[:3]))


async def _install_crds(
    client: Client, kinds: Iterable[type[Object]], version: KubernetesVersion
) -> None:
    has_rules = version >= manifests.CEL_SINCE
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
    for node in inhabitants.node_manifests(population):
        await _create_object(client, node)
    for pod in inhabitants.pod_manifests(population):
        await _create_object(client, pod)
        where = f"{_collection_path(pod)}/{pod['metadata']['name']}/status"
        await client.raw("PUT", where, pod | inhabitants.RUNNING_STATUS)


async def _request_token(client: Client, account: str) -> str:
    where = _COLLECTION_PATHS["ServiceAccount"].format(namespace=rights.ACCOUNT_NAMESPACE)
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
