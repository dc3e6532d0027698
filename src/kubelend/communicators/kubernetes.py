"""The broker through a cluster namespace: a namespace of the broker's API server that belongs to this
cluster.

As Kubernetes does it: this side writes what it wants into the spec of an object, and the broker what is so
into the status; of ProviderInstructions the other way round. docs/transports.md shows the fields. A
Reservation object is named after its idempotency key, so that a repeated request finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any, Final

from msgspec.structs import replace

from kubelend.communicators import cluster_namespace, factory
from kubelend.communicators.cluster_namespace import (
    ADVERTISEMENTS,
    INSTRUCTIONS,
    OPEN_ACTIONS,
    RESERVATIONS,
    SESSIONS,
    AgentLease,
    HandshakeNotices,
    NamespaceClient,
    ObjectStream,
    RevisionTracker,
    WatchEvents,
)
from kubelend.communicators.factory import CommunicatorOptions
from kubelend.core import durations, transitions
from kubelend.core.errors import (
    AlreadyExists,
    BrokerUnreachable,
    Conflict,
    Forbidden,
    InvalidInput,
    KeyReused,
    KubelendError,
    NotFound,
    WrongPhase,
    reservation_not_found,
)
from kubelend.core.lifecycle import FINAL, Phase
from kubelend.kube import config
from kubelend.kube.client import Client
from kubelend.wire import bodies, cluster_namespaces, route
from kubelend.wire.broker_objects import ClusterAdvertisement, ClusterSession, Reservation
from kubelend.wire.objects import Condition, ProviderInstruction

LEAVE_TIMEOUT: Final = 2.0
"""Seconds that a stopping agent takes to end its watch and its lease. Otherwise both expire."""


async def connect(options: CommunicatorOptions) -> KubernetesCommunicator:
    """Loads the kubeconfig; the first call opens the connection."""
    found = config.load_config(options.kubeconfig)
    stack = AsyncExitStack()
    client = await stack.enter_async_context(Client.open(found, timeout=options.timeout))
    objects = NamespaceClient(client, options.namespace or found.namespace)
    return KubernetesCommunicator(objects, options, stack)


class KubernetesCommunicator:
    """One cluster's connection, identified by its account at the broker's API server."""

    def __init__(
        self, objects: NamespaceClient, options: CommunicatorOptions, stack: AsyncExitStack
    ) -> None:
        """`stack` is closed with the communicator."""
        self._objects = objects
        self._timeout = options.timeout
        self._stack = stack
        self._agent = options.instance[:64]
        self._lease = AgentLease(objects, self._agent)
        self._handshakes = HandshakeNotices(options.on_handshake)
        self._session_lock = asyncio.Lock()
        self._revisions = RevisionTracker()
        self._requests = ReservationRequests(objects)
        self._advertised: ClusterAdvertisement | None = None
        self._streams: set[WatchEvents] = set()
        self._is_checked = False
        """Whether the namespace is known to be a cluster namespace."""
        self._is_closed = False

    # -- provider

    async def publish(self, advertisement: bodies.Advertisement) -> bodies.PublishResult:
        async with self._change():
            wanted = cluster_namespace.cluster_advertisement(advertisement, self._objects.namespace)
            found = await self._apply_advertisement(wanted)
            found = await self._objects.wait(ADVERTISEMENTS, found, cluster_namespace.is_observed)
            self._advertised = found
            cluster_namespace.raise_for_error(found)
            accepted = cluster_namespace.accepted_advertisement(advertisement, found)
            return bodies.PublishResult(accepted, await self._reserved_holds())

    async def acknowledge(
        self, reservation: str, held: bodies.HoldReport | None = None
    ) -> bodies.Reservation:
        conditions = []
        if held is not None:
            truth = "True" if held.held else "False"
            conditions = [Condition("Held", truth, held.reason, held.message)]
        return await self._report_hold(reservation, "Held", "", conditions)

    async def refuse(self, reservation: str, reason: str) -> bodies.Reservation:
        return await self._report_hold(reservation, "Refused", reason, [])

    async def _report_hold(
        self, reservation: str, phase: str, message: str, conditions: list[Condition]
    ) -> bodies.Reservation:
        status = {"enforced": phase == "Held", "phase": phase, "message": message}
        async with self._change():
            reported = {**status, "conditions": conditions}
            return cluster_namespace.reservation_in(await self._report(reservation, reported))

    # -- requester

    async def request(self, request: bodies.ReservationRequest, key: str) -> bodies.Reservation:
        async with self._change():
            wanted = cluster_namespace.reservation_object(
                request, route.check_idempotency_key(key), self._objects.namespace
            )
            try:
                found = await self._requests.create_or_find(wanted)
            except InvalidInput:
                cluster_namespaces.check_request(request)
                raise
            found = await self._objects.wait(RESERVATIONS, found, cluster_namespace.is_observed)
            return await self._requests.outcome(found)

    async def activate(self, reservation: str) -> bodies.Reservation:
        def use(found: bodies.Reservation) -> dict[str, Any]:
            return {"activeClusterID": _usable(found).target_cluster_id}

        async with self._change():
            changed = await self._change_reservation(reservation, use)
            if changed.status.phase != Phase.ACTIVE:
                raise _wrong_phase(changed)
            return changed

    async def renew(self, reservation: str, duration: str = "") -> bodies.Reservation:
        def renew(found: bodies.Reservation) -> dict[str, Any]:
            _usable(found)
            return {"renewal": {"time": cluster_namespace.now(), "duration": duration or None}}

        async with self._change():
            return _usable(await self._change_reservation(reservation, renew))

    async def release(self, reservation: str) -> bodies.Reservation:
        async with self._change():
            return await self._change_reservation(reservation, lambda _: {"released": True})

    # -- both

    async def exchange_handshake(
        self, reservation: str, handshake: bodies.Handshake
    ) -> bodies.HandshakeResult:
        fields = {"handshake": cluster_namespace.sent_handshake(handshake)}
        async with self._call():
            name = cluster_namespaces.instruction_object_name(reservation)
            if await self._objects.find(INSTRUCTIONS, name) is not None:
                held = await self._report(reservation, fields)
                return _handshake_result(held.spec.peer, held.spec.instruction)
            if (own := await self._own_object(reservation)) is None:
                raise await self._not_provider_error(reservation)
            found = await self._objects.patch(RESERVATIONS, own.metadata.name, "spec", fields)
            found = await self._objects.wait(RESERVATIONS, found, cluster_namespace.is_observed)
            cluster_namespace.raise_for_error(found)
            return _handshake_result(found.status.peer, found.status.instruction)

    async def grant_keys(self) -> bodies.KeySet:
        async with self._call():
            return bodies.KeySet(list((await self._sync()).status.grant_keys))

    # -- reading

    async def find(self, reservation: str) -> bodies.Reservation:
        async with self._call():
            _, found = await self._read_reservation(reservation)
            return found

    async def instructions(self) -> list[bodies.Reservation]:
        async with self._call():
            await self._sync()
            found = [*await self._requests.list_own(), *await self._list_provider_instructions()]
        found.sort(key=lambda one: one.revision)
        return [one.reservation for one in found if one.action in OPEN_ACTIONS]

    async def stream(
        self, on_reset: Callable[[], None]
    ) -> AsyncGenerator[bodies.Instruction, None]:
        watch = uuid.uuid4().hex
        async with self._change():
            status = (await self._sync(watch=watch, agent=self._agent)).status
        if self._is_closed:  # during the call: nobody would end the watch
            raise factory.closed_error()
        is_new = not status.compacted_revision <= self._revisions.complete_to <= status.revision
        if is_new:
            self._revisions.reset()
            on_reset()
        stream = ObjectStream(watch, status.revision, self._revisions, is_new, self._handshakes)
        events = WatchEvents(self._objects)
        self._streams.add(events)
        try:
            async with events.running(), aclosing(stream.instructions(events)) as instructions:
                async for instruction in instructions:
                    yield instruction
        finally:
            self._streams.discard(events)

    async def ping(self) -> None:
        async with self._call():
            await self._sync()

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for events in self._streams:
            events.close()
        if self._is_checked:
            with contextlib.suppress(KubelendError, TimeoutError):
                async with asyncio.timeout(LEAVE_TIMEOUT):
                    await self._leave()
        await self._stack.aclose()

    # -- helpers

    @asynccontextmanager
    async def _call(self) -> AsyncIterator[None]:
        if self._is_closed:
            raise factory.closed_error()
        try:
            async with asyncio.timeout(self._timeout.total_seconds()):
                await self._check_namespace()
                yield
        except TimeoutError:
            within = durations.format_duration_short(self._timeout)
            raise BrokerUnreachable(f"the broker did not answer within {within}") from None
        except (BrokerUnreachable, RuntimeError):
            if self._is_closed:  # closed during the call
                raise factory.closed_error() from None
            raise

    @asynccontextmanager
    async def _change(self) -> AsyncIterator[None]:
        """A call that only the active agent may make."""
        async with self._call():
            await self._lease.hold()
            yield

    async def _check_namespace(self) -> None:
        """Nothing is written into another namespace: in the broker's own it would count as a user's."""
        if not self._is_checked:
            if await self._objects.find(SESSIONS, cluster_namespaces.SESSION_NAME) is None:
                raise self._no_session_error()
            self._is_checked = True

    def _no_session_error(self) -> BrokerUnreachable:
        return BrokerUnreachable(
            f"namespace {self._objects.namespace} of the broker's cluster is not a cluster namespace:"
            " it has no session object",
            hint="set --broker-namespace, and have an administrator apply the output of"
            " `kubelend create clusternamespace`",
        )

    async def _sync(self, reservation: str = "", **fields: str) -> ClusterSession:
        """Wait until the namespace contains everything that the broker knew when this was called."""
        wanted = fields | {"reservationName": reservation}
        async with self._session_lock:
            while True:
                try:
                    found = await self._objects.patch(
                        SESSIONS,
                        cluster_namespaces.SESSION_NAME,
                        "spec",
                        {**wanted, "syncTime": cluster_namespace.now()},
                    )
                except NotFound as error:
                    raise self._no_session_error() from error
                found = await self._objects.wait(SESSIONS, found, cluster_namespace.is_observed)
                if found.spec.reservation_name == reservation:  # else another client asks
                    break
        cluster_namespace.raise_for_error(found)
        return found

    async def _leave(self) -> None:
        await self._objects.patch(SESSIONS, cluster_namespaces.SESSION_NAME, "spec", {"watch": ""})
        await self._lease.release()

    async def _apply_advertisement(self, wanted: ClusterAdvertisement) -> ClusterAdvertisement:
        """Replaced as a whole, so that nothing of the previous advertisement is left."""
        client = self._objects.client
        known, self._advertised = self._advertised, None
        while True:
            if known is None or known.metadata.name != wanted.metadata.name:
                known = await self._objects.find(ADVERTISEMENTS, wanted.metadata.name)
            with contextlib.suppress(Conflict), cluster_namespace.as_unreachable(Conflict):
                if known is None:
                    return await client.create(ADVERTISEMENTS, wanted)
                with contextlib.suppress(NotFound):  # deleted meanwhile
                    return await client.update(ADVERTISEMENTS, replace(known, spec=wanted.spec))
            known = None

    async def _reserved_holds(self) -> list[bodies.Reservation]:
        found = sorted(await self._list_provider_instructions(), key=lambda one: one.revision)
        held = (one.reservation for one in found if one.action == "Hold")
        return [one for one in held if one.status.phase == "Reserved"]

    async def _read_reservation(
        self, reservation: str
    ) -> tuple[ClusterSession, bodies.Reservation]:
        """The broker's state, also of a reservation that finished too long ago to be in the namespace."""
        session = await self._sync(reservation)
        if session.status.reservation is None:
            raise reservation_not_found(reservation)
        return session, session.status.reservation

    async def _change_reservation(
        self, reservation: str, change: Callable[[bodies.Reservation], dict[str, Any]]
    ) -> bodies.Reservation:
        own = await self._own_object(reservation)
        if own is None:
            return await self._archived(reservation, change)
        fields = change(cluster_namespace.reservation_in(own))
        try:
            found = await self._objects.patch(RESERVATIONS, own.metadata.name, "spec", fields)
        except NotFound:
            self._requests.object_names.pop(reservation, None)
            return await self._archived(reservation, change)
        found = await self._objects.wait(RESERVATIONS, found, cluster_namespace.is_observed)
        return await self._requests.outcome(found)

    async def _own_object(self, reservation: str) -> Reservation | None:
        """The Reservation object; None if this cluster has none."""
        name = self._requests.object_names.get(reservation)
        found = None if name is None else await self._objects.find(RESERVATIONS, name)
        if found is None:
            found = await self._requests.find(reservation)
        if found is None:
            await self._sync()  # it may have been requested elsewhere just now
            found = await self._requests.find(reservation)
        return found

    async def _archived(
        self, reservation: str, change: Callable[[bodies.Reservation], dict[str, Any]]
    ) -> bodies.Reservation:
        """An archived reservation can be released again, and nothing else."""
        session, found = await self._read_reservation(reservation)
        if found.requester_id != session.status.cluster_id:
            raise Forbidden(
                f"{reservation} belongs to {found.requester_id}",
                hint="only its requester may change it",
            )
        if found.status.phase not in FINAL:  # its object was removed a moment ago
            raise reservation_not_found(reservation)
        change(found)
        return found

    async def _list_provider_instructions(self) -> list[bodies.Instruction]:
        found = await self._objects.list(INSTRUCTIONS)
        return [one for one in map(cluster_namespace.latest_instruction, found) if one is not None]

    async def _report(self, reservation: str, status: dict[str, Any]) -> ProviderInstruction:
        """Write the status of a ProviderInstruction, and wait until the broker has processed it."""
        name = cluster_namespaces.instruction_object_name(reservation)
        if await self._objects.find(INSTRUCTIONS, name) is None:
            await self._sync()
        reported = status | {"reportTime": cluster_namespace.now()}
        try:
            found = await self._objects.patch(INSTRUCTIONS, name, "status", reported)
        except NotFound:
            raise await self._not_provider_error(reservation) from None
        found = await self._objects.wait(INSTRUCTIONS, found, cluster_namespace.is_report_observed)
        cluster_namespace.raise_for_error(found)
        return found

    async def _not_provider_error(self, reservation: str) -> KubelendError:
        """The error for a reservation without a ProviderInstruction."""
        try:
            _, found = await self._read_reservation(reservation)
        except NotFound as error:
            return error
        if found.status.phase in FINAL:
            return _wrong_phase(found)
        return Forbidden(f"{reservation} is not placed on this cluster")


