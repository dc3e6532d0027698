"""Encodes a group of changes as SQL rows before the first is written. Pure."""

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
"""Limits of a small group, which SQLite writes within one or two milliseconds."""


class Position(NamedTuple):
    """The state of the file that the next group builds on."""

    revision: int
    end: Head
    """Of the audit log."""
    numbering: Numbering


class Writing(NamedTuple):
    """One encoded group, and the position after it."""

    batch: Batch
    revision: int
    end: Head
    numbers: dict[ReservationId, int]
    """Row numbers of the batch's reservations."""
    clusters: list[tuple[str, int, bytes]]
    reservations: list[tuple[int, str, str, int, bytes]]
    lines: list[Line]

    @property
    def is_small(self) -> bool:
        """Whether it has only frequent kinds of changes, not many, and none that needs a read."""
        others = self.batch.archived or self.batch.documents or self.batch.cut
        texts = chain((row[-1] for row in self.clusters), (row[-1] for row in self.reservations))
        size = sum(map(len, texts)) + sum(len(line.text) for line in self.lines)
        return not others and size <= MOST_BYTES


def encode(batch: Batch, revision: int, position: Position) -> Writing:
    """Fails on a record that cannot be stored, and on a group that is behind the file."""
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
