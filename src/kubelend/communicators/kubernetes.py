"""The broker through a cluster namespace: a namespace of the broker's API server that belongs to this
cluster.

A call is written into an object, and the broker's response is read from it; docs/transports.md shows
how. Calls are idempotent: each has an ID, and a Reservation object is named after its idempotency key.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from datetime import timedelta
from typing import Final

import msgspec
from msgspec.structs import replace

from kubelend.communicators import factory, kubernetes_calls
from kubelend.communicators.factory import CommunicatorOptions
from kubelend.communicators.kubernetes_calls import (
    ADVERTISEMENT_SLOT,
    INSTRUCTION_SLOT,
    OPEN_ACTIONS,
    RESERVATION_SLOT,
    SESSION_SLOT,
    HandshakeNotices,
    ObjectCaller,
    ObjectStream,
    RevisionTracker,
    WatchEvents,
)
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

LEAVE_TIMEOUT: Final = 2.0
"""Seconds that a stopping agent takes to end its session. Otherwise the broker ends it by timeout."""


async def connect(options: CommunicatorOptions) -> KubernetesCommunicator:
    """Loads the kubeconfig; the first call opens the connection."""
    found = config.load_config(options.kubeconfig)
    namespace = options.namespace or found.namespace
    stack = AsyncExitStack()
    client = await stack.enter_async_context(Client.open(found, timeout=options.timeout))
    caller = ObjectCaller(client, namespace, options.instance)
    notices = HandshakeNotices(options.on_handshake)
    return KubernetesCommunicator(caller, options.timeout, stack, notices)


class KubernetesCommunicator:
    """One cluster's connection, identified by its account at the broker's API server."""

    def __init__(
        self,
        caller: ObjectCaller,
        timeout: timedelta,
        stack: AsyncExitStack,
        handshakes: HandshakeNotices,
    ) -> None:
        """`stack` is closed with the communicator."""
        self._caller = caller
        self._timeout = timeout
        self._stack = stack
        self._handshakes = handshakes
        self._session_lock = asyncio.Lock()
        self._revisions = RevisionTracker()
        self._requests = ReservationRequests(caller)
        self._advertised: ClusterAdvertisement | None = None
        self._streams: set[WatchEvents] = set()
        self._was_used = False
        self._is_checked = False
        """Whether the namespace is known to be a cluster namespace."""
        self._is_closed = False

    # -- provider

    async def publish(self, advertisement: bodies.Advertisement) -> bodies.PublishResult:
        async with self._call():
            request = self._caller.new_request("publish")
            namespace = self._caller.namespace
            wanted = kubernetes_calls.cluster_advertisement(advertisement, request, namespace)
            found = await self._apply_advertisement(wanted)
            found = await self._caller.wait_for_response(ADVERTISEMENT_SLOT, found)
            while not ADVERTISEMENT_SLOT.has_response_to(found, request.id):
                found = await self._apply_advertisement(wanted)
                found = await self._caller.wait_for_response(ADVERTISEMENT_SLOT, found)
            self._advertised = found
            accepted = cluster_namespaces.advertisement_from_response(
                kubernetes_calls.raise_for_error(found.status.response)
            )
            return bodies.PublishResult(accepted, await self._reserved_holds())

    async def acknowledge(
        self, reservation: str, held: bodies.HoldReport | None = None
    ) -> bodies.Reservation:
        status: dict[str, object] = {"enforced": True, "phase": "Held", "message": ""}
        body = bodies.AcknowledgeRequest(held)
        text = "" if held is None else cluster_namespaces.body_text(body)
        return await self._call_provider_instruction(reservation, "acknowledge", text, status)

    async def refuse(self, reservation: str, reason: str) -> bodies.Reservation:
        status: dict[str, object] = {"enforced": False, "phase": "Refused", "message": reason}
        return await self._call_provider_instruction(reservation, "refuse", reason, status)

    # -- requester

    async def request(self, request: bodies.ReservationRequest, key: str) -> bodies.Reservation:
        async with self._call():
            call_request = self._caller.new_request("reserve")
            wanted = kubernetes_calls.reservation_object(
                request, route.check_idempotency_key(key), call_request, self._caller.namespace
            )
            try:
                found = await self._caller.wait_for_response(
                    RESERVATION_SLOT, await self._requests.create_or_find(wanted)
                )
            except InvalidInput as error:
                kubernetes_calls.check_request(request)
                raise error
            return await self._requests.outcome(found)

    async def activate(self, reservation: str) -> bodies.Reservation:
        return await self._call_reservation(reservation, "activate")

    async def renew(self, reservation: str, duration: str = "") -> bodies.Reservation:
        return await self._call_reservation(reservation, "renew", duration)

    async def release(self, reservation: str) -> bodies.Reservation:
        return await self._call_reservation(reservation, "release")

    # -- both

    async def exchange_handshake(
        self, reservation: str, handshake: bodies.Handshake
    ) -> bodies.HandshakeResult:
        text = msgspec.json.encode(handshake).decode()
        async with self._call():
            session = await self._call_session("handshake", reservation, text)
            return cluster_namespaces.handshake_from_response(session.status.response)

    async def grant_keys(self) -> bodies.KeySet:
        async with self._call():
            session = await self._call_session("keys")
            return cluster_namespaces.keys_from_response(session.status.response)

    # -- reading

    async def find(self, reservation: str) -> bodies.Reservation:
        async with self._call():
            _, found = await self._read_reservation(reservation)
            return found

    async def instructions(self) -> list[bodies.Reservation]:
        async with self._call():
            await self._call_session("read")
            found = [*await self._requests.list_own(), *await self._list_provider_instructions()]
        found.sort(key=lambda one: one.revision)
        return [one.reservation for one in found if one.action in OPEN_ACTIONS]

    async def stream(
        self, on_reset: Callable[[], None]
    ) -> AsyncGenerator[bodies.Instruction, None]:
        async with self._call():
            status = (await self._call_session("listen")).status
        if self._is_closed:  # during the call: nobody would end the watch
            raise factory.closed_error()
        is_new = not status.compacted_revision <= self._revisions.complete_to <= status.revision
        if is_new:
            self._revisions.reset()
            on_reset()
        stream = ObjectStream(
            status.session, status.revision, self._revisions, is_new, self._handshakes
        )
        events = WatchEvents(self._caller)
        self._streams.add(events)
        try:
            async with events.running(), aclosing(stream.instructions(events)) as instructions:
                async for instruction in instructions:
                    yield instruction
        finally:
            self._streams.discard(events)

    async def ping(self) -> None:
        async with self._call():
            await self._call_session("ping")

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for events in self._streams:
            events.close()
        if self._was_used:
            with contextlib.suppress(KubelendError, TimeoutError):
                async with asyncio.timeout(LEAVE_TIMEOUT):
                    await self._end_session()
        await self._stack.aclose()

    # -- helpers

    @asynccontextmanager
    async def _call(self) -> AsyncIterator[None]:
        if self._is_closed:
            raise factory.closed_error()
        self._was_used = True
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

    async def _check_namespace(self) -> None:
        """Nothing is written into another namespace: in the broker's own it would count as a user's."""
        if not self._is_checked:
            if await self._caller.find(SESSION_SLOT, cluster_namespaces.SESSION_NAME) is None:
                raise self._no_session_error()
            self._is_checked = True

    def _no_session_error(self) -> BrokerUnreachable:
        return BrokerUnreachable(
            f"namespace {self._caller.namespace} of the broker's cluster is not a cluster namespace:"
            " it has no session object",
            hint="set --broker-namespace, and have an administrator apply the output of"
            " `kubelend create clusternamespace`",
        )

    async def _call_session(self, call: str, text: str = "", handshake: str = "") -> ClusterSession:
        """After the response the namespace contains everything that the broker knew when it was called."""
        async with self._session_lock:
            try:
                found = await self._caller.call(
                    SESSION_SLOT,
                    cluster_namespaces.SESSION_NAME,
                    self._caller.new_request(call, text, handshake),
                    {},
                )
            except NotFound as error:
                raise self._no_session_error() from error
        kubernetes_calls.raise_for_error(found.status.response)
        return found

    async def _end_session(self) -> None:
        request = cluster_namespaces.request_fields(self._caller.new_request("leave"))
        await self._caller.client.patch(
            SESSION_SLOT.resource,
            cluster_namespaces.SESSION_NAME,
            self._caller.namespace,
            {"spec": {"request": request}},
        )

    async def _apply_advertisement(self, wanted: ClusterAdvertisement) -> ClusterAdvertisement:
        """Replaced as a whole, so that nothing of the previous advertisement is left."""
        slot, client = ADVERTISEMENT_SLOT, self._caller.client
        known, self._advertised = self._advertised, None
        while True:
            if known is None or known.metadata.name != wanted.metadata.name:
                known = await self._caller.find(slot, wanted.metadata.name)
            with contextlib.suppress(Conflict), kubernetes_calls.as_unreachable(Conflict):
                if known is None:
                    return await client.create(slot.resource, wanted)
                return await client.update(slot.resource, replace(known, spec=wanted.spec))
            known = None

    async def _reserved_holds(self) -> list[bodies.Reservation]:
        found = sorted(await self._list_provider_instructions(), key=lambda one: one.revision)
        held = (one.reservation for one in found if one.action == "Hold")
        return [one for one in held if one.status.phase == "Reserved"]

    async def _read_reservation(
        self, reservation: str
    ) -> tuple[ClusterSession, bodies.Reservation]:
        """The broker's state, also of a reservation that finished too long ago to be in the namespace."""
        session = await self._call_session("read", reservation)
        found = cluster_namespaces.reservation_from_response(session.status.response)
        # An older broker does not respond for a single reservation: read the namespace.
        found = found or await self._find_provider_instruction(reservation)
        if found is None:
            own = [one.reservation for one in await self._requests.list_own()]
            found = next((one for one in own if one.id == reservation), None)
        if found is None:
            raise reservation_not_found(reservation)
        return session, found

    async def _call_reservation(
        self, reservation: str, call: str, text: str = ""
    ) -> bodies.Reservation:
        async with self._call():
            request = self._caller.new_request(call, text)
            if (name := await self._object_name(reservation)) is None:
                return await self._call_archived(reservation, call)
            try:
                found = await self._caller.call(RESERVATION_SLOT, name, request, {})
            except NotFound:
                self._requests.object_names.pop(reservation, None)
                return await self._call_archived(reservation, call)
            return await self._requests.outcome(found)

    async def _object_name(self, reservation: str) -> str | None:
        """Of the Reservation object; None if this cluster has none."""
        if reservation not in self._requests.object_names:
            await self._requests.list_own()
        if reservation not in self._requests.object_names:
            await self._call_session("read")  # it may have been requested elsewhere just now
            await self._requests.list_own()
        return self._requests.object_names.get(reservation)

    async def _call_archived(self, reservation: str, call: str) -> bodies.Reservation:
        """An archived reservation can be released again, and nothing else."""
        session, found = await self._read_reservation(reservation)
        if found.requester_id != session.status.cluster_id:
            raise Forbidden(
                f"{reservation} belongs to {found.requester_id}",
                hint="only its requester may change it",
            )
        if call == "release" and found.status.phase in FINAL:
            return found
        raise _not_usable_error(found)

    async def _list_provider_instructions(self) -> list[bodies.Instruction]:
        found = await self._caller.list(INSTRUCTION_SLOT)
        return [one for one in map(kubernetes_calls.latest_instruction, found) if one is not None]

    async def _find_provider_instruction(self, reservation: str) -> bodies.Reservation | None:
        name = cluster_namespaces.instruction_object_name(reservation)
        found = await self._caller.find(INSTRUCTION_SLOT, name)
        instruction = None if found is None else kubernetes_calls.latest_instruction(found)
        return None if instruction is None else instruction.reservation

    async def _call_provider_instruction(
        self, reservation: str, call: str, text: str, status: dict[str, object]
    ) -> bodies.Reservation:
        async with self._call():
            request, slot = self._caller.new_request(call, text), INSTRUCTION_SLOT
            name = cluster_namespaces.instruction_object_name(reservation)
            if await self._find_provider_instruction(reservation) is None:
                await self._call_session("read")
            try:
                found = await self._caller.call(slot, name, request, status)
            except NotFound:
                raise await self._not_provider_error(reservation) from None
            return kubernetes_calls.reservation_in(found.spec.response)

    async def _not_provider_error(self, reservation: str) -> KubelendError:
        """The error for a reservation without a ProviderInstruction."""
        try:
            _, found = await self._read_reservation(reservation)
        except NotFound as error:
            return error
        if found.status.phase in FINAL:
            return _not_usable_error(found)
        return Forbidden(f"{reservation} is not placed on this cluster")


