"""What a group of changes leaves behind, worked out before any store writes: pure, and the same for all.

Every store folds a commit through here, so that they agree on which change of a record wins and on how
long finished reservations stay in the archive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from kubelend.core.errors import StoreFailed
from kubelend.core.events import Archived, Change, Cut, Dropped, Erased, Kind
from kubelend.core.journal import Entry
from kubelend.core.limits import Limits
from kubelend.core.members import Member, Token
from kubelend.core.models import Cluster, ClusterId, Reservation, ReservationId

ARCHIVE_FOR = timedelta(days=30)
"""How long a finished reservation can still be looked up; counted from one finish to another."""

Document = Member | Token | Limits
"""Records of which there are few: stores keep them side by side."""

KINDS: dict[type[Document], Kind] = {Member: "member", Token: "token", Limits: "limits"}

BEGINNING = datetime.min.replace(tzinfo=UTC)


class Batch(NamedTuple):
    """The last change of each record."""

    clusters: dict[ClusterId, Cluster | None]
    """None for one that exists no more."""
    reservations: dict[ReservationId, Reservation]
    archived: list[ReservationId]
    """Which to move to the archive, after `reservations` are written: they may be among them."""
    documents: dict[tuple[Kind, str], Document | None]
    """None for one that exists no more."""
    entries: list[Entry]
    """What the journal is to tell, in this order."""
    cut: int
    """Up to which line the journal is to be forgotten; 0 for none."""


def fold(changes: Sequence[Change]) -> Batch:
    """Later changes win; a record that is archived keeps what was last said of it."""
    clusters: dict[ClusterId, Cluster | None] = {}
    reservations: dict[ReservationId, Reservation] = {}
    archived: dict[ReservationId, None] = {}
    documents: dict[tuple[Kind, str], Document | None] = {}
    entries: list[Entry] = []
    cut = 0
    for change in changes:
        match change:
            case Entry():
                entries.append(change)
            case Reservation():
                reservations[change.id] = change
                archived.pop(change.id, None)
            case Cluster():
                clusters[change.id] = change
            case Dropped():
                clusters[change.cluster] = None
            case Archived():
                archived[change.reservation] = None
            case Cut():
                cut = max(cut, change.line)
            case Erased():
                documents[change.kind, change.id] = None
            case _:
                documents[KINDS[type(change)], change.id] = change
    return Batch(clusters, reservations, list(archived), documents, entries, cut)


def sorted_out(records: Iterable[Document]) -> tuple[list[Member], list[Token], list[Limits]]:
    """Documents by their kinds, in the order of `Records`."""
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


def finish(reservation: ReservationId, found: Reservation | None) -> datetime:
    """When a reservation that is to be archived has finished. Others cannot be: that is refused."""
    if found is None:
        raise StoreFailed(f"the store has no reservation {reservation!r} to archive")
    if found.finished_at is None:
        raise StoreFailed(f"reservation {reservation!r} is {found.phase} and cannot be archived")
    return found.finished_at


def kept_from(finishes: Iterable[datetime], archive_for: timedelta) -> datetime:
    """The archive keeps what finished at this moment or later, judged by those who join it now.

    By records and not by a clock, so that equal commits leave equal stores.
    """
    try:
        return max(finishes) - archive_for
    except OverflowError:
        return BEGINNING


def check_order(stored: int, revision: int) -> None:
    """Refuse a commit from a ledger that is behind the store: somebody else has written since."""
    if revision < stored:
        raise StoreFailed(
            f"the store is at revision {stored}, and this change at {revision}",
            hint="load the store again",
        )
