"""What a mailbox tells as it changes: three watches joined into one, and what was told of it before.

The transport `kubernetes` makes its stream of this. The order of two watches says nothing, so what counts is
the revision that was last told of each reservation, and not one number for all.
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
"""Actions of what is not over."""

Ended = Callable[[], BrokerUnreachable]
Event = Listed[Object] | Deleted[Object] | Object
Told = Reservation | ProviderInstruction


class Diary:
    """Up to which revision each side of each reservation was told."""

    def __init__(self) -> None:
        self.seen = -1
        """The ledger's revision up to which everything was told; below zero if nothing was."""
        self._told: dict[tuple[str, str], int] = {}

    def begin(self) -> None:
        """What was told before means nothing any more."""
        self.seen = -1
        self._told.clear()

    def note(self, instruction: bodies.Instruction) -> bool:
        """True if it is news."""
        key = instruction.role, instruction.reservation.id
        if instruction.revision <= self._told.get(key, -1):
            return False
        self._told[key] = instruction.revision
        return True

    def forget(self, instruction: bodies.Instruction) -> None:
        self._told.pop((instruction.role, instruction.reservation.id), None)


class Stream(NamedTuple):
    """One stream that the broker has agreed to."""

    asker: Asker
    session: str
    revision: int
    """Up to which the mailbox told everything when it was opened."""
    diary: Diary
    is_new: bool
    """Whether nothing told before counts: all that is open is told, and what is over passed by."""

    async def told(self, events: Events) -> AsyncGenerator[bodies.Instruction, None]:
        """Until it ends, by an error."""
        for instruction in _in_order(await self._first(events)):
            is_news = self.diary.note(instruction)
            self.diary.seen = max(self.diary.seen, min(instruction.revision, self.revision))
            if is_news and (instruction.action in OPEN or not self.is_new):
                yield instruction
        self.diary.seen = self.revision
        while True:
            news = self._taken(await events.next())
            if news is not None and self.diary.note(news):
                yield news

    async def _first(self, events: Events) -> list[Object]:
        """All that is there, once each watch has begun."""
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
                raise BrokerUnreachable("the API server has forgotten where the stream was")
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
    """What the watches see, one after the other."""

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
        """Have whoever waits go away."""
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
        """The agent does the long waiting itself, and asks meanwhile."""
        if problem:
            self._queue.put_nowait(BrokerUnreachable(f"the mailbox cannot be seen: {problem}"))


def said(found: Told) -> bodies.Instruction | None:
    """What the broker last said by an object."""
    reply = found.status.response if isinstance(found, Reservation) else found.spec.response
    return mailboxes.instruction(reply)


_WATCHES = 3


def _in_order(found: Iterable[Object]) -> list[bodies.Instruction]:
    told = [said(one) for one in found if isinstance(one, Reservation | ProviderInstruction)]
    return sorted((one for one in told if one is not None), key=lambda one: one.revision)
