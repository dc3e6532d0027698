"""The walkthrough: one ResourceRequest from creation to deletion, as observed on the three API servers.

Each step is an object state seen in a watch; its time is when the event arrived.
"""

from __future__ import annotations

import asyncio
import http.client
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from kubelend.core import resources
from kubelend.core.errors import KubelendError, NoCapacity, Unavailable
from kubelend.kube import config, informer
from kubelend.kube import resources as kube_resources
from kubelend.kube.client import Client
from kubelend.kube.codec import UndecodableObject
from kubelend.kube.informer import Deleted, Listed
from kubelend.lab import hosts, setup
from kubelend.lab.state import LabDirectory, LabProcess, LabState
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation
from kubelend.wire.objects import (
    Kind,
    Metadata,
    Object,
    ProviderInstruction,
    ReservationInstruction,
    ResourceRequest,
    ResourceRequestSpec,
)

CPU, MEMORY = "500m", "256Mi"
REQUESTER, PROVIDER = hosts.AGENT_CLUSTERS

ReportStep = Callable[[str, float], None]
"""Reports a step and the seconds since the creation or deletion of the request."""

_REQUEST_RESOURCE = kube_resources.resource_for(ResourceRequest)
_DELETE_TIMEOUT = 10.0
_WATCH_TIMEOUT = 20.0


async def run_walkthrough(record: LabState, report: ReportStep, timeout: timedelta) -> None:
    """Runs all steps; raises at the first that is not observed within `timeout`."""
    async with _open_walkthrough(record, timeout.total_seconds()) as walkthrough:
        walkthrough.reserved_before = _reserved_cpu(
            walkthrough.advertisements.latest(f"{PROVIDER}-adv")
        )
        await walkthrough.create_request(report)
        try:
            await walkthrough.wait_active(report)
        finally:
            await walkthrough.delete_request(report)
        await walkthrough.wait_released(report)


class Walkthrough:
    """Drives one request and waits for each resulting state."""

    def __init__(self, clients: dict[str, Client], timeout: float) -> None:
        self.name = f"test-{secrets.token_hex(3)}"
        self.reservation = ""
        self.reserved_before = 0
        """Reserved CPU of the provider before the walkthrough, in millicores."""
        self._client = clients[REQUESTER]
        self._began = 0.0
        self._requests = ObjectTimeline(self._client, REQUESTER, ResourceRequest, timeout)
        self._requester_instructions = ObjectTimeline(
            self._client, REQUESTER, ReservationInstruction, timeout
        )
        self._provider_instructions = ObjectTimeline(
            clients[PROVIDER], PROVIDER, ProviderInstruction, timeout
        )
        broker = clients[hosts.BROKER_CLUSTER]
        self._reservations = ObjectTimeline(broker, hosts.BROKER_CLUSTER, Reservation, timeout)
        self.advertisements = ObjectTimeline(
            broker, hosts.BROKER_CLUSTER, ClusterAdvertisement, timeout
        )

    def timelines(self) -> list[ObjectTimeline[Any]]:
        return [
            self._requests,
            self._requester_instructions,
            self._provider_instructions,
            self._reservations,
            self.advertisements,
        ]

    async def create_request(self, report: ReportStep) -> None:
        self._began = time.perf_counter()
        spec = ResourceRequestSpec(requested_cpu=CPU, requested_memory=MEMORY, duration="1h")
        metadata = Metadata(self.name, setup.OBJECT_NAMESPACE)
        await self._client.create(_REQUEST_RESOURCE, ResourceRequest(metadata, spec))
        self._report(report, REQUESTER, f"ResourceRequest {self.name} created: {CPU} CPU, {MEMORY}")

    async def wait_active(self, report: ReportStep) -> None:
        """Waits until both sides have their instructions and the reservation is Active."""
        seen = await self._requests.wait_for(self.name, _is_handled, "was not handled by the agent")
        self._report(report, REQUESTER, "finalizer set by the agent", seen)
        requested = await self._requests.wait_for(self.name, _is_answered, "got no response")
        self.reservation = _reservation_name(requested.found)
        held = await self._wait_phase("Reserved")
        self._report(report, hosts.BROKER_CLUSTER, f"{self.reservation} is Reserved", held)
        use = await self._requester_instructions.wait_for(
            self.reservation, _exists, "was not created"
        )
        self._report(report, REQUESTER, "ReservationInstruction created", use)
        hold = await self._provider_instructions.wait_for(
            self._provider_instruction_name, _has_phase("Held"), "was not Held"
        )
        self._report(report, PROVIDER, "ProviderInstruction is Held", hold)
        used = await self._wait_phase("Active")
        self._report(report, hosts.BROKER_CLUSTER, f"{self.reservation} is Active", used)
        active = await self._requests.wait_for(self.name, _has_phase("Active"), "was not Active")
        self._report(report, REQUESTER, "ResourceRequest is Active", active)
        await self._wait_reserved(
            report, resources.parse_requested({"cpu": CPU}).cpu, f"has {CPU} more reserved"
        )

    async def delete_request(self, report: ReportStep) -> None:
        self._began = time.perf_counter()
        async with asyncio.timeout(_DELETE_TIMEOUT):
            await self._client.delete(_REQUEST_RESOURCE, self.name, setup.OBJECT_NAMESPACE)
        self._report(report, REQUESTER, f"ResourceRequest {self.name} deleted")

    async def wait_released(self, report: ReportStep) -> None:
        """Waits until the reservation has ended in all clusters."""
        over = await self._wait_phase("Released")
        self._report(report, hosts.BROKER_CLUSTER, f"{self.reservation} is Released", over)
        gone = await self._requests.wait_for(
            self.name, lambda one: one.is_deleted, "was not removed"
        )
        self._report(report, REQUESTER, "ResourceRequest removed", gone)
        use = await self._requester_instructions.wait_for(
            self.reservation, _has_phase("Finished"), "was not Finished"
        )
        self._report(report, REQUESTER, "ReservationInstruction is Finished", use)
        hold = await self._provider_instructions.wait_for(
            self._provider_instruction_name, _has_phase("Withdrawn"), "was not Withdrawn"
        )
        self._report(report, PROVIDER, "ProviderInstruction is Withdrawn", hold)
        await self._wait_reserved(report, 0, "has the same reserved as before")

    @property
    def _provider_instruction_name(self) -> str:
        return f"{self.reservation}-provider"

    async def _wait_phase(self, phase: str) -> Observation[Reservation]:
        return await self._reservations.wait_for(
            self.reservation, _has_phase(phase), f"was not {phase}"
        )

    async def _wait_reserved(self, report: ReportStep, more: int, what: str) -> None:
        name, began = f"{PROVIDER}-adv", self._began
        offer = await self.advertisements.wait_for(
            name,
            lambda one: one.at > began and _reserved_cpu(one.found) == self.reserved_before + more,
            f"did not change by {CPU}",
        )
        self._report(report, hosts.BROKER_CLUSTER, f"{name} {what}", offer)

    def _report(
        self, report: ReportStep, where: str, what: str, seen: Observation[Any] | None = None
    ) -> None:
        at = time.perf_counter() if seen is None else seen.at
        report(f"{where}: {what}", at - self._began)


