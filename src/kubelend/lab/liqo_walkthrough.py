"""What Liqo adds to the walkthrough: from a reservation to a pod in the cluster of the provider, and back.

A local pod of the provider that fits only into the held room waits for all that time.
Each step is an object of Liqo or Kubernetes in the required state, read from the API server of its cluster.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from kubelend.core import resources
from kubelend.core.errors import KubelendError, NotFound, Unavailable
from kubelend.envtest import waiting
from kubelend.kube.client import Client
from kubelend.peerings import liqo_objects
from kubelend.peerings.liqo_objects import (
    FOREIGN_CLUSTERS,
    IDENTITIES,
    NODES,
    RESERVATION_LABEL,
    SLICES,
    TENANTS,
    LiqoKind,
    LiqoResource,
)

PODS: Final = liqo_objects.core_resource("Pod", "pods")
QUOTAS: Final = liqo_objects.liqo_resource("offloading.liqo.io", "Quota", "quotas")
OFFLOADINGS: Final = liqo_objects.liqo_resource(
    "offloading.liqo.io", "NamespaceOffloading", "namespaceoffloadings"
)
LEFTOVERS: Final = (SLICES, QUOTAS, TENANTS, IDENTITIES, FOREIGN_CLUSTERS)
"""Kinds of which nothing may be left after the release."""

POD_CPU, POD_MEMORY = "300m", "64Mi"
"""Two of these pods do not fit into what is reserved."""
LOCAL_POD: Final = "local-pod"
LOCAL_NAMESPACE: Final = "default"

ReportStep = Callable[[str, str], None]
"""Reports a step of a cluster."""
Condition = Callable[[LiqoResource], object]


class LiqoWalkthrough:
    """Waits for the objects of one reservation in both clusters."""

    def __init__(
        self,
        clients: dict[str, Client],
        requester: str,
        provider: str,
        report: ReportStep,
        timeout: float,
    ) -> None:
        self._clients = clients
        self._requester, self._provider = requester, provider
        self._report = report
        self._timeout = timeout
        self._namespace = f"walkthrough-{int(time.time())}"
        self._before: dict[tuple[str, str], set[str]] = {}
        self._local_cpu = ""

    async def remember_objects(self) -> None:
        """Notes what exists before, to find out what is left afterwards."""
        self._before = await self._liqo_objects()

    async def wait_ready(self, reservation: str, cpu: str, memory: str) -> None:
        """From the handshake to a Ready node with exactly the reserved amounts."""
        amounts = resources.parse_requested({"cpu": cpu, "memory": memory})
        remote = liqo_objects.tenant_namespace(self._requester)
        own = liqo_objects.tenant_namespace(self._provider)
        await self._wait_for(
            self._provider,
            TENANTS,
            self._requester,
            remote,
            liqo_objects.handshake_parameters,
            "Tenant admitted",
        )
        name = f"controlplane-{self._provider}"
        await self._wait_for(
            *(self._requester, IDENTITIES, name, own),
            lambda found: found.status.get("kubeconfigSecretRef"),
            "Identity established",
        )
        await self._wait_for(
            self._requester, SLICES, reservation, own, lambda _: True, "ResourceSlice created"
        )
        await self._wait_for(
            self._provider, SLICES, reservation, remote, is_granted, "ResourceSlice granted"
        )
        await self._wait_for_quota(reservation, remote, amounts)

        def is_ready(node: LiqoResource) -> bool:
            offered = liqo_objects.parse_amounts(node.status.get("allocatable") or {})
            return condition_status(node, "Ready") == "True" and offered == amounts

        text = f"Node is Ready with exactly {amounts.describe()}"
        await self._wait_for(self._requester, NODES, reservation, "", is_ready, text)

    async def create_local_pod(self) -> None:
        """Creates a pod of the provider that would fit only into the room of the placeholders."""
        cpu = await self._most_free_cpu() + resources.parse_requested({"cpu": POD_CPU}).cpu
        self._local_cpu = resources.format_amount("cpu", cpu)
        requests = {"cpu": self._local_cpu, "memory": POD_MEMORY}
        await self._create_pod(self._provider, LOCAL_POD, LOCAL_NAMESPACE, requests)
        await self._wait_for_local_pod(_is_unschedulable, "is Pending: it needs held room")

    async def delete_local_pod(self) -> None:
        await self._clients[self._provider].delete(PODS, LOCAL_POD, LOCAL_NAMESPACE)

    async def _wait_for_local_pod(self, condition: Condition, what: str) -> None:
        text = f"local pod of {self._local_cpu} CPU {what}"
        await self._wait_for(self._provider, PODS, LOCAL_POD, LOCAL_NAMESPACE, condition, text)

    async def _most_free_cpu(self) -> int:
        """Returns the free CPU of the provider's freest node, in millicores."""
        client = self._clients[self._provider]
        free: dict[str, int] = {}
        for node in (await client.list(NODES)).objects:
            if _VIRTUAL_NODE_LABEL not in node.metadata.labels:
                allocatable = liqo_objects.parse_amounts(node.status["allocatable"])
                free[node.metadata.name] = allocatable.cpu
        for pod in (await client.list(PODS)).objects:
            if (node_name := pod.spec.get("nodeName")) in free:
                free[node_name] -= _requested_cpu(pod)
        return max(free.values())

    async def run_pods(self, reservation: str) -> None:
        """Runs a pod in the provider's cluster, and finds that a second one does not fit."""
        try:
            await self._offload_namespace()
            await self._run_first_pod(reservation)
            await self._wait_for_local_pod(_is_unschedulable, "is still Pending")
            await self._try_second_pod(reservation)
        finally:
            client = self._clients[self._requester]
            for name in ("first", "second"):
                await client.delete(PODS, name, self._namespace)
            await client.delete(liqo_objects.NAMESPACES, self._namespace)

    async def _offload_namespace(self) -> None:
        client = self._clients[self._requester]
        namespace = {"metadata": {"name": self._namespace}}
        await client.raw("POST", liqo_objects.NAMESPACES.path(), namespace)
        offloading = {
            "apiVersion": OFFLOADINGS.api_version,
            "kind": OFFLOADINGS.kind,
            "metadata": {"name": "offloading", "namespace": self._namespace},
            "spec": {
                "namespaceMappingStrategy": "DefaultName",
                "podOffloadingStrategy": "LocalAndRemote",
                "clusterSelector": {"nodeSelectorTerms": []},
            },
        }
        await client.raw("POST", OFFLOADINGS.path(self._namespace), offloading)
        await self._wait_for(
            *(self._requester, OFFLOADINGS, "offloading", self._namespace),
            lambda found: found.status.get("offloadingPhase") == "Ready",
            f"namespace {self._namespace} offloaded",
        )

    async def _run_first_pod(self, reservation: str) -> None:
        await self._create_offloaded_pod("first", reservation)
        await self._wait_for(
            *(self._requester, PODS, "first", self._namespace),
            lambda pod: pod.spec.get("nodeName") == reservation,
            f"pod of {POD_CPU} CPU scheduled onto the virtual node",
        )
        remote = f"{self._namespace}-{self._requester}"
        await self._wait_for(
            self._provider, PODS, "first", remote, _is_running, "the same pod is Running"
        )
        await self._wait_for(
            self._requester, PODS, "first", self._namespace, _is_running, "the pod is Running"
        )

    async def _try_second_pod(self, reservation: str) -> None:
        await self._create_offloaded_pod("second", reservation)
        refused = await self._find(
            self._requester,
            PODS,
            "second",
            self._namespace,
            _is_unschedulable,
            "second pod refused",
        )
        message = _condition_of(refused, "PodScheduled").get("message", "")
        reason = next(part.strip() for part in message.split(",") if "Insufficient" in part)
        self._report(self._requester, f"second pod of {POD_CPU} CPU refused: {reason}")

    async def wait_clean(self, reservation: str) -> None:
        """Waits until the node is gone, its room is free, and nothing of Liqo is left in either cluster."""
        await self._wait_for_local_pod(_is_running, "is Running")
        await self._wait_for_deletion(self._requester, NODES, reservation, "virtual node removed")

        async def is_clean() -> bool:
            return await self._liqo_objects() == self._before

        try:
            await waiting.until(is_clean, "objects are left", self._timeout)
        except Unavailable:
            left = await self._liqo_objects()
            names = [
                f"{cluster}: {kind} {name}"
                for (cluster, kind), found in left.items()
                for name in found - self._before[cluster, kind]
            ]
            raise Unavailable(f"left over after the release: {', '.join(names)}") from None
        for cluster in (self._requester, self._provider):
            self._report(cluster, "nothing of Liqo is left")

    # -- helpers

    async def _create_offloaded_pod(self, name: str, reservation: str) -> None:
        requests = {"cpu": POD_CPU, "memory": POD_MEMORY}
        selector = {RESERVATION_LABEL: reservation}
        await self._create_pod(self._requester, name, self._namespace, requests, selector)

    async def _create_pod(
        self,
        cluster: str,
        name: str,
        namespace: str,
        requests: dict[str, str],
        selector: dict[str, str] | None = None,
    ) -> None:
        container = {"name": "main", "image": "none", "resources": {"requests": requests}}
        pod = {
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"nodeSelector": selector or {}, "containers": [container]},
        }
        client = self._clients[cluster]

        async def create() -> bool:
            try:
                await client.raw("POST", PODS.path(namespace), pod)
            except (KubelendError, NotFound):
                return False  # the namespace has no service account yet
            return True

        await waiting.until(create, f"pod {name} was not created", self._timeout)

    async def _wait_for_quota(
        self, reservation: str, namespace: str, amounts: resources.Resources
    ) -> None:
        client = self._clients[self._provider]

        async def has_quota() -> bool:
            found = (await client.list(QUOTAS, namespace)).objects
            own = [one for one in found if one.metadata.name.startswith(f"{reservation}-")]
            return any(liqo_objects.parse_amounts(one.spec["resources"]) == amounts for one in own)

        await waiting.until(has_quota, f"no Quota for {reservation}", self._timeout)
        self._report(self._provider, f"Quota of {amounts.describe()} set")

    async def _wait_for(
        self,
        cluster: str,
        kind: LiqoKind,
        name: str,
        namespace: str,
        condition: Condition,
        what: str,
    ) -> None:
        await self._find(cluster, kind, name, namespace, condition, what)
        self._report(cluster, what)

    async def _find(
        self,
        cluster: str,
        kind: LiqoKind,
        name: str,
        namespace: str,
        condition: Condition,
        what: str,
    ) -> LiqoResource:
        async def find() -> LiqoResource | None:
            found = await self._clients[cluster].find(kind, name, namespace)
            return found if found is not None and condition(found) else None

        return await waiting.until(find, f"{cluster}: not seen: {what}", self._timeout)

    async def _wait_for_deletion(self, cluster: str, kind: LiqoKind, name: str, what: str) -> None:
        async def is_gone() -> bool:
            return await self._clients[cluster].find(kind, name) is None

        await waiting.until(is_gone, f"{cluster}: not seen: {what}", self._timeout)
        self._report(cluster, what)

    async def _liqo_objects(self) -> dict[tuple[str, str], set[str]]:
        return {
            (cluster, kind.kind): {
                f"{one.metadata.namespace}/{one.metadata.name}"
                for one in (await self._clients[cluster].list(kind)).objects
            }
            for cluster in (self._requester, self._provider)
            for kind in LEFTOVERS
        }


_VIRTUAL_NODE_LABEL: Final = "liqo.io/type"


def _requested_cpu(pod: LiqoResource) -> int:
    requests = (one.get("resources", {}).get("requests", {}) for one in pod.spec["containers"])
    return sum(resources.parse_requested({"cpu": each.get("cpu", "0")}).cpu for each in requests)


def _condition_of(found: LiqoResource, kind: str) -> dict[str, Any]:
    conditions = found.status.get("conditions") or []
    return next((one for one in conditions if one.get("type") == kind), {})


def condition_status(found: LiqoResource, kind: str) -> str:
    return str(_condition_of(found, kind).get("status", ""))


def is_granted(found: LiqoResource) -> bool:
    return condition_status(found, "Resources") == "Accepted"


def _is_running(pod: LiqoResource) -> bool:
    return pod.status.get("phase") == "Running"


def _is_unschedulable(pod: LiqoResource) -> bool:
    return _condition_of(pod, "PodScheduled").get("reason") == "Unschedulable"
