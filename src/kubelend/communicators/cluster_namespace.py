"""One cluster namespace as the agent of the cluster sees it: reads, writes, waits and the watch.

The agent writes the spec of its objects and waits until the broker has observed it; of
ProviderInstructions it writes the status. Errors of the API server are not the broker's decisions: that it
is down, or that an account lacks permissions, can be fixed, and no request of a user may fail for it. So
they become `BrokerUnreachable`, except for those that a caller handles: an object that exists, one that
does not, and one that is invalid. The stream joins the watches of three kinds. The order between two
watches is undefined, so the revision is tracked per reservation and not as one number.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from kubelend.communicators import factory
from kubelend.core.errors import (
    AlreadyExists,
    BrokerUnreachable,
    Conflict,
    Gone,
    IdentityInUse,
    InvalidInput,
    KubelendError,
    NotFound,
)
from kubelend.kube import codec, informer, resources
from kubelend.kube.client import Client
from kubelend.kube.codec import UndecodableObject
from kubelend.kube.informer import Deleted, Listed
from kubelend.kube.leader_election import LEASES, Lease, LeaseSpec
from kubelend.kube.resources import Resource
from kubelend.wire import bodies, cluster_namespaces
from kubelend.wire.broker_objects import (
    RESERVATION_FINALIZER,
    AdvertisedResources,
    ClusterAdvertisement,
    ClusterAdvertisementSpec,
    ClusterSession,
    Reservation,
    ReservationSpec,
)
from kubelend.wire.objects import Kind, Metadata, Object, ProviderInstruction

ADVERTISEMENTS: Final = resources.resource_for(ClusterAdvertisement)
RESERVATIONS: Final = resources.resource_for(Reservation)
INSTRUCTIONS: Final = resources.resource_for(ProviderInstruction)
SESSIONS: Final = resources.resource_for(ClusterSession)

ObservedObject = ClusterAdvertisement | Reservation | ClusterSession


def now() -> datetime:
    return datetime.now(UTC)


def is_observed(found: ObservedObject) -> bool:
    """Whether the status is about the current spec."""
    return found.status.observed_generation == found.metadata.generation


def is_report_observed(found: ProviderInstruction) -> bool:
    return found.spec.observed_report_time == found.status.report_time


class NamespaceClient:
    """Reads and writes the objects of one cluster namespace."""

    def __init__(self, client: Client, namespace: str) -> None:
        self.client = client
        self.namespace = namespace

    async def find(self, resource: Resource[Kind], name: str) -> Kind | None:
        with as_unreachable():
            return await self.client.find(resource, name, self.namespace)

    async def list(self, resource: Resource[Kind]) -> list[Kind]:
        with as_unreachable():
            return (await self.client.list(resource, self.namespace)).objects

    async def patch(
        self, resource: Resource[Kind], name: str, part: str, fields: dict[str, Any]
    ) -> Kind:
        """Patch fields of the spec or of the status; `NotFound` if there is no such object."""
        subresource = "status" if part == "status" else ""
        with as_unreachable():
            return await self.client.patch(
                resource, name, self.namespace, {part: fields}, subresource=subresource
            )

    async def wait(
        self, resource: Resource[Kind], found: Kind, is_done: Callable[[Kind], bool]
    ) -> Kind:
        """The object once the broker has written what is waited for."""
        while not is_done(found):
            with as_unreachable():
                found = await self._next_state(resource, found)
        return found

    async def wait_deleted(self, resource: Resource[Kind], found: Kind) -> None:
        """Wait until an object that is being deleted is gone."""
        with as_unreachable():
            while (
                later := await self.client.find(resource, found.metadata.name, self.namespace)
            ) is not None:
                if later.metadata.uid != found.metadata.uid:
                    return
                await self._next_state(resource, later, is_being_deleted=True)

    async def _next_state(
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
                    if event.type == "DELETED":
                        break
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


LEASE_NAME: Final = "kubelend-agent"
LEASE_DURATION: Final = timedelta(seconds=90)
"""Three intervals of advertisements: each renews the lease."""
LEASE_RENEWAL: Final = LEASE_DURATION / 4
LEASE_ABANDONED: Final = 10 * LEASE_DURATION
"""By the clocks of both agents, which may differ: then nobody is waited for."""


class AgentLease:
    """The Lease that the active agent of the cluster holds, as in client-go.

    It is renewed by the calls that change something. Clocks of different agents are not compared: another
    agent takes the lease when it has observed it unchanged for its whole duration.
    """

    def __init__(
        self,
        objects: NamespaceClient,
        identity: str,
        clock: Callable[[], datetime] = now,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without an identity nothing is held, nor respected: a command beside the agent."""
        self._objects = objects
        self._identity = identity
        self._clock = clock
        self._timer = timer
        self._renewed_at = float("-inf")
        self._observed: tuple[str, float] = "", 0.0
        """Version of another agent's lease, and since when it is unchanged."""
        self._lock = asyncio.Lock()

    async def hold(self) -> None:
        """Acquire the lease, or renew it if that is due; `IdentityInUse` while another agent holds it."""
        if not self._identity or self._is_fresh():
            return
        async with self._lock:
            while not self._is_fresh():
                try:
                    with as_unreachable(Conflict):
                        await self._renew()
                except IdentityInUse:
                    raise
                except Conflict:  # another agent was faster, and may hold it now
                    continue

    async def release(self) -> None:
        """Let another agent acquire it at once."""
        if self._renewed_at == float("-inf"):
            return
        self._renewed_at = float("-inf")
        found = await self._objects.find(LEASES, LEASE_NAME)
        if found is not None and found.spec.holder_identity == self._identity:
            spec = replace(found.spec, holder_identity="")
            with as_unreachable():
                await self._objects.client.update(LEASES, replace(found, spec=spec))

    def _is_fresh(self) -> bool:
        return self._timer() - self._renewed_at < LEASE_RENEWAL.total_seconds()

    async def _renew(self) -> None:
        client, started = self._objects.client, self._timer()
        found = await client.find(LEASES, LEASE_NAME, self._objects.namespace)
        if found is None:
            metadata = Metadata(LEASE_NAME, self._objects.namespace)
            await client.create(LEASES, Lease(metadata, self._spec(None)))
        else:
            self._check_free(found)
            await client.update(LEASES, replace(found, spec=self._spec(found.spec)))
        self._renewed_at = started

    def _spec(self, before: LeaseSpec | None) -> LeaseSpec:
        at = self._clock().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        is_own = before is not None and before.holder_identity == self._identity
        changes = 0 if before is None else before.lease_transitions or 0
        return LeaseSpec(
            holder_identity=self._identity,
            lease_duration_seconds=int(LEASE_DURATION.total_seconds()),
            acquire_time=before.acquire_time if is_own and before else at,
            renew_time=at,
            lease_transitions=changes if is_own or before is None else changes + 1,
        )

    def _check_free(self, found: Lease) -> None:
        holder = found.spec.holder_identity
        if not holder or holder == self._identity or self._is_expired(found):
            return
        raise IdentityInUse(
            f"another agent is active in namespace {self._objects.namespace} since"
            f" {found.spec.acquire_time} ({holder}, last seen {found.spec.renew_time})",
            hint="stop it, or create another cluster namespace for this cluster",
        )

    def _is_expired(self, found: Lease) -> bool:
        version, at = found.metadata.resource_version, self._timer()
        if self._observed[0] != version:
            self._observed = version, at
        seconds = found.spec.lease_duration_seconds or LEASE_DURATION.total_seconds()
        renewed = datetime.fromisoformat(found.spec.renew_time or "0001-01-01T00:00:00Z")
        is_abandoned = self._clock() - renewed > LEASE_ABANDONED
        return is_abandoned or at - self._observed[1] >= seconds


