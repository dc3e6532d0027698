"""Calls over objects of an API server: a request is written into an object, and the broker's response
read from it.

Errors of the API server are not the broker's decisions: that it is down, or that an account lacks
permissions, can be fixed, and no request of a user may fail for it. So they become `BrokerUnreachable`,
except for those that a caller handles: an object that exists, one that does not, and one that is
invalid. The stream joins the watches of three kinds. The order between two watches is undefined, so the
revision is tracked per reservation and not as one number.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Any, Final, Generic, NamedTuple

from msgspec.structs import replace

from kubelend.communicators import factory
from kubelend.core import durations
from kubelend.core.errors import (
    AlreadyExists,
    BrokerUnreachable,
    Conflict,
    Gone,
    InvalidDuration,
    InvalidInput,
    KubelendError,
    NotFound,
)
from kubelend.kube import codec, informer, resources
from kubelend.kube.client import Client
from kubelend.kube.codec import UndecodableObject
from kubelend.kube.informer import Deleted, Listed
from kubelend.kube.resources import Resource
from kubelend.wire import bodies, broker_objects, cluster_namespaces, objects, quantities
from kubelend.wire.broker_objects import (
    RESERVATION_FINALIZER,
    AdvertisedResources,
    ClusterAdvertisement,
    ClusterAdvertisementSpec,
    ClusterSession,
    Reservation,
    ReservationSpec,
)
from kubelend.wire.objects import (
    AgentRequest,
    BrokerResponse,
    Kind,
    Metadata,
    Object,
    ProviderInstruction,
)


class CallSlot(NamedTuple, Generic[Kind]):
    """Where a kind of object has its request and its response. Each side writes only its own part."""

    resource: Resource[Kind]
    request: Callable[[Kind], AgentRequest | None]
    response: Callable[[Kind], BrokerResponse | None]

    def has_response(self, found: Kind) -> bool:
        """Whether the last request has its response, no matter which client sent it."""
        request, response = self.request(found), self.response(found)
        return response is not None and (request is None or request.id == response.request_id)

    def has_response_to(self, found: Kind, request_id: str) -> bool:
        response = self.response(found)
        return response is not None and response.request_id == request_id


ADVERTISEMENT_SLOT: Final = CallSlot(
    resources.resource_for(broker_objects.ClusterAdvertisement),
    lambda found: found.spec.request,
    lambda found: found.status.response,
)
RESERVATION_SLOT: Final = CallSlot(
    resources.resource_for(broker_objects.Reservation),
    lambda found: found.spec.request,
    lambda found: found.status.response,
)
INSTRUCTION_SLOT: Final = CallSlot(
    resources.resource_for(objects.ProviderInstruction),
    lambda found: found.status.request,
    lambda found: found.spec.response,
)
SESSION_SLOT: Final = CallSlot(
    resources.resource_for(broker_objects.ClusterSession),
    lambda found: found.spec.request,
    lambda found: found.status.response,
)


class ObjectCaller:
    """Makes calls in one cluster namespace, as one agent."""

    def __init__(self, client: Client, namespace: str, agent: str) -> None:
        self.client = client
        self.namespace = namespace
        self._agent = agent[:64]

    def new_request(self, verb: str, arguments: str = "", handshake: str = "") -> AgentRequest:
        return AgentRequest(uuid.uuid4().hex, verb, arguments, self._agent, handshake)

    async def call(
        self,
        slot: CallSlot[Kind],
        name: str,
        request: AgentRequest,
        extra_fields: dict[str, object],
    ) -> Kind:
        """The object with the response to a request; `extra_fields` is written in the same part of the
        object.

        If another caller uses the same object at the same time, its call finishes first and this one is
        repeated.
        """
        subresource = "status" if slot is INSTRUCTION_SLOT else ""
        part = {**extra_fields, "request": cluster_namespaces.request_fields(request)}
        change = {subresource or "spec": part}
        while True:
            with as_unreachable():
                found = await self.client.patch(
                    slot.resource, name, self.namespace, change, subresource=subresource
                )
            found = await self.wait_for_response(slot, found)
            if slot.has_response_to(found, request.id):
                return found

    async def wait_for_response(self, slot: CallSlot[Kind], found: Kind) -> Kind:
        """The object once its last request has a response."""
        while not slot.has_response(found):
            with as_unreachable():
                found = await self._wait_for_change(slot.resource, found)
        return found

    async def wait_deleted(self, slot: CallSlot[Kind], found: Kind) -> None:
        """Wait until an object that is being deleted is gone."""
        with as_unreachable():
            while (
                later := await self.client.find(slot.resource, found.metadata.name, self.namespace)
            ) is not None:
                if later.metadata.uid != found.metadata.uid:
                    return
                await self._wait_for_change(slot.resource, later, is_being_deleted=True)

    async def find(self, slot: CallSlot[Kind], name: str) -> Kind | None:
        with as_unreachable():
            return await self.client.find(slot.resource, name, self.namespace)

    async def list(self, slot: CallSlot[Kind]) -> list[Kind]:
        with as_unreachable():
            return (await self.client.list(slot.resource, self.namespace)).objects

    async def _wait_for_change(
        self, resource: Resource[Kind], found: Kind, *, is_being_deleted: bool = False
    ) -> Kind:
        """The object after its next change, or after the watch has timed out."""
        events = self.client.watch(
            resource,
            self.namespace,
            since=found.metadata.resource_version,
            fields=f"metadata.name={found.metadata.name}",
        )
        try:
            async with aclosing(events):
                async for event in events:
                    if event.found is not None:
                        return event.found
        except Gone:
            pass
        later = await self.client.find(resource, found.metadata.name, self.namespace)
        if later is None and not is_being_deleted:
            raise Conflict(
                f"{resource} {found.metadata.name} was deleted before the broker responded"
            )
        return later or found


@contextmanager
def as_unreachable(*handled: type[KubelendError]) -> Iterator[None]:
    """Around each use of the API server; `handled` are further errors that the caller handles."""
    passed: tuple[type[KubelendError], ...] = (AlreadyExists, InvalidInput, *handled)
    try:
        yield
    except passed:
        raise
    except NotFound as error:
        if codec.is_object_not_found(error):
            raise
        raise BrokerUnreachable(f"cannot use the cluster namespace: {error}") from error
    except KubelendError as error:
        raise BrokerUnreachable(f"cannot use the cluster namespace: {error}") from error


def raise_for_error(response: BrokerResponse | None) -> BrokerResponse:
    """The response; raises the broker's error if it is one."""
    if (refusal := cluster_namespaces.error_from_response(response)) is not None:
        raise refusal
    return response or cluster_namespaces.NO_RESPONSE


