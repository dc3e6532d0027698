"""A group of changes as rows of SQL, worked out before the first is written: pure."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

from kubelend.core import journal
from kubelend.core.journal import Head, Line
from kubelend.core.models import ReservationId
from kubelend.stores import batches, records
from kubelend.stores.batches import Batch
from kubelend.stores.numbering import Numbering

MOST_CHANGES = 128
MOST_BYTES = 2**17
"""Of a small group, which SQLite takes in within a millisecond or two."""


class Position(NamedTuple):
    """What a file holds, as far as the next group builds on it."""

    revision: int
    end: Head
    """Of the journal."""
    numbering: Numbering


class Writing(NamedTuple):
    """One group, and where the file stands behind it."""

    batch: Batch
    revision: int
    end: Head
    numbers: dict[ReservationId, int]
    """Of the rows of the batch's reservations."""
    clusters: list[tuple[str, int, bytes]]
    reservations: list[tuple[int, str, str, int, bytes]]
    lines: list[Line]

    @property
    def is_small(self) -> bool:
        """Whether it has only what comes all day, and not much of it: nothing for which one has to read."""
        others = self.batch.archived or self.batch.documents or self.batch.cut
        texts = chain((row[-1] for row in self.clusters), (row[-1] for row in self.reservations))
        size = sum(map(len, texts)) + sum(len(line.text) for line in self.lines)
        return not others and size <= MOST_BYTES


def encode(batch: Batch, revision: int, position: Position) -> Writing:
    """Fails on a record that cannot be kept, and on a group from behind the file."""
    batches.check_order(position.revision, revision)
    numbers = position.numbering.with_new(batch.reservations)
    reservations = [
        (numbers[found.id], found.phase.value, *records.encode(found))
        for found in batch.reservations.values()
    ]
    clusters = [records.encode(found) for found in batch.clusters.values() if found]
    lines = journal.seal(batch.entries, position.end)
    end = lines[-1].head if lines else position.end
    return Writing(batch, revision, end, numbers, clusters, reservations, lines)
