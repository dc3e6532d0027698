"""The journal as the broker adds to it, searches it and shortens it.

Changes tell of themselves on the writer's road. Here is the rest: refusals, which change nothing; the
search, newest first, which reads the store in portions; and the end of old lines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import NamedTuple

import structlog

from kubelend.broker.floods import Floods
from kubelend.broker.writer import Writer
from kubelend.core import journal
from kubelend.core.errors import Hidden, KubelendError
from kubelend.core.events import Cut
from kubelend.core.journal import Actor, Entry, Line, Told

PORTION = 500
"""Lines read at a time: the store writes nothing meanwhile."""

MOST_PORTIONS = 40
"""Of one search; it says where to go on."""

MOST_CUT = 10_000
"""Lines forgotten at a time."""

HIDDEN = "Hidden"
"""What the journal says where the caller only heard that there is no such thing."""

log = structlog.get_logger("kubelend.broker")


class Found(NamedTuple):
    """What a search found, newest first, and where the next one goes on: None at the beginning."""

    lines: list[tuple[Told, bytes]]
    before: int | None


class Journal:
    """Use `run` as a root task."""

    def __init__(self, writer: Writer, keep_for: timedelta) -> None:
        self._writer = writer
        self._keep_for = keep_for
        """Zero keeps all."""
        self._floods = Floods()

    async def run(self, pause: float = 10.0) -> None:
        """Tell of floods that are over, and forget what is too old. Never returns."""
        try:
            while True:
                await asyncio.sleep(pause)
                await self._tidy_quietly()
        finally:  # what was only counted so far is told before the store is closed
            for entry in self._floods.all_over(self._writer.clock()):
                self._writer.tell(entry)

    def refused(self, actor: Actor, action: str, subject: str, error: KubelendError) -> None:
        """Tell that somebody was refused something, and why."""
        code = HIDDEN if isinstance(error, Hidden) else error.code
        self.turned_away(actor, action, subject, code, error.message)

    def turned_away(
        self, actor: Actor, action: str, subject: str, code: str, message: str = ""
    ) -> None:
        """The same of somebody who did not get so far as to hear an error."""
        now = self._writer.clock()
        entry = Entry(now, actor, action, subject, code=code, message=message)
        if self._floods.admit(entry):
            self._writer.tell(entry)

    async def search(self, wanted: Callable[[Told], bool], before: int | None, limit: int) -> Found:
        """The newest lines that are wanted, of those before a number."""
        start, end = await self._writer.ask(lambda store: store.journal_ends())
        at = end.number + 1 if before is None else min(before, end.number + 1)
        found: list[tuple[Told, bytes]] = []
        for _ in range(MOST_PORTIONS):
            if at <= start.number + 1 or len(found) >= limit:
                break
            first = max(start.number, at - 1 - PORTION)
            found += await self._portion(first, at - 1 - first, wanted)
            at = first + 1
        lines = found[:limit]
        if len(found) > limit:
            at = lines[-1][0].number
        return Found(lines, at if at > start.number + 1 else None)

    async def tidy(self) -> None:
        """Tell of floods that are over; forget a portion of what is too old, if this broker decides."""
        now = self._writer.clock()
        if self._writer.unready is not None:
            return
        for entry in self._floods.over(now):
            self._writer.tell(entry)
        if self._keep_for and self._writer.may_decide:
            await self._cut(now - self._keep_for)

    async def _tidy_quietly(self) -> None:
        try:
            await self.tidy()
        except KubelendError as problem:  # the writer has said so, and tries again
            log.warning("journal not tidied", problem=str(problem))

    async def _portion(
        self, after: int, count: int, wanted: Callable[[Told], bool]
    ) -> list[tuple[Told, bytes]]:
        """Newest first. If it has been cut meanwhile, the store gives lines that were in a portion before."""
        lines = await self._writer.ask(lambda store: store.lines(after, count))
        own = (line for line in reversed(lines) if line.number <= after + count)
        told = ((journal.told(line), line.digest) for line in own)
        return [(one, digest) for one, digest in told if wanted(one)]

    async def _cut(self, moment: datetime) -> None:
        last = await self._last_before(moment)
        if last is None:
            return
        told = journal.cut(last, self._writer.clock(), moment)
        self._writer.keep([Cut(last.number), told])
        await self._writer.settled()

    async def _last_before(self, moment: datetime) -> Line | None:
        """The last line from before a moment, of the next few; they are in the order of time."""
        (oldest,) = await self._writer.ask(lambda store: store.lines(0, 1)) or (None,)
        if oldest is None or journal.told(oldest).at >= moment:
            return None
        low, high = oldest.number, oldest.number + MOST_CUT
        while low < high:  # the line `low` is from before, and none above `high` is looked for
            middle = (low + high + 1) // 2
            if await self._is_before(middle, moment):
                low = middle
            else:
                high = middle - 1
        (last,) = await self._writer.ask(lambda store: store.lines(low - 1, 1))
        return last

    async def _is_before(self, number: int, moment: datetime) -> bool:
        lines = await self._writer.ask(lambda store: store.lines(number - 1, 1))
        return bool(lines) and lines[0].number == number and journal.told(lines[0]).at < moment
