"""A broker in a real cluster: in this process, with a clock to move, and objects to apply to it.

    async with kube_broker.running(kube, namespace) as broker:
        await broker.advertise("lender", cpu="10")
        await broker.reserve("mine", cpu="3")
        await broker.shows(Reservation, "mine", phase="Reserved")

All of it is what is shipped: the store, the writer and the controllers, with calls to a real API server.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import yaml
from prometheus_client import parser

import make
from clocks import Clock
from kubelend.broker.metrics import BrokerMetrics
from kubelend.broker.service import Broker, BrokerRules
from kubelend.controllers.manager import ControllerManager
from kubelend.controllers.reconciler import TICK_SECONDS
from kubelend.core import audit
from kubelend.core.ledger import Ledger
from kubelend.envtest.servers import LocalCluster
from kubelend.kits import tasks
from kubelend.kube import config, resources
from kubelend.kube.client import Client
from kubelend.stores.kubernetes.store import KubernetesStore
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation
from kubelend.wire.conversion import RequestLimits
from kubelend.wire.objects import Object
from waiting import PATIENCE, until

Json = dict[str, Any]
Explain = Callable[[], object]
Kind = TypeVar("Kind", bound=Object)

TERMS = RequestLimits(make.HOUR, 720 * make.HOUR, make.HOUR)
SILENCE = 2 * TICK_SECONDS
"""Seconds in which nothing is written, after which nothing is going to be."""
POLL = 0.02
"""Seconds between two questions to an API server, which takes a millisecond of a core for each."""
WRITES = {"POST", "PUT", "PATCH", "DELETE"}


class Objects:
    """The broker's objects, as their users write them."""

    def __init__(self, client: Client, namespace: str) -> None:
        self.client = client
        self.namespace = namespace

    # -- what people do

    async def apply(self, kind: type[Object], name: str, spec: Json, **metadata: Any) -> None:
        """Make an object."""
        path = resources.resource_for(kind).path(self.namespace)
        head = {"apiVersion": f"{kind.group}/{kind.version}", "kind": kind.kind}
        known = {"name": name, "namespace": self.namespace, **metadata}
        await self.client.raw("POST", path, {**head, "metadata": known, "spec": spec})

    async def apply_text(self, text: str) -> None:
        """Make what a document of YAML says."""
        for body in yaml.safe_load_all(text):
            kind = next(
                one for one in (ClusterAdvertisement, Reservation) if one.kind == body["kind"]
            )
            body["metadata"]["namespace"] = self.namespace
            await self.client.raw("POST", resources.resource_for(kind).path(self.namespace), body)

    async def advertise(
        self, cluster: str, cpu: str = "10", memory: str = "16Gi", name: str = "", **more: Any
    ) -> None:
        amounts = {"cpu": cpu, "memory": memory}
        spec = {
            "clusterID": cluster,
            "resources": {
                "capacity": amounts,
                "allocatable": amounts,
                "allocated": {"cpu": "0", "memory": "0"},
                "available": amounts,
            },
            **more,
        }
        await self.apply(ClusterAdvertisement, name or f"{cluster}-adv", spec)

    async def reserve(self, name: str, cpu: str = "1", memory: str = "1Gi", **more: Any) -> None:
        amounts = {"cpu": cpu, "memory": memory}
        await self.apply(
            Reservation, name, {"requestedResources": amounts, "requesterID": "me", **more}
        )

    async def edit(self, kind: type[Kind], name: str, change: Json, subresource: str = "") -> Kind:
        resource = resources.resource_for(kind)
        return await self.client.patch(
            resource, name, self.namespace, change, subresource=subresource
        )

    async def condition(self, name: str, type: str, status: str = "True") -> None:
        """As the requester sets it."""
        said = {"type": type, "status": status, "reason": "Test", "message": ""}
        said["lastTransitionTime"] = "2026-01-01T12:00:00Z"
        await self.edit(Reservation, name, {"status": {"conditions": [said]}}, "status")

    async def delete(self, kind: type[Object], name: str) -> None:
        await self.client.delete(resources.resource_for(kind), name, self.namespace)

    # -- what people see

    async def find(self, kind: type[Kind], name: str) -> Kind | None:
        return await self.client.find(resources.resource_for(kind), name, self.namespace)

    async def shows(self, kind: type[Kind], name: str, condition: Callable[[Kind], bool]) -> Kind:
        """Wait for an object to be as wanted."""
        seen: list[Kind | None] = [None]

        async def is_so() -> bool:
            seen[0] = await self.find(kind, name)
            return seen[0] is not None and condition(seen[0])

        await self.until(is_so, lambda: f"{kind.kind} {name} is {seen[0]}")
        assert seen[0] is not None
        return seen[0]

    async def reserved(self, name: str) -> Reservation:
        return await self.shows(Reservation, name, has_phase("Reserved"))

    async def failed(self, name: str) -> Reservation:
        return await self.shows(Reservation, name, has_phase("Failed"))

    async def gone(self, kind: type[Object], name: str) -> None:
        async def is_gone() -> bool:
            return await self.find(kind, name) is None

        await self.until(is_gone)

    async def available(self, cluster: str, cpu: str) -> ClusterAdvertisement:
        """Wait until this much is shown to be left."""
        return await self.shows(
            ClusterAdvertisement,
            f"{cluster}-adv",
            lambda found: found.spec.resources.available.cpu == cpu,
        )

    async def events(self, name: str) -> list[tuple[str, str]]:
        """Reasons and messages, oldest first."""
        found = json(await self.client.raw("GET", f"/api/v1/namespaces/{self.namespace}/events"))
        about = [one for one in found["items"] if one["involvedObject"]["name"] == name]
        about.sort(key=lambda one: int(one["metadata"]["resourceVersion"]))
        return [(one["reason"], one["message"]) for one in about]

    async def writes(self) -> float:
        """How often anything was written so far, leases apart, as the API server counts."""
        lines = (await self.client.raw("GET", "/metrics")).decode().splitlines()
        # The other lines are megabytes, and parsing them takes seconds.
        counts = "\n".join(line for line in lines if line.startswith("apiserver_request_total{"))
        return sum(
            sample.value
            for family in parser.text_string_to_metric_families(counts)
            for sample in family.samples
            if sample.labels["verb"] in WRITES | {"APPLY"}
            and sample.labels["resource"] != "leases"
            and sample.labels["group"] in ("broker.fluidos.eu", "")
        )

    async def until(self, condition: Callable[[], Any], explain: Explain = lambda: "") -> None:
        await until(condition, poll=POLL, explain=explain)