@asynccontextmanager
async def _open_walkthrough(record: LabState, timeout: float) -> AsyncIterator[Walkthrough]:
    """Opens the clients and waits until all watches are established."""
    async with AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(Client.open(config.config_from_kubeconfig(path)))
            for name, path in record.clusters.items()
        }
        walkthrough = Walkthrough(clients, timeout)
        watches = [asyncio.create_task(one.run()) for one in walkthrough.timelines()]
        try:
            async with asyncio.timeout(_WATCH_TIMEOUT):
                await asyncio.gather(*(one.is_watching.wait() for one in walkthrough.timelines()))
        except TimeoutError:
            raise Unavailable(f"watches were not established within {_WATCH_TIMEOUT:g} s") from None
        try:
            yield walkthrough
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)


def _exists(seen: Observation[Any]) -> bool:
    return not seen.is_deleted


def _has_phase(phase: str) -> Callable[[Observation[Any]], bool]:
    return lambda seen: seen.found.status.phase == phase


def _is_handled(seen: Observation[ResourceRequest]) -> bool:
    """Whether the agent has handled it; the first thing it writes is its finalizer."""
    return bool(seen.found.metadata.finalizers or seen.found.status.phase)


def _is_answered(seen: Observation[ResourceRequest]) -> bool:
    status = seen.found.status
    return bool(status.reservation_name) or status.phase == "Failed"


def _reservation_name(found: ResourceRequest) -> str:
    """Returns the reservation's name; raises with the broker's message if there is none."""
    if not found.status.reservation_name:
        raise NoCapacity(found.status.message)
    return found.status.reservation_name


def _reserved_cpu(found: ClusterAdvertisement | None) -> int:
    shown = None if found is None else found.spec.resources.reserved
    return 0 if shown is None else resources.parse_offered({"cpu": str(shown.cpu)}).cpu


_RESPONSE_TIMEOUT = 5.0
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
    parts = [
        ComponentStatus("supervisor", _READY if home.is_locked() else "not running", home.log.name)
    ]
    parts += await asyncio.gather(*(_api_server_status(*each) for each in record.clusters.items()))
    parts += await asyncio.gather(
        *(asyncio.to_thread(_process_status, one) for one in record.processes)
    )
    advertisements, reservations = await _broker_objects(record)
    return LabHealth(parts, advertisements, reservations)