def _not_usable_error(found: bodies.Reservation) -> KubelendError:
    """For a reservation without an object: it has finished, or was removed a moment ago."""
    phase = found.status.phase
    if phase not in FINAL:
        return reservation_not_found(found.id)
    return WrongPhase(f"{found.id} is {phase}", hint=transitions.next_phase_hint(Phase(phase)))


class ReservationRequests:
    """Creates Reservation objects, and maps reservation IDs to them."""

    def __init__(self, caller: ObjectCaller) -> None:
        self.object_names: dict[str, str] = {}
        """Object names by reservation ID; a list is only read for IDs that are missing."""
        self._caller = caller

    async def create_or_find(self, wanted: Reservation) -> Reservation:
        """The object of this request: a new one, or that of an earlier attempt."""
        slot, client = RESERVATION_SLOT, self._caller.client
        while True:
            with contextlib.suppress(AlreadyExists), kubernetes_calls.as_unreachable():
                return await client.create(slot.resource, wanted)
            found = await self._caller.find(slot, wanted.metadata.name)
            if found is None:
                continue
            if found.metadata.deletion_timestamp is not None:
                await self._caller.wait_deleted(slot, found)
            elif kubernetes_calls.is_same_request(found, wanted):
                return await self._repeat_request(found, wanted)
            elif found.status.response is None or found.status.response.body:
                key = wanted.metadata.annotations[cluster_namespaces.IDEMPOTENCY_ANNOTATION]
                raise KeyReused(
                    f"idempotency key {key!r} was used for another request",
                    hint="send the same request again, or use a new key",
                )
            else:
                await self._delete(found)

    async def _repeat_request(self, found: Reservation, wanted: Reservation) -> Reservation:
        if not RESERVATION_SLOT.has_response(found):
            return found
        call = self._caller.new_request("reserve")
        name = wanted.metadata.name
        return await self._caller.call(RESERVATION_SLOT, name, call, {})

    async def outcome(self, found: Reservation) -> bodies.Reservation:
        """The result of a request. The object of a permanently rejected one is deleted."""
        try:
            reservation = kubernetes_calls.reservation_in(found.status.response)
        except KubelendError as refusal:
            if not refusal.retryable and found.status.response and not found.status.response.body:
                await self._delete(found)
            raise
        self.object_names[reservation.id] = found.metadata.name
        return reservation

    async def _delete(self, found: Reservation) -> None:
        with kubernetes_calls.as_unreachable():
            await self._caller.client.delete(
                RESERVATION_SLOT.resource,
                found.metadata.name,
                self._caller.namespace,
                uid=found.metadata.uid,
            )

    async def list_own(self) -> list[bodies.Instruction]:
        """Instructions for the reservations that this cluster has requested."""
        found = await self._caller.list(RESERVATION_SLOT)
        instructions = {}
        for each in found:
            if (instruction := kubernetes_calls.latest_instruction(each)) is not None:
                instructions[each.metadata.name] = instruction
        self.object_names = {one.reservation.id: name for name, one in instructions.items()}
        return list(instructions.values())
