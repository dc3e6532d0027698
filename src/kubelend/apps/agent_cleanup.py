"""Removes what an agent has created, before it is uninstalled: `kubelend agent --cleanup`.

Without an agent nobody removes its finalizers, ends its peerings or gives back what it has borrowed. The
chart runs this before it deletes the agent. It stops the agent first, so that both never act at the same
time. A step that takes too long is abandoned, such as a call to an unreachable broker, and what is left
behind is logged: its objects can be deleted all the same.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import msgspec
import structlog

from kubelend.agent import conditions, controller, resource_requests
from kubelend.agent.peering import PEERING_FINALIZER
from kubelend.agent.ports import BrokerCommunicator, BrokerConnection, Peer, Peering
from kubelend.agent.resource_requests import REQUEST_FINALIZER
from kubelend.apps import agent_environment, agent_peering
from kubelend.apps.agent_environment import AgentEnvironment
from kubelend.apps.agent_settings import AgentSettings
from kubelend.communicators import factory
from kubelend.communicators.factory import CommunicatorOptions
from kubelend.core import resources
from kubelend.core.errors import KubelendError, NotFound
from kubelend.kube.client import Client
from kubelend.kube.resources import Resource
from kubelend.peerings import liqo_objects
from kubelend.peerings.liqo_api import LiqoApi
from kubelend.wire import bodies
from kubelend.wire.objects import (
    Metadata,
    ProviderInstruction,
    ReservationInstruction,
    ResourceRequest,
    ResourceRequestStatus,
)

POLL_SECONDS: Final = 1.0

_LIQO_KINDS: Final = (
    # Slices first: with the Identity Liqo deletes the provider's copy. Copies of others are not ours.
    (liqo_objects.SLICES, f"{liqo_objects.RESERVATION_LABEL},!liqo.io/replicated", ""),
    (liqo_objects.IDENTITIES, "", "Provider"),
    (liqo_objects.TENANTS, "", "Consumer"),
    (liqo_objects.NAMESPACES, liqo_objects.TENANT_NAMESPACES, ""),
)
"""What a peering consists of, in the order of deletion: kind, labels, and the other cluster's role."""

log = structlog.get_logger("kubelend.agent")


class Scale(msgspec.Struct, frozen=True):
    """How many pods a Deployment has, and how to find them."""

    metadata: Metadata
    status: dict[str, str | int] = {}


class AgentPod(msgspec.Struct, frozen=True):
    metadata: Metadata


_DEPLOYMENTS: Final = Resource("apps", "v1", "deployments", "Scale", Scale)
_PODS: Final = Resource("", "v1", "pods", "Pod", AgentPod)
_RUNNING: Final = "status.phase!=Succeeded,status.phase!=Failed"


async def clean_up(settings: AgentSettings) -> list[str]:
    """Returns what is left behind, one text for each thing."""
    async with AsyncExitStack() as stack:
        environment = await stack.enter_async_context(agent_environment.open_environment(settings))
        broker = await _open_broker(settings, stack)
        mode = await agent_peering.select_peering(settings, environment)
        peering = None
        if broker is not None:
            cluster = settings.cluster_id
            made = agent_peering.make_peering(
                mode, settings, cluster, environment, broker, dict, lambda _: ""
            )
            peering = made.requester
        liqo = None
        if mode == "liqo" and environment.client is not None:
            liqo = LiqoApi(environment.client, settings.liqo_namespace)
        left = await AgentCleanup(settings, environment, broker, peering, liqo).run()
    log.info("Cleanup finished", left=left)
    return left


async def _open_broker(settings: AgentSettings, stack: AsyncExitStack) -> BrokerConnection | None:
    options = CommunicatorOptions(
        url=settings.broker_url,
        certificates=Path(settings.broker_cert_path),
        timeout=settings.broker_timeout,
        kubeconfig=settings.broker_kubeconfig,
        namespace=settings.broker_namespace,
    )
    try:
        found = await factory.open_communicator(settings.transport, options)
    except KubelendError as error:
        log.warning("No connection to the broker", error=str(error))
        return None
    if found is not None:
        stack.push_async_callback(found.close)
    return found


