"""Folds a group of changes into one write batch, and encodes records as JSON with a checksum. Pure.

All stores use it, so that they agree on which change of a record wins and on how long finished reservations
stay in the archive.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from math import isfinite
from typing import NamedTuple, TypeVar
from zlib import crc32

import msgspec

from kubelend.core import audit_log
from kubelend.core.audit_log import AuditEntry, AuditLine, ChainHead
from kubelend.core.errors import StoreFailed
from kubelend.core.events import (
    Archived,
    AuditLogCopied,
    AuditLogTruncated,
    Change,
    ClusterDeleted,
    DocumentKind,
    RecordDeleted,
)
from kubelend.core.members import Member, Token
from kubelend.core.models import Cluster, ClusterId, Limits, Reservation, ReservationId

ARCHIVE_FOR = timedelta(days=30)
"""How long a finished reservation stays in the archive, measured between finish times."""

Document = Member | Token | Limits
"""Kinds of records with few instances: stores keep them in one place."""

DOCUMENT_KINDS: dict[type[Document], DocumentKind] = {
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
    documents: dict[tuple[DocumentKind, str], Document | None]
    """None for a deleted record."""
    audit_records: list[AuditEntry]
    """Audit records to append, in this order."""
    truncate_to: int
    """Last line of the audit log to truncate; 0 for none."""
    copied_log: AuditLogCopied | None = None
    """The audit log of another store."""

    def chained_lines(self, end: ChainHead) -> list[AuditLine]:
        """The lines to append after this end of the audit log."""
        if self.copied_log is None:
            return audit_log.chain_entries(self.audit_records, end)
        if end != audit_log.CHAIN_START:
            raise StoreFailed("an audit log can only be copied into an empty store")
        lines = [*self.copied_log.lines]
        last = lines[-1].head if lines else self.copied_log.start
        return [*lines, *audit_log.chain_entries(self.audit_records, last)]


def fold(changes: Sequence[Change]) -> WriteBatch:
    """Later changes win; an archived record keeps its last change."""
    clusters: dict[ClusterId, Cluster | None] = {}
    reservations: dict[ReservationId, Reservation] = {}
    archived: dict[ReservationId, None] = {}
    documents: dict[tuple[DocumentKind, str], Document | None] = {}
    entries: list[AuditEntry] = []
    cut, copied_log = 0, None
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
            case AuditLogCopied():
                copied_log = change
            case RecordDeleted():
                documents[change.kind, change.id] = None
            case _:
                documents[DOCUMENT_KINDS[type(change)], change.id] = change
    return WriteBatch(clusters, reservations, list(archived), documents, entries, cut, copied_log)


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


AnyRecord = Cluster | Reservation | Member | Token | Limits
RecordType = TypeVar("RecordType", Cluster, Reservation, Member, Token, Limits)

CLUSTER_DECODER = msgspec.json.Decoder(Cluster)
RESERVATION_DECODER = msgspec.json.Decoder(Reservation)
MEMBER_DECODER = msgspec.json.Decoder(Member)
TOKEN_DECODER = msgspec.json.Decoder(Token)
LIMITS_DECODER = msgspec.json.Decoder(Limits)

_encoder = msgspec.json.Encoder()


class CorruptRecord(Exception):
    """A row is not what was written. Its text is a part of a sentence: what is wrong, and where."""


def encode_record(record: AnyRecord) -> tuple[str, int, bytes]:
    """A record's ID, checksum and JSON text."""
    try:
        text = _encoder.encode(_checked(record))
        return record.id, record_checksum(record.id.encode(), text), text
    except ValueError as error:
        raise StoreFailed(f"record {record.id!r} cannot be stored: {error}") from error


def decode_record(
    decoder: msgspec.json.Decoder[RecordType], row: tuple[bytes, int, bytes]
) -> RecordType:
    """The inverse of `encode_record`, from a row with its ID as bytes."""
    name, expected, text = row
    try:
        if record_checksum(name, text) == expected:
            return decoder.decode(text)
    except (msgspec.DecodeError, TypeError) as error:
        raise CorruptRecord(f"record {_display_id(name)} cannot be decoded: {error}") from error
    raise CorruptRecord(f"record {_display_id(name)} does not match its checksum")


def record_key(id: str) -> bytes:
    """An ID for a query. One with surrogates is never stored, and so never found."""
    return id.encode(errors="surrogatepass")


def record_checksum(id: bytes, text: bytes) -> int:
    """Over both, so that a record cannot appear under another ID."""
    return crc32(text, crc32(id))


def _checked(record: AnyRecord) -> AnyRecord:
    """JSON has no NaN and infinity: they would be encoded as null, which does not decode to a number."""
    if isinstance(record, Reservation):
        weights = record.request.weights
        if weights and not all(map(isfinite, weights.values())):
            raise ValueError("a weight is not a finite number")
    return record


def _display_id(name: bytes | None) -> str:
    return repr(name and name.decode(errors="replace"))
