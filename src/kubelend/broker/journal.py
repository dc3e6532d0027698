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

from kubelend.broker.floods import AuditThrottle
from kubelend.broker.writer import LedgerWriter
from kubelend.core import journal
from kubelend.core.errors import Hidden, KubelendError
from kubelend.core.events import AuditLogTruncated
from kubelend.core.journal import Actor, AuditEntry, AuditLine, AuditRecord

LINES_PER_READ = 500
"""Lines per read: the store cannot commit meanwhile."""

MAX_READS_PER_SEARCH = 40
"""Reads per search; its result says where to continue."""

MAX_TRUNCATED_LINES = 10_000
"""Lines truncated at a time."""

HIDDEN_CODE = "Hidden"
"""Code in the audit log for an error that the caller sees as NotFound."""

log = structlog.get_logger("kubelend.broker")


class SearchResult(NamedTuple):
    """Result of a search, newest first; `before` continues it, None at the start of the log."""

    lines: list[tuple[AuditRecord, bytes]]
    before: int | None


class AuditLog:
    """Appends, searches and truncates. Use `run` as a root task."""

    def __init__(self, writer: LedgerWriter, retention: timedelta) -> None:
        self._writer = writer
        self._retention = retention
        """Zero keeps all lines."""
        self._throttle = AuditThrottle()

    async def run(self, interval: float = 10.0) -> None:
        """Writes summaries of suppressed rejections and truncates old lines. Runs until cancelled."""
        try:
            while True:
                await asyncio.sleep(interval)
                await self._try_truncate()
        finally:  # summarize what was only counted before the store closes
            for entry in self._throttle.all_summaries(self._writer.clock()):
                self._writer.append_audit(entry)

    def append_rejection(
        self, actor: Actor, action: str, subject: str, error: KubelendError
    ) -> None:
        """Records that a request was rejected, and why."""
        code = HIDDEN_CODE if isinstance(error, Hidden) else error.code
        self.append_rejected_connection(actor, action, subject, code, error.message)

    def append_rejected_connection(
        self, actor: Actor, action: str, subject: str, code: str, message: str = ""
    ) -> None:
        """Records a rejected connection or handshake, which has no error response."""
        now = self._writer.clock()
        entry = AuditEntry(now, actor, action, subject, code=code, message=message)
        if self._throttle.admit(entry):
            self._writer.append_audit(entry)

    async def search(
        self, matches: Callable[[AuditRecord], bool], before: int | None, limit: int
    ) -> SearchResult:
        """Returns the newest matching lines before a number."""
        start, end = await self._writer.query_store(lambda store: store.audit_log_bounds())
        at = end.number + 1 if before is None else min(before, end.number + 1)
        found: list[tuple[AuditRecord, bytes]] = []
        for _ in range(MAX_READS_PER_SEARCH):
            if at <= start.number + 1 or len(found) >= limit:
                break
            first = max(start.number, at - 1 - LINES_PER_READ)
            found += await self._read_matching(first, at - 1 - first, matches)
            at = first + 1
        lines = found[:limit]
        if len(found) > limit:
            at = lines[-1][0].number
        return SearchResult(lines, at if at > start.number + 1 else None)

    async def truncate(self) -> None:
        """Writes due summaries; on the leader, truncates a batch of old lines."""
        now = self._writer.clock()
        if self._writer.unready is not None:
            return
        for entry in self._throttle.due_summaries(now):
            self._writer.append_audit(entry)
        if self._retention and self._writer.is_leader:
            await self._truncate_before(now - self._retention)

    async def _try_truncate(self) -> None:
        try:
            await self.truncate()
        except KubelendError as problem:  # the writer reloads the store
            log.warning("Audit log truncation failed, will retry", error=str(problem))

    async def _read_matching(
        self, after: int, count: int, matches: Callable[[AuditRecord], bool]
    ) -> list[tuple[AuditRecord, bytes]]:
        """Returns matching lines, newest first. After a truncation the store returns later ones, too."""
        lines = await self._writer.query_store(lambda store: store.audit_lines(after, count))
        own = (line for line in reversed(lines) if line.number <= after + count)
        told = ((journal.decode_line(line), line.digest) for line in own)
        return [(one, digest) for one, digest in told if matches(one)]

    async def _truncate_before(self, moment: datetime) -> None:
        last = await self._last_before(moment)
        if last is None:
            return
        told = journal.truncation_entry(last, self._writer.clock(), moment)
        self._writer.persist([AuditLogTruncated(last.number), told])
        await self._writer.wait_durable()

    async def _last_before(self, moment: datetime) -> AuditLine | None:
        """Returns the last of the oldest lines from before a moment, by binary search."""
        (oldest,) = await self._writer.query_store(lambda store: store.audit_lines(0, 1)) or (None,)
        if oldest is None or journal.decode_line(oldest).at >= moment:
            return None
        low, high = oldest.number, oldest.number + MAX_TRUNCATED_LINES
        while low < high:  # `low` is from before the moment; lines above `high` are not considered
            middle = (low + high + 1) // 2
            if await self._is_before(middle, moment):
                low = middle
            else:
                high = middle - 1
        (last,) = await self._writer.query_store(lambda store: store.audit_lines(low - 1, 1))
        return last

    async def _is_before(self, number: int, moment: datetime) -> bool:
        lines = await self._writer.query_store(lambda store: store.audit_lines(number - 1, 1))
        return (
            bool(lines) and lines[0].number == number and journal.decode_line(lines[0]).at < moment
        )
