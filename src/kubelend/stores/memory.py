"""A store in memory: for tests, and for brokers without persistent state."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from heapq import heappop, heappush
from typing import TypeVar

from kubelend.core import audit_log
from kubelend.core.audit_log import AuditLine, ChainHead
from kubelend.core.events import Change, DocumentKind, StoreLag, WorkingSet
from kubelend.core.models import Cluster, ClusterId, Reservation, ReservationId
from kubelend.stores import batch as stores_batch
from kubelend.stores.batch import Document, WriteBatch

Key = TypeVar("Key")
Record = TypeVar("Record")


class MemoryStore:
    """Holds records until the process ends."""

    def __init__(self, *, archive_for: timedelta = stores_batch.ARCHIVE_FOR) -> None:
        self._archive_for = archive_for
        self._clusters: dict[ClusterId, Cluster] = {}
        self._reservations: dict[ReservationId, Reservation] = {}
        self._archive: dict[ReservationId, Reservation] = {}
        self._finish_times: list[tuple[datetime, ReservationId]] = []
        self._documents: dict[tuple[DocumentKind, str], Document] = {}
        self._lines: list[AuditLine] = []
        self._start = audit_log.CHAIN_START
        self._revision = 0

    def load(self) -> WorkingSet:
        return WorkingSet(
            list(self._clusters.values()),
            list(self._reservations.values()),
            self._revision,
            *stores_batch.documents_by_kind(self._documents.values()),
        )

    def commit(self, changes: Sequence[Change], revision: int) -> None:
        batch = stores_batch.fold(changes)
        finish_times = self._check(batch, revision)
        self._revision = revision
        _put(self._clusters, batch.clusters)
        self._reservations.update(batch.reservations)
        _put(self._documents, batch.documents)
        self._append_audit_records(batch)
        for finished in finish_times:
            self._archive[finished[1]] = self._reservations.pop(finished[1])
            heappush(self._finish_times, finished)
        self._evict_expired([at for at, _ in finish_times])

    def prepare(self, changes: Sequence[Change], revision: int) -> Callable[[], None]:
        return partial(self.commit, changes, revision)

    def archived(self, reservation: ReservationId) -> Reservation | None:
        return self._archive.get(reservation)

    def archive(self) -> list[Reservation]:
        return list(self._archive.values())

    def audit_lines(self, after: int, limit: int) -> list[AuditLine]:
        first = max(0, after - self._start.number)
        return self._lines[first : first + limit]

    def audit_log_bounds(self) -> tuple[ChainHead, ChainHead]:
        end = self._lines[-1].head if self._lines else self._start
        return self._start, end

    def check_fencing(self) -> None:
        """No other writer exists."""

    def lag(self) -> StoreLag:
        """Nothing else shows what is committed."""
        return StoreLag()

    def close(self) -> None:
        """Nothing to release."""

    def _check(self, batch: WriteBatch, revision: int) -> list[tuple[datetime, ReservationId]]:
        """Reject before the first change, because there is no rollback; returns who is archived."""
        stores_batch.check_revision(self._revision, revision)
        latest = ChainMap(batch.reservations, self._reservations)
        return [(stores_batch.finish_time(one, latest.get(one)), one) for one in batch.archived]

    def _append_audit_records(self, batch: WriteBatch) -> None:
        self._lines += batch.chained_lines(self.audit_log_bounds()[1])
        if batch.copied_log is not None:
            self._start = batch.copied_log.start
        deleted = batch.truncate_to - self._start.number
        if 0 < deleted <= len(self._lines):
            self._start = self._lines[deleted - 1].head
            del self._lines[:deleted]

    def _evict_expired(self, joining: list[datetime]) -> None:
        if not joining:
            return
        retention_limit = stores_batch.compute_retention_limit(joining, self._archive_for)
        while self._finish_times[0][0] < retention_limit:
            finished_at, deleted = heappop(self._finish_times)
            if self._archive[deleted].finished_at == finished_at:
                del self._archive[deleted]


def _put(records: dict[Key, Record], changed: Mapping[Key, Record | None]) -> None:
    for key, record in changed.items():
        if record is None:
            records.pop(key, None)
        else:
            records[key] = record