class Running(Objects):
    """With the broker that they belong to."""

    def __init__(self, service: Broker, client: Client, namespace: str, clock: Clock) -> None:
        super().__init__(client, namespace)
        self.service = service
        self.clock = clock

    @property
    def ledger(self) -> Ledger:
        return self.service.current()[0]

    async def advertise(
        self, cluster: str, cpu: str = "10", memory: str = "16Gi", name: str = "", **more: Any
    ) -> None:
        await super().advertise(cluster, cpu, memory, name, **more)
        await self.until(lambda: cluster in self.ledger.clusters)


def has_phase(phase: str) -> Callable[[Any], bool]:
    return lambda found: found.status.phase == phase


async def quiet(broker: Objects) -> None:
    """Everything has been written, and nothing more is."""
    async with asyncio.timeout(PATIENCE):
        before, count = -1.0, await broker.writes()
        while before != count:
            await asyncio.sleep(SILENCE)
            before, count = count, await broker.writes()


async def events_of(broker: Objects, name: str, count: int) -> list[tuple[str, str]]:
    """The events on an object, once there are as many."""
    events: list[tuple[str, str]] = []

    async def are_there() -> bool:
        events[:] = await broker.events(name)
        return len(events) >= count

    await broker.until(are_there)
    return events


def json(content: bytes) -> Json:
    found: Json = msgspec.json.decode(content)
    return found


@contextlib.asynccontextmanager
async def opened(cluster: LocalCluster, namespace: str) -> AsyncIterator[Objects]:
    """The objects alone, while no broker is there."""
    found = config.config_from_kubeconfig(cluster.admin_kubeconfig)
    async with Client.open(found) as client:
        yield Objects(client, namespace)


Meanwhile = Callable[[Objects], Awaitable[None]]


async def _nothing(_: Objects) -> None:
    """Happens meanwhile."""


@contextlib.asynccontextmanager
async def running(
    cluster: LocalCluster,
    namespace: str,
    clock: Clock | None = None,
    rules: BrokerRules | None = None,
    meanwhile: Meanwhile = _nothing,
) -> AsyncIterator[Running]:
    """A broker that leads and sees its objects. At the end its store passes the audit.

    `meanwhile` happens after the store was read, and before the objects are seen.
    """
    found, clock = config.config_from_kubeconfig(cluster.admin_kubeconfig), clock or Clock()
    service = Broker(
        lambda: KubernetesStore.open(found, namespace),
        clock,
        rules or BrokerRules(),
        BrokerMetrics(),
    )
    async with Client.open(found) as client:
        manager = ControllerManager(service, client, namespace, TERMS)

        async def attend() -> None:
            await until(lambda: service.unready is None)
            await meanwhile(Objects(client, namespace))
            await manager.run()

        roots = asyncio.create_task(tasks.run_all({"broker": service.run(), "objects": attend()}))
        try:
            await until(lambda: service.unready is None and manager.unready is None)
            yield Running(service, client, namespace, clock)
            assert not roots.done(), roots.exception()
            assert audit.invariant_violations(service.current()[0]) == []
        finally:
            roots.cancel()
            await asyncio.gather(roots, return_exceptions=True)
            await service.close()
    await asyncio.to_thread(_audit, found, namespace)


def _audit(found: config.KubeConfig, namespace: str) -> None:
    store = KubernetesStore.open_readonly(found, namespace)
    try:
        assert audit.invariant_violations(Ledger.restore(store.load())) == []
    finally:
        store.close()
