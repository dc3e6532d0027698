"""The walkthrough: one ResourceRequest from creation to deletion, as observed on the three API servers.

Each step is an object state seen in a watch; its time is when the event arrived.
"""

from __future__ import annotations

import asyncio
import http
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from kubelend.agent import conditions, holds
from kubelend.core import resources
from kubelend.core.errors import KubelendError, NoCapacity
from kubelend.envtest import processes, waiting
from kubelend.envtest.waiting import ObjectTimeline, Observation
from kubelend.kube import config
from kubelend.kube import resources as kube_resources
from kubelend.kube.client import Client
from kubelend.lab import hosts, setup
from kubelend.lab.liqo_walkthrough import LiqoWalkthrough
from kubelend.lab.state import LabDirectory, LabProcess, LabState
from kubelend.peerings import liqo_api
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation
from kubelend.wire.objects import (
    Kind,
    Metadata,
    ProviderInstruction,
    ReservationInstruction,
    ResourceRequest,
    ResourceRequestSpec,
)

CPU, MEMORY = "500m", "256Mi"
REQUESTER, PROVIDER = hosts.AGENT_CLUSTERS
_ADVERTISEMENT = f"{PROVIDER}-adv"

ReportStep = Callable[[str, float], None]
"""Reports a step and the seconds since the creation or deletion of the request."""

_REQUEST_RESOURCE = kube_resources.resource_for(ResourceRequest)
_DELETE_TIMEOUT = 10.0


async def run_walkthrough(record: LabState, report: ReportStep, timeout: timedelta) -> None:
    """Runs all steps; raises at the first that is not observed within `timeout`."""
    async with AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(Client.open(config.config_from_kubeconfig(path)))
            for name, path in record.clusters.items()
        }
        walkthrough = Walkthrough(clients, report, timeout.total_seconds())
        await stack.enter_async_context(walkthrough.watching())
        liqo = await walkthrough.with_liqo(clients)
        if liqo is not None:
            stack.push_async_callback(liqo.delete_local_pod)
        await walkthrough.create_request()
        try:
            await walkthrough.wait_reserved(liqo)
        finally:
            await walkthrough.delete_request()
        await walkthrough.wait_released()
        if liqo is not None:
            await liqo.wait_clean(walkthrough.reservation)


