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
from kubelend.lab.assets import Version
from kubelend.lab.inhabitants import Population
from kubelend.lab.rights import Document
from kubelend.wire import crds
from kubelend.wire.objects import Object

_TOKEN_FOR = 30 * 24 * 3600
_DEFINED_WITHIN = 30.0
_POLL = 0.05

_PLACES = {
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


class Furnished(msgspec.Struct, frozen=True):
    """A cluster that is ready for its broker or agent."""

    version: Version
    account: Path
    """Kubeconfig of the service account of the broker or agent."""


class Wanted(msgspec.Struct, frozen=True):
    """What to install in a cluster."""

    account: str
    roles: dict[tuple[str, str], list[Document]]
    kinds: tuple[type[Object], ...]
    population: Population | None = None
    """Fixture nodes and pods; None for a cluster with real ones."""


async def furnish(administrator: Path, wanted: Wanted) -> Furnished:
    """Installs everything and waits until the CRDs are established."""
    async with Client.open(access.from_kubeconfig(administrator)) as client:
        version = await _version(client)
        await _define(client, wanted.kinds, version)
        for document in rights.documents(wanted.account, wanted.roles):
            await _make(client, document)
        if wanted.population is not None:
            await _settle(client, wanted.population)
        token = await _token(client, wanted.account)
    path = administrator.with_name(f"{wanted.account}.kubeconfig")
    return Furnished(version, accounts.with_token(administrator, path, wanted.account, token))


async def _version(client: Client) -> Version:
    found = msgspec.json.decode(await client.raw("GET", "/version"), type=dict[str, str])
    numbers = re.findall(r"\d+", found["gitVersion"])
    return Version(*map(int, numbers[:3]))


async def _define(client: Client, kinds: Iterable[type[Object]], version: Version) -> None:
    has_rules = version >= manifests.RULES_SINCE
    definitions = [crds.definition(kind, cel=has_rules) for kind in kinds]
    for definition in definitions:
        await _make(client, definition)
    try:
        async with asyncio.timeout(_DEFINED_WITHIN):
            for definition in definitions:
                await _defined(client, definition["metadata"]["name"])
    except TimeoutError:
        raise Unavailable(f"the CRDs were not established within {_DEFINED_WITHIN:g} s") from None


async def _defined(client: Client, name: str) -> None:
    while True:
        content = await client.raw("GET", f"{_PLACES['CustomResourceDefinition']}/{name}")
        # A new CRD has null in place of the list.
        conditions = msgspec.json.decode(content).get("status", {}).get("conditions") or []
        if any(one["type"] == "Established" and one["status"] == "True" for one in conditions):
            return
        await asyncio.sleep(_POLL)


async def _settle(client: Client, population: Population) -> None:
    for node in inhabitants.nodes(population):
        await _make(client, node)
    for pod in inhabitants.pods(population):
        await _make(client, pod)
        where = f"{_place(pod)}/{pod['metadata']['name']}/status"
        await client.raw("PUT", where, pod | inhabitants.RUNNING)


async def _token(client: Client, account: str) -> str:
    where = _PLACES["ServiceAccount"].format(namespace=rights.NAMESPACE)
    order = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"expirationSeconds": _TOKEN_FOR},
    }
    answer = await client.raw("POST", f"{where}/{account}/token", order)
    return str(msgspec.json.decode(answer)["status"]["token"])


async def _make(client: Client, document: Document) -> None:
    """Creates an object; an existing one, such as a namespace, is left unchanged."""
    with suppress(AlreadyExists):
        await client.raw("POST", _place(document), document)


def _place(document: Document) -> str:
    return _PLACES[document["kind"]].format(**document["metadata"])
