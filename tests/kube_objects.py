"""Objects of a real cluster, for tests: made, changed as kubelets and users would, and cleared away."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from kubelend.agent.ports import Snapshot
from kubelend.core import pod_requests
from kubelend.core.errors import AlreadyExists, InvalidInput
from kubelend.envtest.servers import LocalCluster
from kubelend.kube import config, resources
from kubelend.kube.client import Client
from kubelend.kube.resources import Resource
from kubelend.wire import objects

Json = dict[str, Any]


@contextlib.asynccontextmanager
async def opened(cluster: LocalCluster, user: str = "") -> AsyncIterator[Client]:
    """A client of the administrator, or of somebody else."""
    kubeconfig = cluster.kubeconfig_for(user) if user else cluster.admin_kubeconfig
    async with Client.open(config.config_from_kubeconfig(kubeconfig)) as client:
        yield client


def send(cluster: LocalCluster, method: str, path: str, document: Json) -> Json:
    """As kubectl sends it, but without the tenth of a second that it takes; unknown fields are refused.

    `InvalidInput`, with what the server says, unless it takes the document.
    """
    body = json.dumps(document).encode()
    answer = cluster.request(method, f"{path}?fieldValidation=Strict", body)
    found: Json = json.loads(answer.body)
    if not 200 <= answer.status < 300:
        raise InvalidInput(found["message"])
    return found


def create_namespace(cluster: LocalCluster, name: str, **labels: str) -> str:
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}
    send(cluster, "POST", "/api/v1/namespaces", body)
    return name


def listed(cluster: LocalCluster, path: str) -> list[Json]:
    found: list[Json] = json.loads(cluster.call("GET", path))["items"]
    return found


async def clear(client: Client) -> None:
    """No object of an agent's is left, in any namespace."""
    for kind in objects.KINDS:
        resource = resources.resource_for(kind)
        for found in (await client.list(resource)).objects:
            name, namespace = found.metadata.name, found.metadata.namespace
            if found.metadata.finalizers:
                change = {"metadata": {"finalizers": None}}
                await client.patch(resource, name, namespace, change)
            await client.delete(resource, name, namespace)


async def make_namespaces(client: Client, *names: str) -> None:
    for name in names:
        await make(client, "/api/v1/namespaces", {"kind": "Namespace", "metadata": {"name": name}})


async def make(client: Client, path: str, body: Json) -> Json:
    """As it is; nothing happens if it is there already."""
    try:
        found = await client.raw("POST", path, {"apiVersion": "v1"} | body)
    except AlreadyExists:
        found = await client.raw("GET", f"{path}/{body['metadata']['name']}")
    made: Json = json.loads(found)
    return made


class _Head(msgspec.Struct):
    name: str
    namespace: str = ""
    uid: str = ""


class Plain(msgspec.Struct):
    """Any object."""

    metadata: _Head


NODES = Resource("", "v1", "nodes", "Node", Plain, namespaced=False)
PODS = Resource("", "v1", "pods", "Pod", Plain)


class Machines:
    """The nodes and pods of a cluster that has no kubelet: what those would say is said here."""

    def __init__(self, client: Client, namespace: str = "default") -> None:
        self._client = client
        self._namespace = namespace

    async def node(
        self, name: str, cpu: str = "4", memory: str = "8Gi", *, labels: Json | None = None
    ) -> None:
        """One that is ready, and has all of its capacity for pods."""
        metadata = {"name": name, "labels": labels or {}}
        await make(self._client, "/api/v1/nodes", {"kind": "Node", "metadata": metadata})
        amounts = {"cpu": cpu, "memory": memory, "pods": "110"}
        await self.node_says(name, capacity=amounts, allocatable=amounts, conditions=READY)

    async def node_says(self, name: str, **status: Any) -> None:
        await self._client.patch(NODES, name, "", {"status": status}, subresource="status")

    async def cordon(self, name: str) -> None:
        await self._client.patch(NODES, name, "", {"spec": {"unschedulable": True}})

    async def label(self, name: str, labels: Json) -> None:
        await self._client.patch(NODES, name, "", {"metadata": {"labels": labels}})

    async def remove_node(self, name: str) -> None:
        await self._client.delete(NODES, name)

    async def pod(
        self, name: str, node: str = "", cpu: str = "100m", memory: str = "64Mi", **spec: Any
    ) -> str:
        """Gives its UID."""
        requests = {"cpu": cpu, "memory": memory}
        container = {"name": "main", "image": "none", "resources": {"requests": requests}}
        body = {
            "kind": "Pod",
            "metadata": {"name": name},
            "spec": {"containers": [container], "nodeName": node, **spec},
        }
        found = await make(self._client, f"/api/v1/namespaces/{self._namespace}/pods", body)
        return str(found["metadata"]["uid"])

    async def pod_says(self, name: str, **status: Any) -> None:
        change = {"status": status}
        await self._client.patch(PODS, name, self._namespace, change, subresource="status")

    async def bind(self, name: str, node: str) -> None:
        """As a scheduler does."""
        body = {
            "kind": "Binding",
            "metadata": {"name": name},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        path = f"/api/v1/namespaces/{self._namespace}/pods/{name}/binding"
        await self._client.raw("POST", path, {"apiVersion": "v1"} | body)

    async def remove_pod(self, name: str) -> None:
        """At once: no kubelet would ever say that it has ended."""
        path = f"/api/v1/namespaces/{self._namespace}/pods/{name}"
        await self._client.raw("DELETE", path, {"gracePeriodSeconds": 0})

    async def all(self) -> Snapshot:
        """What is there, by a list and without any selection."""
        nodes = json.loads(await self._client.raw("GET", "/api/v1/nodes"))["items"]
        pods = json.loads(await self._client.raw("GET", "/api/v1/pods"))["items"]
        read = [
            pod_requests.project_pod(msgspec.convert(one, pod_requests.KubernetesPod))
            for one in pods
        ]
        return Snapshot(
            [
                pod_requests.project_node(msgspec.convert(one, pod_requests.KubernetesNode))
                for one in nodes
            ],
            [pod for pod in read if not pod.is_finished],
        )

    async def clear(self) -> None:
        for pod in (await self._client.list(PODS)).objects:
            await Machines(self._client, pod.metadata.namespace).remove_pod(pod.metadata.name)
        for node in (await self._client.list(NODES)).objects:
            await self.remove_node(node.metadata.name)


READY = [{"type": "Ready", "status": "True"}]