def _usable(found: bodies.Reservation) -> bodies.Reservation:
    """The reservation; `WrongPhase` if it has finished."""
    if found.status.phase in FINAL:
        raise _wrong_phase(found)
    return found


def _wrong_phase(found: bodies.Reservation) -> WrongPhase:
    phase = Phase(found.status.phase)
    return WrongPhase(f"{found.id} is {phase}", hint=transitions.next_phase_hint(phase))


def _handshake_result(
    peer: bodies.Handshake | None, instruction: bodies.Instruction | None
) -> bodies.HandshakeResult:
    return bodies.HandshakeResult(peer, "" if instruction is None else instruction.grant)


class ReservationRequests:
    """Creates Reservation objects, and maps reservation IDs to them."""

    def __init__(self, objects: NamespaceClient) -> None:
        self.object_names: dict[str, str] = {}
        """Object names by reservation ID; a list is only read for IDs that are missing."""
        self._objects = objects

    async def create_or_find(self, wanted: Reservation) -> Reservation:
        """The object of this request: a new one, or that of an earlier attempt."""
        while True:
            with contextlib.suppress(AlreadyExists), cluster_namespace.as_unreachable():
                return await self._objects.client.create(RESERVATIONS, wanted)
            found = await self._objects.find(RESERVATIONS, wanted.metadata.name)
            if found is None:
                continue
            if found.metadata.deletion_timestamp is not None:
                await self._objects.wait_deleted(RESERVATIONS, found)
            elif _is_refused(found):
                await self._delete(found)
            elif cluster_namespace.is_same_request(found, wanted):
                return found
            else:
                key = wanted.metadata.annotations[cluster_namespaces.IDEMPOTENCY_ANNOTATION]
                raise KeyReused(
                    f"idempotency key {key!r} was used for another request",
                    hint="send the same request again, or use a new key",
                )

    async def outcome(self, found: Reservation) -> bodies.Reservation:
        """The reservation of an object. The object of a request that is refused for good is deleted."""
        try:
            cluster_namespace.raise_for_error(found)
        except KubelendError:
            if _is_refused(found):
                await self._delete(found)
            raise
        reservation = cluster_namespace.reservation_in(found)
        self.object_names[reservation.id] = found.metadata.name
        return reservation

    async def _delete(self, found: Reservation) -> None:
        with cluster_namespace.as_unreachable():
            await self._objects.client.delete(
                RESERVATIONS, found.metadata.name, self._objects.namespace, uid=found.metadata.uid
            )

    async def find(self, reservation: str) -> Reservation | None:
        """The object that shows a reservation to its requester."""
        return (await self._by_id()).get(reservation)

    async def list_own(self) -> list[bodies.Instruction]:
        """Instructions for the reservations that this cluster has requested."""
        shown = map(cluster_namespace.latest_instruction, (await self._by_id()).values())
        return [one for one in shown if one is not None]

    async def _by_id(self) -> dict[str, Reservation]:
        listed = await self._objects.list(RESERVATIONS)
        shown = [one for one in listed if one.status.instruction is not None]
        found = {cluster_namespace.reservation_in(one).id: one for one in shown}
        self.object_names = {name: one.metadata.name for name, one in found.items()}
        return found


def _is_refused(found: Reservation) -> bool:
    """Whether the broker has refused the request for good."""
    if found.status.instruction is not None or not cluster_namespace.is_observed(found):
        return False
    accepted = cluster_namespaces.find_accepted(found.status.conditions)
    return accepted is not None and accepted.status == "False"
