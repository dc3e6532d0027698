"""The audit log of the broker: appending rejections, throttled; search; truncation by age.

Changes write their audit entries through the writer. Rejections change nothing and are appended here,
summarized when one caller causes many.
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
"""Lines per read: the store cannot commit meanwhile."""

MOST_PORTIONS = 40
"""Reads per search; its result says where to continue."""

MOST_CUT = 10_000
"""Lines truncated at a time."""

HIDDEN = "Hidden"
"""Code in the audit log for an error that the caller sees as NotFound."""

log = structlog.get_logger("kubelend.broker")


class Found(NamedTuple):
    """Result of a search, newest first; `before` continues it, None at the start of the log."""

    lines: list[tuple[Told, bytes]]
    before: int | None


class Journal:
    """Appends, searches and truncates. Use `run` as a root task."""

    def __init__(self, writer: Writer, keep_for: timedelta) -> None:
        self._writer = writer
        self._keep_for = keep_for
        """Zero keeps all lines."""
        self._floods = Floods()

    async def run(self, pause: float = 10.0) -> None:
        """Writes summaries of suppressed rejections and truncates old lines. Runs until cancelled."""
        try:
            while True:
                await asyncio.sleep(pause)
                await self._tidy_quietly()
        finally:  # summarize what was only counted before the store closes
            for entry in self._floods.all_over(self._writer.clock()):
                self._writer.tell(entry)

    def refused(self, actor: Actor, action: str, subject: str, error: KubelendError) -> None:
        """Records that a request was rejected, and why."""
        code = HIDDEN if isinstance(error, Hidden) else error.code
        self.turned_away(actor, action, subject, code, error.message)

    def turned_away(
        self, actor: Actor, action: str, subject: str, code: str, message: str = ""
    ) -> None:
        """Records a rejected connection or handshake, which has no error response."""
        now = self._writer.clock()
        entry = Entry(now, actor, action, subject, code=code, message=message)
        if self._floods.admit(entry):
            self._writer.tell(entry)

    async def search(self, wanted: Callable[[Told], bool], before: int | None, limit: int) -> Found:
        """Returns the newest matching lines before a number."""
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
        """Writes due summaries; on the leader, truncates a batch of old lines."""
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
        except KubelendError as problem:  # the writer reloads the store
            log.warning("Audit log truncation failed, will retry", error=str(problem))

    async def _portion(
        self, after: int, count: int, wanted: Callable[[Told], bool]
    ) -> list[tuple[Told, bytes]]:
        """Returns matching lines, newest first. After a truncation the store returns later ones, too."""
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
        """Returns the last of the oldest lines from before a moment, by binary search."""
        (oldest,) = await self._writer.ask(lambda store: store.lines(0, 1)) or (None,)
        if oldest is None or journal.told(oldest).at >= moment:
            return None
        low, high = oldest.number, oldest.number + MOST_CUT
        while low < high:  # `low` is from before the moment; lines above `high` are not considered
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