class Walkthrough:
    """Drives one request and waits for each resulting state."""

    def __init__(self, clients: dict[str, Client], report: ReportStep, timeout: float) -> None:
        self._name = f"test-{secrets.token_hex(3)}"
        self._reservation = ""
        self._reserved_before = 0
        """Reserved CPU of the provider before the walkthrough, in millicores."""
        self._client = clients[REQUESTER]
        self._report_step = report
        self._timeout = timeout
        self._began = 0.0

        def timeline(cluster: str, kind: type[Kind]) -> ObjectTimeline[Kind]:
            resource = kube_resources.resource_for(kind)
            namespace = setup.OBJECT_NAMESPACE
            return ObjectTimeline(clients[cluster], cluster, resource, timeout, namespace)

        self._requests = timeline(REQUESTER, ResourceRequest)
        self._use = timeline(REQUESTER, ReservationInstruction)
        self._hold = timeline(PROVIDER, ProviderInstruction)
        self._reservations = timeline(hosts.BROKER_CLUSTER, Reservation)
        self._advertisements = timeline(hosts.BROKER_CLUSTER, ClusterAdvertisement)

    def watching(self) -> AbstractAsyncContextManager[None]:
        """Watches all objects; waits first until all watches are established."""
        return waiting.watching(
            *(self._requests, self._use, self._hold, self._reservations, self._advertisements)
        )

    @property
    def reservation(self) -> str:
        return self._reservation

    async def with_liqo(self, clients: dict[str, Client]) -> LiqoWalkthrough | None:
        """Also observes the objects of Liqo, if it is installed."""
        if not await liqo_api.is_installed(clients[REQUESTER]):
            return None
        liqo = LiqoWalkthrough(clients, REQUESTER, PROVIDER, self._report, self._timeout)
        await liqo.remember_objects()
        return liqo

    async def create_request(self) -> None:
        self._reserved_before = _reserved_cpu(self._advertisements.latest(_ADVERTISEMENT))
        self._began = time.perf_counter()
        spec = ResourceRequestSpec(requested_cpu=CPU, requested_memory=MEMORY, duration="1h")
        metadata = Metadata(self._name, setup.OBJECT_NAMESPACE)
        await self._client.create(_REQUEST_RESOURCE, ResourceRequest(metadata, spec))
        self._report(REQUESTER, f"ResourceRequest {self._name} created: {CPU} CPU, {MEMORY}")

    async def wait_reserved(self, liqo: LiqoWalkthrough | None = None) -> None:
        """Waits until both sides have their instructions, and the clusters are peered if they are to be."""
        await self._wait_for(
            self._requests,
            self._name,
            # The first thing that the agent writes.
            lambda one: bool(one.found.metadata.finalizers or one.found.status.phase),
            "was not handled by the agent",
            "finalizer set by the agent",
        )
        requested = await self._requests.wait_for(self._name, _is_decided, "got no response")
        self._reservation = requested.found.status.reservation_name
        if not self._reservation:
            raise NoCapacity(requested.found.status.message)
        await self._wait_for_phase("Reserved")
        await self._wait_for(
            *(self._use, self._reservation, lambda one: not one.is_deleted, "was not created"),
            "ReservationInstruction created",
        )
        await self._wait_for_kind(self._hold, f"{self._reservation}-provider", "Held")
        cpu = resources.parse_requested({"cpu": CPU}).cpu
        await self._wait_for_reserved(cpu, f"has {CPU} more reserved")
        if liqo is not None:
            await self._wait_for(
                *(self._hold, f"{self._reservation}-provider", _is_held),
                "was not held by placeholders",
                "placeholders hold all of it",
            )
            await liqo.create_local_pod()
            await liqo.wait_ready(self._reservation, CPU, MEMORY)
        await self._wait_for_peering()
        if liqo is not None:
            await liqo.run_pods(self._reservation)

    async def delete_request(self) -> None:
        self._began = time.perf_counter()
        await waiting.within(
            _DELETE_TIMEOUT,
            self._client.delete(_REQUEST_RESOURCE, self._name, setup.OBJECT_NAMESPACE),
            f"ResourceRequest {self._name} was not deleted",
        )
        self._report(REQUESTER, f"ResourceRequest {self._name} deleted")

    async def wait_released(self) -> None:
        """Waits until the reservation has ended in all clusters."""
        await self._wait_for_phase("Released")
        await self._wait_for(
            *(self._requests, self._name, lambda one: one.is_deleted, "was not removed"),
            "ResourceRequest removed",
        )
        await self._wait_for_kind(self._use, self._reservation, "Finished")
        await self._wait_for_kind(self._hold, f"{self._reservation}-provider", "Withdrawn")
        await self._wait_for_reserved(0, "has the same reserved as before")

    async def _wait_for_peering(self) -> None:
        """The request becomes Active if the clusters are peered; otherwise it stays Reserved and says why."""
        otherwise = "was neither Active nor reported that no peering is configured"
        seen = await self._requests.wait_for(self._name, _is_settled, otherwise)
        phase, note = seen.found.status.phase, f": {conditions.NO_PEERING_MESSAGE}"
        if phase == "Active":
            await self._wait_for_phase(phase)
            note = ""
        self._report(REQUESTER, f"ResourceRequest is {phase}{note}", seen.at)

    async def _wait_for_phase(self, phase: str) -> None:
        await self._wait_for(
            *(self._reservations, self._reservation, _has_phase(phase), f"was not {phase}"),
            f"{self._reservation} is {phase}",
        )

    async def _wait_for_kind(self, timeline: ObjectTimeline[Any], name: str, phase: str) -> None:
        await self._wait_for(
            *(timeline, name, _has_phase(phase), f"was not {phase}"),
            f"{timeline.resource.kind} is {phase}",
        )

    async def _wait_for_reserved(self, more: int, what: str) -> None:
        began, wanted = self._began, self._reserved_before + more
        await self._wait_for(
            self._advertisements,
            _ADVERTISEMENT,
            lambda one: one.at > began and _reserved_cpu(one.found) == wanted,
            f"did not change by {CPU}",
            f"{_ADVERTISEMENT} {what}",
        )

    async def _wait_for(
        self,
        timeline: ObjectTimeline[Any],
        name: str,
        wanted: Callable[[Observation[Any]], bool],
        otherwise: str,
        what: str,
    ) -> None:
        """Waits for a version of an object and reports `what`; `otherwise` describes the timeout error."""
        seen = await timeline.wait_for(name, wanted, otherwise)
        self._report(timeline.cluster, what, seen.at)

    def _report(self, where: str, what: str, at: float = 0.0) -> None:
        self._report_step(f"{where}: {what}", (at or time.perf_counter()) - self._began)


