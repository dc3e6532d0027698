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
from kubelend.communicators.kube_asking import Asker, Slot
from kubelend.core.errors import BrokerUnreachable
from kubelend.kube import watching
from kubelend.kube.answers import Unreadable
from kubelend.kube.watching import Deleted, Listed
from kubelend.wire import bodies, mailboxes
from kubelend.wire.broker_objects import Mailbox, Reservation
from kubelend.wire.objects import Object, ProviderInstruction

OPEN = frozenset({"Use", "Wait", "Hold"})
"""Actions of unfinished reservations."""

Ended = Callable[[], BrokerUnreachable]
Event = Listed[Object] | Deleted[Object] | Object
Told = Reservation | ProviderInstruction


class Diary:
    """The last delivered revision of each reservation, per role."""

    def __init__(self) -> None:
        self.seen = -1
        """The ledger's revision up to which everything was delivered; negative if nothing was."""
        self._told: dict[tuple[str, str], int] = {}

    def begin(self) -> None:
        """Forget what was delivered."""
        self.seen = -1
        self._told.clear()

    def note(self, instruction: bodies.Instruction) -> bool:
        """Record a delivery; True if it is new."""
        key = instruction.role, instruction.reservation.id
        if instruction.revision <= self._told.get(key, -1):
            return False
        self._told[key] = instruction.revision
        return True

    def forget(self, instruction: bodies.Instruction) -> None:
        self._told.pop((instruction.role, instruction.reservation.id), None)


class Stream(NamedTuple):
    """One stream that the broker has opened."""

    asker: Asker
    session: str
    revision: int
    """The ledger's revision that the namespace was complete to when the stream was opened."""
    diary: Diary
    is_new: bool
    """Whether earlier deliveries do not count: all unfinished reservations are delivered, finished
    ones skipped."""

    async def told(self, events: Events) -> AsyncGenerator[bodies.Instruction, None]:
        """Yields instructions until an error ends the stream."""
        for instruction in _in_order(await self._first(events)):
            is_news = self.diary.note(instruction)
            self.diary.seen = max(self.diary.seen, min(instruction.revision, self.revision))
            if is_news and (instruction.action in OPEN or not self.is_new):
                yield instruction
        self.diary.seen = self.revision
        while True:
            update = self._taken(await events.next())
            if update is not None and self.diary.note(update):
                yield update

    async def _first(self, events: Events) -> list[Object]:
        """All objects, once each watch has delivered its list."""
        found: list[Object] = []
        for _ in range(_WATCHES):
            event = await events.next()
            while not isinstance(event, Listed):
                found += [] if isinstance(event, Deleted) else [event]
                event = await events.next()
            found += event.objects
        for mailbox in found:
            self._taken(mailbox)
        return found

    def _taken(self, event: Event) -> bodies.Instruction | None:
        match event:
            case Listed():
                raise BrokerUnreachable("the watch was restarted by a new list")
            case Mailbox():
                if event.status.session != self.session:
                    raise BrokerUnreachable("the broker ended the stream")
            case Deleted(Reservation() | ProviderInstruction() as gone):
                if (last := said(gone)) is not None:
                    self.diary.forget(last)
            case Reservation() | ProviderInstruction():
                return said(event)
        return None


class Events:
    """Events of all watches in one queue."""

    def __init__(self, asker: Asker, ended: Ended) -> None:
        self._asker = asker
        self._ended = ended
        self._queue: asyncio.Queue[Event | BrokerUnreachable] = asyncio.Queue()

    async def next(self) -> Event:
        found = await self._queue.get()
        if isinstance(found, BrokerUnreachable):
            raise found
        return found

    def end(self) -> None:
        """Make the consumer stop."""
        self._queue.put_nowait(self._ended())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        watches = [
            asyncio.create_task(self._watch(kube_asking.MAILBOXES), name="mailbox"),
            asyncio.create_task(self._watch(kube_asking.RESERVATIONS), name="reservations"),
            asyncio.create_task(self._watch(kube_asking.INSTRUCTIONS), name="instructions"),
        ]
        try:
            yield
        finally:
            for task in watches:
                task.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _watch(self, slot: Slot[Any]) -> None:
        asker = self._asker
        seen = watching.follow(asker.client, slot.resource, asker.namespace, report=self._report)
        async with aclosing(seen):
            async for change in seen:
                if not isinstance(change, Unreadable):
                    self._queue.put_nowait(change)

    def _report(self, problem: str) -> None:
        """Ends the stream: the agent retries by itself, and polls meanwhile."""
        if problem:
            self._queue.put_nowait(
                BrokerUnreachable(f"cannot watch the cluster namespace: {problem}")
            )


def said(found: Told) -> bodies.Instruction | None:
    """The last instruction that the broker wrote into an object."""
    reply = found.status.response if isinstance(found, Reservation) else found.spec.response
    return mailboxes.instruction(reply)


_WATCHES = 3


def _in_order(found: Iterable[Object]) -> list[bodies.Instruction]:
    objects = [said(one) for one in found if isinstance(one, Reservation | ProviderInstruction)]
    return sorted((one for one in objects if one is not None), key=lambda one: one.revision)