@contextmanager
def as_unreachable(*handled: type[KubelendError]) -> Iterator[None]:
    """Around each use of the API server; `handled` are further errors that the caller handles."""
    passed: tuple[type[KubelendError], ...] = (AlreadyExists, IdentityInUse, InvalidInput, *handled)
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


def raise_for_error(found: ObservedObject | ProviderInstruction) -> None:
    """Raises the broker's error, if it has not accepted what the agent wrote."""
    if isinstance(found, ProviderInstruction):
        condition = found.spec.accepted
    else:
        condition = cluster_namespaces.find_accepted(found.status.conditions)
    if (error := cluster_namespaces.error_from_condition(condition)) is not None:
        raise error


def reservation_in(found: InstructionObject) -> bodies.Reservation:
    """The reservation that the broker shows in an object."""
    if (instruction := latest_instruction(found)) is None:
        raise BrokerUnreachable("the broker's response is empty")
    return instruction.reservation


_ZERO_QUANTITIES = bodies.Quantities("0", "0")


def cluster_advertisement(body: bodies.Advertisement, namespace: str) -> ClusterAdvertisement:
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
            renew_time=now(),
        ),
    )


def accepted_advertisement(
    sent: bodies.Advertisement, found: ClusterAdvertisement
) -> bodies.Advertisement:
    """What was sent, with reserved and available as the broker has computed them."""
    amounts, status = sent.resources, found.status
    shown = bodies.Metrics(
        capacity=amounts.capacity,
        allocatable=amounts.allocatable or amounts.capacity,
        allocated=amounts.allocated or _ZERO_QUANTITIES,
        reserved=status.reserved,
        available=status.available,
    )
    return replace(sent, resources=shown, timestamp=sent.timestamp or status.last_update_time)