def reservation_in(response: BrokerResponse | None) -> bodies.Reservation:
    """The reservation in a response; raises the broker's error if it is one."""
    instruction = cluster_namespaces.instruction_from_response(raise_for_error(response))
    if instruction is None:
        raise BrokerUnreachable("the broker's response is empty")
    return instruction.reservation


_ZERO_QUANTITIES = bodies.Quantities("0", "0")


def cluster_advertisement(
    body: bodies.Advertisement, request: AgentRequest, namespace: str
) -> ClusterAdvertisement:
    """The API server requires `available`; the broker computes its own."""
    amounts = body.resources
    return ClusterAdvertisement(
        Metadata(cluster_namespaces.advertisement_object_name(body.cluster_id), namespace),
        bodies.copy_fields(
            body,
            ClusterAdvertisementSpec,
            resources=AdvertisedResources(
                capacity=amounts.capacity,
                allocated=amounts.allocated or _ZERO_QUANTITIES,
                available=amounts.available or amounts.allocatable or amounts.capacity,
                allocatable=amounts.allocatable,
            ),
            request=request,
        ),
    )


def reservation_object(
    body: bodies.ReservationRequest, key: str, request: AgentRequest, namespace: str
) -> Reservation:
    """With the broker's finalizer from the start: a deleted object stays until it is released."""
    metadata = Metadata(
        cluster_namespaces.request_object_name(key),
        namespace,
        finalizers=(RESERVATION_FINALIZER,),
        annotations={cluster_namespaces.IDEMPOTENCY_ANNOTATION: key},
    )
    return Reservation(metadata, bodies.copy_fields(body, ReservationSpec, request=request))


def is_same_request(found: Reservation, wanted: Reservation) -> bool:
    return replace(found.spec, request=None) == replace(wanted.spec, request=None)


def check_request(body: bodies.ReservationRequest) -> None:
    """Raises the error of a request that the API server has rejected, by the same class as the REST API."""
    quantities.parse_reservation_amounts(body.requested_resources)
    if body.duration and durations.parse_duration(body.duration) <= timedelta():
        raise InvalidDuration(f"duration: {body.duration!r} must be greater than zero")
    if body.wait and durations.parse_duration(body.wait) < timedelta():
        raise InvalidDuration(f"wait: {body.wait!r} must not be negative")


OPEN_ACTIONS = frozenset({"Use", "Wait", "Hold"})
"""Actions of unfinished reservations."""

InformerEvent = Listed[Object] | Deleted[Object] | Object
InstructionObject = Reservation | ProviderInstruction


class RevisionTracker:
    """The last delivered revision of each reservation, per role."""

    def __init__(self) -> None:
        self.complete_to = -1
        """The ledger's revision up to which everything was delivered; negative if nothing was."""
        self._delivered: dict[tuple[str, str], int] = {}

    def reset(self) -> None:
        """Forget what was delivered."""
        self.complete_to = -1
        self._delivered.clear()

    def advance(self, instruction: bodies.Instruction) -> bool:
        """Record a delivery; True if it is new."""
        key = instruction.role, instruction.reservation.id
        if instruction.revision <= self._delivered.get(key, -1):
            return False
        self._delivered[key] = instruction.revision
        return True

    def forget(self, instruction: bodies.Instruction) -> None:
        self._delivered.pop((instruction.role, instruction.reservation.id), None)