async def _api_server_status(name: str, kubeconfig: str) -> ComponentStatus:
    found, name = config.config_from_kubeconfig(kubeconfig), f"API server of {name}"
    try:
        async with asyncio.timeout(_RESPONSE_TIMEOUT), Client.open(found) as client:
            await client.raw("GET", "/readyz")
    except KubelendError as error:
        return ComponentStatus(name, str(error), found.server)
    except TimeoutError:
        return ComponentStatus(name, "does not respond", found.server)
    return ComponentStatus(name, _READY, found.server)


def _process_status(process: LabProcess) -> ComponentStatus:
    log = Path(process.log).name
    connection = http.client.HTTPConnection("127.0.0.1", process.probes, timeout=_RESPONSE_TIMEOUT)
    try:
        connection.request("GET", "/readyz")
        response = connection.getresponse()
        reason = response.read().decode(errors="replace").strip()
    except (OSError, http.client.HTTPException):
        return ComponentStatus(process.name, "does not respond", log)
    finally:
        connection.close()
    return ComponentStatus(
        process.name, _READY if response.status == http.HTTPStatus.OK else reason, log
    )


async def _broker_objects(record: LabState) -> tuple[list[ClusterAdvertisement], list[Reservation]]:
    """Returns the broker's objects; empty if they cannot be listed, which the API server's state explains."""
    kubeconfig = record.clusters.get(hosts.BROKER_CLUSTER, "")
    if not kubeconfig:
        return [], []
    try:
        found = config.config_from_kubeconfig(kubeconfig)
        async with asyncio.timeout(_RESPONSE_TIMEOUT), Client.open(found) as client:
            advertisements = await client.list(
                kube_resources.resource_for(ClusterAdvertisement), setup.OBJECT_NAMESPACE
            )
            reservations = await client.list(
                kube_resources.resource_for(Reservation), setup.OBJECT_NAMESPACE
            )
    except (KubelendError, TimeoutError):
        return [], []
    return advertisements.objects, reservations.objects


ObjectT = TypeVar("ObjectT", bound=Object)


class Observation(NamedTuple, Generic[ObjectT]):
    """One observed version of an object."""

    found: ObjectT
    at: float
    """Time by `time.perf_counter`."""
    is_deleted: bool = False


class ObjectTimeline(Generic[Kind]):
    """Watches one kind and records all versions, so that none is missed while waiting for another object."""

    def __init__(self, client: Client, cluster: str, kind: type[Kind], timeout: float) -> None:
        """`timeout` is that of `wait_for`, in seconds."""
        self._timeout = timeout
        self._client = client
        self._cluster = cluster
        self._kind = kind
        self._observations: list[Observation[Kind]] = []
        self._changed = asyncio.Condition()
        self.is_watching = asyncio.Event()
        """Set when the watch has been established."""

    async def run(self) -> None:
        """Watches until cancelled."""
        resource = kube_resources.resource_for(self._kind)
        async for change in informer.list_and_watch(self._client, resource, setup.OBJECT_NAMESPACE):
            async with self._changed:
                self._on_change(change)
                self._changed.notify_all()
            self.is_watching.set()

    async def wait_for(
        self, name: str, wanted: Callable[[Observation[Kind]], bool], what: str
    ) -> Observation[Kind]:
        """Waits for the first version that fulfils `wanted`; `what` describes the timeout error."""

        def find() -> Observation[Kind] | None:
            named = (one for one in self._observations if one.found.metadata.name == name)
            return next(filter(wanted, named), None)

        try:
            async with asyncio.timeout(self._timeout), self._changed:
                await self._changed.wait_for(lambda: find() is not None)
        except TimeoutError:
            raise Unavailable(
                f"{self._kind.kind} {name} of {self._cluster} {what} within {self._timeout:g} s"
            ) from None
        found = find()
        assert found is not None  # noqa: S101 - for the type checker
        return found

    def latest(self, name: str) -> Kind | None:
        """Returns the latest observed version."""
        return next(
            (one.found for one in reversed(self._observations) if one.found.metadata.name == name),
            None,
        )

    def _on_change(self, change: informer.Change[Kind]) -> None:
        now = time.perf_counter()
        if isinstance(change, Listed):
            self._observations += [Observation(found, now) for found in change.objects]
        elif isinstance(change, Deleted):
            self._observations.append(Observation(change.found, now, is_deleted=True))
        elif not isinstance(change, UndecodableObject):
            self._observations.append(Observation(change, now))