def reservation_object(body: bodies.ReservationRequest, key: str, namespace: str) -> Reservation:
    """With the broker's finalizer from the start: a deleted object stays until it is released."""
    metadata = Metadata(
        cluster_namespaces.request_object_name(key),
        namespace,
        finalizers=(RESERVATION_FINALIZER,),
        annotations={cluster_namespaces.IDEMPOTENCY_ANNOTATION: key},
    )
    return Reservation(metadata, bodies.copy_fields(body, ReservationSpec))


def is_same_request(found: Reservation, wanted: Reservation) -> bool:
    return _requested(found) == _requested(wanted)


def _requested(found: Reservation) -> bodies.ReservationRequest:
    """What was requested at first, without what was written about it since."""
    return bodies.copy_fields(found.spec, bodies.ReservationRequest)


def sent_handshake(handshake: bodies.Handshake) -> dict[str, Any]:
    return {
        "sentAt": now(),
        "handshake": cluster_namespaces.replacement(handshake),
    }


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
    """Calls `on_handshake` with each reservation whose other side has sent a handshake."""

    def __init__(self, on_handshake: Callable[[str], None]) -> None:
        self._on_handshake = on_handshake
        self._known: dict[str, int] = {}
        """Number of handshakes by object."""

    def handle(self, found: InstructionObject) -> None:
        part = found.status if isinstance(found, Reservation) else found.spec
        if part.peer_handshakes > self._known.get(found.metadata.uid, 0):
            self._on_handshake(reservation_in(found).id)
        self._known[found.metadata.uid] = part.peer_handshakes

    def forget(self, deleted: InstructionObject) -> None:
        self._known.pop(deleted.metadata.uid, None)


class ObjectStream(NamedTuple):
    """One watch that the broker serves."""

    watch: str
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
        for _ in range(len(_WATCHED)):
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
                if event.status.watch != self.watch:
                    raise BrokerUnreachable("the broker ended the stream")
            case Deleted(Reservation() | ProviderInstruction() as gone):
                self.handshakes.forget(gone)
                if (last := latest_instruction(gone)) is not None:
                    self.revisions.forget(last)
            case Reservation() | ProviderInstruction():
                self.handshakes.handle(event)
                return latest_instruction(event)
        return None


class WatchEvents:
    """Events of all watches in one queue."""

    def __init__(self, objects: NamespaceClient) -> None:
        self._objects = objects
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
        watches = [asyncio.create_task(self._watch(kind)) for kind in _WATCHED]
        try:
            yield
        finally:
            for task in watches:
                task.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _watch(self, resource: Resource[Any]) -> None:
        client, namespace = self._objects.client, self._objects.namespace
        seen = informer.list_and_watch(client, resource, namespace, report=self._on_watch_error)
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
    return found.status.instruction if isinstance(found, Reservation) else found.spec.instruction


_WATCHED: Final[tuple[Resource[Any], ...]] = (SESSIONS, RESERVATIONS, INSTRUCTIONS)


def _by_revision(found: Iterable[Object]) -> list[bodies.Instruction]:
    objects = [one for one in found if isinstance(one, Reservation | ProviderInstruction)]
    instructions = filter(None, map(latest_instruction, objects))
    return sorted(instructions, key=lambda one: one.revision)
