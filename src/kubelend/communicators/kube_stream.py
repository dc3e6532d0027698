"""The instruction stream of a cluster namespace: three watches joined, and the revisions that were
delivered.

The order between two watches is undefined, so the revision is tracked per reservation.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from typing import Any, NamedTuple

from kubelend.communicators import kube_asking
from kubelend.communicators.kube_asking import CallSlot, ObjectCaller
from kubelend.core.errors import BrokerUnreachable
from kubelend.kube import watching
from kubelend.kube.answers import UndecodableObject
from kubelend.kube.watching import Deleted, Listed
from kubelend.wire import bodies, mailboxes
from kubelend.wire.broker_objects import ClusterSession, Reservation
from kubelend.wire.objects import Object, ProviderInstruction

OPEN_ACTIONS = frozenset({"Use", "Wait", "Hold"})
"""Actions of unfinished reservations."""

ClosedErrorFactory = Callable[[], BrokerUnreachable]
WatchEvent = Listed[Object] | Deleted[Object] | Object
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


class ObjectStream(NamedTuple):
    """One stream that the broker has opened."""

    caller: ObjectCaller
    session: str
    revision: int
    """The ledger's revision that the namespace was complete to when the stream was opened."""
    revisions: RevisionTracker
    is_reset: bool
    """Whether earlier deliveries do not count: all unfinished reservations are delivered, finished
    ones skipped."""

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
        for mailbox in found:
            self._handle_event(mailbox)
        return found

    def _handle_event(self, event: WatchEvent) -> bodies.Instruction | None:
        match event:
            case Listed():
                raise BrokerUnreachable("the watch was restarted by a new list")
            case ClusterSession():
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

    def __init__(self, caller: ObjectCaller, closed_error: ClosedErrorFactory) -> None:
        self._caller = caller
        self._closed_error = closed_error
        self._queue: asyncio.Queue[WatchEvent | BrokerUnreachable] = asyncio.Queue()

    async def next(self) -> WatchEvent:
        found = await self._queue.get()
        if isinstance(found, BrokerUnreachable):
            raise found
        return found

    def close(self) -> None:
        """Make the consumer stop."""
        self._queue.put_nowait(self._closed_error())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        watches = [
            asyncio.create_task(self._watch(kube_asking.SESSION_SLOT), name="mailbox"),
            asyncio.create_task(self._watch(kube_asking.RESERVATION_SLOT), name="reservations"),
            asyncio.create_task(self._watch(kube_asking.INSTRUCTION_SLOT), name="instructions"),
        ]
        try:
            yield
        finally:
            for task in watches:
                task.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _watch(self, slot: CallSlot[Any]) -> None:
        asker = self._caller
        seen = watching.list_and_watch(
            asker.client, slot.resource, asker.namespace, report=self._on_watch_error
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
    return mailboxes.instruction_from_response(reply)


_WATCH_COUNT = 3


def _by_revision(found: Iterable[Object]) -> list[bodies.Instruction]:
    objects = [
        latest_instruction(one)
        for one in found
        if isinstance(one, Reservation | ProviderInstruction)
    ]
    return sorted((one for one in objects if one is not None), key=lambda one: one.revision)