def _has_phase(phase: str) -> Callable[[Observation[Any]], bool]:
    return lambda seen: seen.found.status.phase == phase


def _is_held(seen: Observation[ProviderInstruction]) -> bool:
    return conditions.is_true(seen.found.status.conditions, holds.HELD_CONDITION)


def _is_settled(seen: Observation[ResourceRequest]) -> bool:
    status, reason = seen.found.status, (conditions.READY, conditions.NO_PEERING)
    return status.phase == "Active" or conditions.has_reason(status.conditions, *reason)


def _is_decided(seen: Observation[ResourceRequest]) -> bool:
    status = seen.found.status
    return bool(status.reservation_name) or status.phase == "Failed"


def _reserved_cpu(found: ClusterAdvertisement | None) -> int:
    shown = None if found is None else found.spec.resources.reserved
    return 0 if shown is None else resources.parse_offered({"cpu": str(shown.cpu)}).cpu


_RESPONSE_TIMEOUT = 5.0 * waiting.FACTOR
_READY = "ready"


class ComponentStatus(NamedTuple):
    """One process or API server."""

    name: str
    state: str
    """`ready`, or the error."""
    location: str
    """The name of its log file, or the URL of an API server."""

    @property
    def is_ready(self) -> bool:
        return self.state == _READY


class LabHealth(NamedTuple):
    """The state of the whole lab."""

    components: list[ComponentStatus]
    advertisements: list[ClusterAdvertisement]
    reservations: list[Reservation]

    @property
    def problems(self) -> list[str]:
        found = [f"{part.name}: {part.state}" for part in self.components if not part.is_ready]
        active = {one.spec.cluster_id for one in self.advertisements if one.status.active}
        return found + [
            f"{name} does not advertise" for name in hosts.AGENT_CLUSTERS if name not in active
        ]


async def check_health(home: LabDirectory, record: LabState) -> LabHealth:
    """Checks all components; a component that does not respond is reported, not raised."""
    supervisor = _READY if home.is_running() else "not running"
    parts = [
        ComponentStatus("supervisor", supervisor, home.log.name),
        *await asyncio.gather(*(_api_server_status(*each) for each in record.clusters.items())),
        *await asyncio.gather(
            *(asyncio.to_thread(_process_status, one) for one in record.processes)
        ),
    ]
    return LabHealth(parts, *await _broker_objects(record))


async def _api_server_status(name: str, kubeconfig: str) -> ComponentStatus:
    found, state = config.config_from_kubeconfig(kubeconfig), _READY
    try:
        async with asyncio.timeout(_RESPONSE_TIMEOUT), Client.open(found) as client:
            await client.raw("GET", "/readyz")
    except KubelendError as error:
        state = str(error)
    except TimeoutError:
        state = "does not respond"
    return ComponentStatus(f"API server of {name}", state, found.server)


def _process_status(process: LabProcess) -> ComponentStatus:
    answer = processes.call_http(process.probes, "/readyz", timeout=_RESPONSE_TIMEOUT)
    state = answer.body.decode(errors="replace").strip() if answer.status else "does not respond"
    is_ready = answer.status == http.HTTPStatus.OK
    return ComponentStatus(process.name, _READY if is_ready else state, Path(process.log).name)


async def _broker_objects(record: LabState) -> tuple[list[ClusterAdvertisement], list[Reservation]]:
    """Returns the broker's objects; empty if they cannot be listed, which the API server's state explains."""
    try:
        found = config.config_from_kubeconfig(record.clusters[hosts.BROKER_CLUSTER])
        async with asyncio.timeout(_RESPONSE_TIMEOUT), Client.open(found) as client:
            advertisements = await _list_objects(client, ClusterAdvertisement)
            return advertisements, await _list_objects(client, Reservation)
    except (KeyError, KubelendError, TimeoutError):
        return [], []


async def _list_objects(client: Client, kind: type[Kind]) -> list[Kind]:
    return (await client.list(kube_resources.resource_for(kind), setup.OBJECT_NAMESPACE)).objects