class HandshakeNotices:
    """Calls `on_handshake` with each reservation of a new notice."""

    def __init__(self, on_handshake: Callable[[str], None]) -> None:
        self._on_handshake = on_handshake
        self._last = ""

    def handle(self, session: ClusterSession) -> None:
        notice = session.status.handshakes
        if notice is not None and notice.id != self._last:
            self._last = notice.id
            for reservation in notice.reservations:
                self._on_handshake(reservation)


class ObjectStream(NamedTuple):
    """One stream that the broker has opened."""

    session: str
    revision: int
    """The ledger's revision that the namespace was complete to when the stream was opened."""
    revisions: RevisionTracker
    is_reset: bool
    """Whether earlier deliveries do not count: all unfinished reservations are delivered, finished
    ones skipped."""
    handshakes: HandshakeNotices

    async def instructions(self, events: WatchEvents) -> AsyncGenerator[bodies.Instruction, None]:
        """Yields instructions until an error ends the stream."""
        for instruction in _by_revision(await self._initial_objects(events)):
            is_news = self.revisions.advance(instruction)
            self.revisions.complete_to = max(
                self.revisions.complete_to, min(instruction.revision, self.revision)
            )
            if is_news and (instruction.action in OPEN_ACTIONS or not self.is_reset):
                yield instruction
        self.revisions.complete_to = self.revision
        while True:
            update = self._handle_event(await events.next())
            if update is not None and self.revisions.advance(update):
                yield update

    async def _initial_objects(self, events: WatchEvents) -> list[Object]:
        """All objects, once each watch has delivered its list."""
        found: list[Object] = []
        for _ in range(_WATCH_COUNT):
            event = await events.next()
            while not isinstance(event, Listed):
                found += [] if isinstance(event, Deleted) else [event]
                event = await events.next()
            found += event.objects
        for obj in found:
            self._handle_event(obj)
        return found

    def _handle_event(self, event: InformerEvent) -> bodies.Instruction | None:
        match event:
            case Listed():
                raise BrokerUnreachable("the watch was restarted by a new list")
            case ClusterSession():
                self.handshakes.handle(event)
                if event.status.session != self.session:
                    raise BrokerUnreachable("the broker ended the stream")
            case Deleted(Reservation() | ProviderInstruction() as gone):
                if (last := latest_instruction(gone)) is not None:
                    self.revisions.forget(last)
            case Reservation() | ProviderInstruction():
                return latest_instruction(event)
        return None


class WatchEvents:
    """Events of all watches in one queue."""

    def __init__(self, caller: ObjectCaller) -> None:
        self._caller = caller
        self._queue: asyncio.Queue[InformerEvent | BrokerUnreachable] = asyncio.Queue()

    async def next(self) -> InformerEvent:
        found = await self._queue.get()
        if isinstance(found, BrokerUnreachable):
            raise found
        return found

    def close(self) -> None:
        """Make the consumer stop."""
        self._queue.put_nowait(factory.closed_error())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        slots: tuple[CallSlot[Any], ...] = (SESSION_SLOT, RESERVATION_SLOT, INSTRUCTION_SLOT)
        watches = [asyncio.create_task(self._watch(slot)) for slot in slots]
        try:
            yield
        finally:
            for task in watches:
                task.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _watch(self, slot: CallSlot[Any]) -> None:
        caller = self._caller
        seen = informer.list_and_watch(
            caller.client, slot.resource, caller.namespace, report=self._on_watch_error
        )
        async with aclosing(seen):
            async for change in seen:
                if not isinstance(change, UndecodableObject):
                    self._queue.put_nowait(change)

    def _on_watch_error(self, problem: str) -> None:
        """Ends the stream: the agent retries by itself, and polls meanwhile."""
        if problem:
            self._queue.put_nowait(
                BrokerUnreachable(f"cannot watch the cluster namespace: {problem}")
            )


def latest_instruction(found: InstructionObject) -> bodies.Instruction | None:
    """The last instruction that the broker wrote into an object."""
    reply = found.status.response if isinstance(found, Reservation) else found.spec.response
    return cluster_namespaces.instruction_from_response(reply)


_WATCH_COUNT = 3


def _by_revision(found: Iterable[Object]) -> list[bodies.Instruction]:
    objects = [one for one in found if isinstance(one, Reservation | ProviderInstruction)]
    instructions = filter(None, map(latest_instruction, objects))
    return sorted(instructions, key=lambda one: one.revision)
