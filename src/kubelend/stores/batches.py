"""Folds a group of changes into one write batch, and encodes records as JSON with a checksum. Pure.

All stores use it, so that they agree on which change of a record wins and on how long finished reservations
stay in the archive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from kubelend.core.errors import StoreFailed
from kubelend.core.events import (
    Archived,
    AuditLogTruncated,
    Change,
    ClusterDeleted,
    RecordDeleted,
    RecordKind,
)
from kubelend.core.journal import AuditEntry
from kubelend.core.limits import Limits
from kubelend.core.members import Member, Token
from kubelend.core.models import Cluster, ClusterId, Reservation, ReservationId

ARCHIVE_FOR = timedelta(days=30)
"""How long a finished reservation stays in the archive, measured between finish times."""

Document = Member | Token | Limits
"""Kinds of records with few instances: stores keep them in one place."""

DOCUMENT_KINDS: dict[type[Document], RecordKind] = {
    Member: "member",
    Token: "token",
    Limits: "limits",
}

MIN_TIME = datetime.min.replace(tzinfo=UTC)


class WriteBatch(NamedTuple):
    """The last change of each record."""

    clusters: dict[ClusterId, Cluster | None]
    """None for a deleted cluster."""
    reservations: dict[ReservationId, Reservation]
    archived: list[ReservationId]
    """Reservations to archive, after `reservations` are written: they may be among them."""
    documents: dict[tuple[RecordKind, str], Document | None]
    """None for a deleted record."""
    audit_records: list[AuditEntry]
    """Audit records to append, in this order."""
    truncate_to: int
    """Last line of the audit log to truncate; 0 for none."""


def fold(changes: Sequence[Change]) -> WriteBatch:
    """Later changes win; an archived record keeps its last change."""
    clusters: dict[ClusterId, Cluster | None] = {}
    reservations: dict[ReservationId, Reservation] = {}
    archived: dict[ReservationId, None] = {}
    documents: dict[tuple[RecordKind, str], Document | None] = {}
    entries: list[AuditEntry] = []
    cut = 0
    for change in changes:
        match change:
            case AuditEntry():
                entries.append(change)
            case Reservation():
                reservations[change.id] = change
                archived.pop(change.id, None)
            case Cluster():
                clusters[change.id] = change
            case ClusterDeleted():
                clusters[change.cluster] = None
            case Archived():
                archived[change.reservation] = None
            case AuditLogTruncated():
                cut = max(cut, change.line)
            case RecordDeleted():
                documents[change.kind, change.id] = None
            case _:
                documents[DOCUMENT_KINDS[type(change)], change.id] = change
    return WriteBatch(clusters, reservations, list(archived), documents, entries, cut)


def documents_by_kind(
    records: Iterable[Document],
) -> tuple[list[Member], list[Token], list[Limits]]:
    """Documents by kind, in the order of `WorkingSet`."""
    members: list[Member] = []
    tokens: list[Token] = []
    limits: list[Limits] = []
    for record in records:
        match record:
            case Member():
                members.append(record)
            case Token():
                tokens.append(record)
            case Limits():
                limits.append(record)
    return members, tokens, limits


def finish_time(reservation: ReservationId, found: Reservation | None) -> datetime:
    """When a reservation to be archived has finished. `StoreFailed` if it has not."""
    if found is None:
        raise StoreFailed(f"the store has no reservation {reservation!r} to archive")
    if found.finished_at is None:
        raise StoreFailed(f"reservation {reservation!r} is {found.phase} and cannot be archived")
    return found.finished_at


def compute_retention_limit(finish_times: Iterable[datetime], archive_for: timedelta) -> datetime:
    """Oldest finish time that stays in the archive, given the finish times of those archived now.

    By records and not by a clock, so that equal commits leave equal stores.
    """
    try:
        return max(finish_times) - archive_for
    except OverflowError:
        return MIN_TIME


def check_revision(stored: int, revision: int) -> None:
    """Reject a commit from a ledger that is behind the store: another broker has written since."""
    if revision < stored:
        raise StoreFailed(
            f"the store is at revision {stored}, but this commit at {revision}",
            hint="reload the store",
        )