class AgentCleanup:
    """One run. Every step starts from the objects as they are, so that a run can be repeated."""

    def __init__(
        self,
        settings: AgentSettings,
        environment: AgentEnvironment,
        broker: BrokerCommunicator | None,
        peering: Peering | None,
        liqo: LiqoApi | None,
    ) -> None:
        """`broker` is None if there is no connection to it at all; `liqo` if it is not used directly."""
        self._settings = settings
        self._environment = environment
        self._objects = environment.objects
        self._broker = broker
        self._peering = peering
        self._liqo = liqo
        self._deadline = (
            asyncio.get_running_loop().time() + settings.cleanup_timeout.total_seconds()
        )
        self._released: dict[str, bodies.Reservation] = {}
        self._roles: defaultdict[str, set[str]] = defaultdict(set)
        """The roles of each cluster of which Liqo's objects were deleted."""
        self._left: list[str] = []

    async def run(self) -> list[str]:
        if self._settings.cleanup_deployment and self._environment.client is not None:
            await self._stop_agent(self._environment.client)
        await self._release_all()
        await self._disconnect_all()
        if self._liqo is not None:
            await self._remove_liqo_objects(self._liqo)
        await self._remove_own_objects()
        return self._left

    # -- steps

    async def _stop_agent(self, client: Client) -> None:
        name, namespace = self._settings.cleanup_deployment, agent_environment.pod_namespace()
        change = {"spec": {"replicas": 0}}
        try:
            found = await client.patch(_DEPLOYMENTS, name, namespace, change, subresource="scale")
        except NotFound:
            return

        async def running() -> list[str]:
            selector = str(found.status.get("selector", ""))
            pods = await client.list(_PODS, namespace, labels=selector, fields=_RUNNING)
            return [f"Pod {one.metadata.name} of the agent" for one in pods.objects]

        await self._until_none(running)
        log.info("Agent stopped", name=name)

    async def _release_all(self) -> None:
        """At the broker. What cannot be released there expires."""
        if self._broker is None:
            self._left.append(
                "reservations at the broker, which has no connection, until they expire"
            )
            return
        try:
            async with asyncio.timeout_at(self._deadline):
                own = self._settings.cluster_id or await self._environment.source.identity()
                for found in await self._broker.instructions():
                    if found.requester_id == own:
                        self._released[found.id] = await self._broker.release(found.id)
                        log.info("Reservation released", reservation=found.id)
                    else:
                        self._left.append(f"reservation {found.id} of {found.requester_id}")
        except (KubelendError, TimeoutError) as error:
            reason = str(error) or "no response in time"
            self._left.append(f"reservations at the broker, until they expire: {reason}")

    async def _disconnect_all(self) -> None:
        peering = self._peering
        if peering is None:
            return
        waiting = [
            Peer(found.spec.reservation_name, cluster, resources.NOTHING)
            for found in await self._objects.list(ReservationInstruction)
            for cluster in {*found.status.started_cluster_ids, *found.status.peered_cluster_ids}
        ]

        async def remaining() -> list[str]:
            found = [(peer, await _disconnect(peering, peer)) for peer in waiting]
            waiting[:] = [peer for peer, problem in found if problem]
            return [
                f"peering of {peer.reservation}: {problem}" for peer, problem in found if problem
            ]

        await self._until_none(remaining)

    async def _remove_liqo_objects(self, api: LiqoApi) -> None:
        """What is left of peerings with providers, and those of requesters with this cluster."""

        async def remaining() -> list[str]:
            for kind, labels, role in _LIQO_KINDS:
                managed = f"{liqo_objects.MANAGED_LABEL}={liqo_objects.MANAGER}"
                found = await api.list(kind, labels=",".join(filter(None, (managed, labels))))
                for one in found:
                    if role:
                        self._roles[one.spec["clusterID"]].add(role)
                    if not one.is_being_deleted:
                        await api.delete(kind, one)
                if found:
                    return [f"{kind.kind} {one.metadata.name}" for one in found]
            return [
                f"ForeignCluster {remote}"
                for remote, roles in self._roles.items()
                if await _delete_foreign_cluster(api, remote, roles)
            ]

        await self._until_none(remaining)

    async def _remove_own_objects(self) -> None:
        """Instructions are the agent's; a ResourceRequest is its user's, and only loses the finalizer."""
        for instruction in await self._objects.list(ReservationInstruction):
            await controller.remove_finalizer(self._objects, instruction, PEERING_FINALIZER)
            await self._objects.delete(ReservationInstruction, instruction.key)
        for hold in await self._objects.list(ProviderInstruction):
            # Its placeholders end with it.
            await self._objects.delete(ProviderInstruction, hold.key)
        for request in await self._objects.list(ResourceRequest):
            await self._report_released(request)
            await controller.remove_finalizer(self._objects, request, REQUEST_FINALIZER)

    async def _report_released(self, found: ResourceRequest) -> None:
        body = self._released.get(found.status.reservation_name)
        if body is None:
            return
        status = resource_requests.status_for_reservation(found, body)
        clock = self._environment.clock

        def change(newest: ResourceRequest) -> ResourceRequestStatus:
            return conditions.apply_request_conditions(newest, status, None, clock())

        await controller.update_status(self._objects, found, change, clock)

    # -- helpers

    async def _until_none(self, remaining: Callable[[], Awaitable[list[str]]]) -> None:
        """Repeats a step until nothing remains, or the time is over: then it is left behind."""
        while found := await _errors_as_texts(remaining):
            if asyncio.get_running_loop().time() > self._deadline:
                self._left += found
                return
            await asyncio.sleep(POLL_SECONDS)


async def _delete_foreign_cluster(api: LiqoApi, remote: str, roles: set[str]) -> bool:
    """Liqo leaves it; one with another role belongs to another peering. False if there is none."""
    found = await api.find(liqo_objects.FOREIGN_CLUSTERS, remote)
    own = {"Unknown", *roles, *(["ConsumerAndProvider"] if len(roles) > 1 else [])}
    if found is None or found.status.get("role", "Unknown") not in own:
        return False
    if not found.is_being_deleted:
        await api.delete(liqo_objects.FOREIGN_CLUSTERS, found)
    return True


async def _disconnect(peering: Peering, peer: Peer) -> str:
    """Returns what it waits for; empty if nothing is left of the peering."""
    try:
        readiness = await peering.disconnect(peer)
    except KubelendError as error:
        return str(error)
    return "" if readiness.is_ready else readiness.reason


async def _errors_as_texts(step: Callable[[], Awaitable[list[str]]]) -> list[str]:
    try:
        return await step()
    except KubelendError as error:
        return [str(error)]
