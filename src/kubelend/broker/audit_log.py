"""The audit log of the broker: appending rejections, throttled; search; truncation by age.

Changes write their audit entries through the writer. Rejections change nothing and are appended here,
summarized when one caller causes many.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import NamedTuple

import msgspec
import structlog
from msgspec.structs import replace

from kubelend.broker.writer import LedgerWriter
from kubelend.core import audit_log
from kubelend.core.audit_log import Actor, AuditEntry, AuditLine, AuditRecord
from kubelend.core.errors import Hidden, KubelendError
from kubelend.core.events import AuditLogTruncated
from kubelend.core.lifecycle import Role
from kubelend.kits.ratelimit import rate_limit_key

LINES_PER_READ = 500
"""Lines per read: the store cannot commit meanwhile."""

MAX_READS_PER_SEARCH = 40
"""Reads per search; its result has the position to continue from."""

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
        """Zero retains all lines."""
        self._throttle = AuditThrottle()

    async def run(self, interval: float = 10.0) -> None:
        """Writes summaries of suppressed rejections and truncates old lines. Runs until cancelled."""
        try:
            while True:
                await asyncio.sleep(interval)
                try:
                    await self.truncate()
                except KubelendError as error:  # the writer reloads the store
                    log.warning("Audit log truncation failed, will retry", error=str(error))
        finally:  # summarize what was only counted before the store closes
            for entry in self._throttle.pop_summaries(self._writer.clock(), is_stopping=True):
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
        for entry in self._throttle.pop_summaries(now):
            self._writer.append_audit(entry)
        if self._retention and self._writer.is_leader:
            await self._truncate_before(now - self._retention)

    async def _read_matching(
        self, after: int, count: int, matches: Callable[[AuditRecord], bool]
    ) -> list[tuple[AuditRecord, bytes]]:
        """Returns matching lines, newest first. After a truncation the store returns later ones, too."""
        lines = await self._writer.query_store(lambda store: store.audit_lines(after, count))
        own = (line for line in reversed(lines) if line.number <= after + count)
        records = ((audit_log.decode_line(line), line.digest) for line in own)
        return [(one, digest) for one, digest in records if matches(one)]

    async def _truncate_before(self, moment: datetime) -> None:
        last = await self._last_before(moment)
        if last is None:
            return
        record = audit_log.truncation_entry(last, self._writer.clock(), moment)
        self._writer.persist([AuditLogTruncated(last.number), record])
        await self._writer.wait_durable()

    async def _last_before(self, moment: datetime) -> AuditLine | None:
        """Returns the last of the oldest lines from before a moment, by binary search."""
        oldest = await self._first_line(0)
        if oldest is None or audit_log.decode_line(oldest).at >= moment:
            return None
        low, high = oldest, oldest.number + MAX_TRUNCATED_LINES
        while (
            low.number < high
        ):  # `low` is from before the moment; lines above `high` are not considered
            middle = (low.number + high + 1) // 2
            line = await self._first_line(middle - 1)
            if line and line.number == middle and audit_log.decode_line(line).at < moment:
                low = line
            else:
                high = middle - 1
        return low

    async def _first_line(self, after: int) -> AuditLine | None:
        lines = await self._writer.query_store(lambda store: store.audit_lines(after, 1))
        return lines[0] if lines else None


THROTTLE_WINDOW = timedelta(minutes=1)
MAX_FULL_ENTRIES = 20
"""Entries of one kind that are written in full within a window."""

MAX_FULL_UNAUTHENTICATED = 100
"""The same for all unauthenticated callers together."""

MAX_KINDS, MAX_UNAUTHENTICATED_KINDS = 10_000, 100
"""Maximum number of kinds that are counted separately."""

_AUTHENTICATED_ROLES = frozenset(Role)


class _Window(msgspec.Struct):
    """Rejections of one kind: caller, role, action and code."""

    until: datetime
    written: int = 0
    counted: int = 0
    last: AuditEntry | None = None


class AuditThrottle:
    """Counts recent rejections by kind."""

    def __init__(self) -> None:
        self._authenticated: dict[tuple[str, ...], _Window] = {}
        self._unauthenticated: dict[tuple[str, ...], _Window] = {}

    def admit(self, entry: AuditEntry) -> bool:
        """Returns whether to write this entry; otherwise it is counted for the summary."""
        actor, is_below_total = entry.actor, True
        if actor.role in _AUTHENTICATED_ROLES:
            windows, caller, most = self._authenticated, actor.name, MAX_KINDS
        else:
            windows, caller = self._unauthenticated, rate_limit_key(actor.remote)
            most = MAX_UNAUTHENTICATED_KINDS
            is_below_total = sum(w.written for w in windows.values()) < MAX_FULL_UNAUTHENTICATED
        kind: tuple[str, ...] = (caller, actor.role, entry.action, entry.code)
        if kind not in windows and len(windows) >= most:
            kind = ()  # all other kinds together
        window = windows.setdefault(kind, _Window(entry.at + THROTTLE_WINDOW))
        window.last = entry
        is_written = is_below_total and window.written < MAX_FULL_ENTRIES
        window.written += is_written
        window.counted += not is_written
        return is_written

    def pop_summaries(self, now: datetime, *, is_stopping: bool = False) -> list[AuditEntry]:
        """Returns a summary entry for each kind whose window has ended, or for all at shutdown."""
        ended = [
            windows.pop(kind)
            for windows in (self._authenticated, self._unauthenticated)
            for kind in [kind for kind, w in windows.items() if is_stopping or w.until <= now]
        ]
        seconds = THROTTLE_WINDOW.seconds
        return [
            replace(
                last,
                at=now,
                message=f"{w.counted} more within {seconds} s, the last: {last.message}",
            )
            for w in ended
            if w.counted and (last := w.last) is not None
        ]
