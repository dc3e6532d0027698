"""Encodes a group of changes as SQL rows before the first is written. Pure."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

from kubelend.core import journal
from kubelend.core.journal import AuditLine, ChainHead
from kubelend.core.models import ReservationId
from kubelend.stores import batches, records
from kubelend.stores.batches import WriteBatch
from kubelend.stores.numbering import RowIds

SMALL_COMMIT_CHANGES = 128
SMALL_COMMIT_BYTES = 2**17
"""Limits of a small group, which SQLite writes within one or two milliseconds."""


class FilePosition(NamedTuple):
    """The state of the file that the next group builds on."""

    revision: int
    end: ChainHead
    """Of the audit log."""
    row_ids: RowIds


class PreparedCommit(NamedTuple):
    """One encoded group, and the position after it."""

    batch: WriteBatch
    revision: int
    end: ChainHead
    row_ids: dict[ReservationId, int]
    """Row numbers of the batch's reservations."""
    clusters: list[tuple[str, int, bytes]]
    reservations: list[tuple[int, str, str, int, bytes]]
    lines: list[AuditLine]

    @property
    def is_small(self) -> bool:
        """Whether it has only frequent kinds of changes, not many, and none that needs a read."""
        others = self.batch.archived or self.batch.documents or self.batch.truncate_to
        texts = chain((row[-1] for row in self.clusters), (row[-1] for row in self.reservations))
        size = sum(map(len, texts)) + sum(len(line.text) for line in self.lines)
        return not others and size <= SMALL_COMMIT_BYTES


def prepare_commit(batch: WriteBatch, revision: int, position: FilePosition) -> PreparedCommit:
    """Fails on a record that cannot be stored, and on a group that is behind the file."""
    batches.check_revision(position.revision, revision)
    numbers = position.row_ids.assign(batch.reservations)
    reservations = [
        (numbers[found.id], found.phase.value, *records.encode_record(found))
        for found in batch.reservations.values()
    ]
    clusters = [records.encode_record(found) for found in batch.clusters.values() if found]
    lines = journal.chain_entries(batch.audit_records, position.end)
    end = lines[-1].head if lines else position.end
    return PreparedCommit(batch, revision, end, numbers, clusters, reservations, lines)
