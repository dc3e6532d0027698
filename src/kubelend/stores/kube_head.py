"""The head of the Kubernetes store: one object, of which every conditional write is a commit.

It has the store's position, the newest lines of the audit log, and the changes of the last commit until they
are in the objects. What does not fit into one object is written into others before, which the head names:
they are ignored unless it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Final, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from kubelend.core import journal
from kubelend.core.journal import AuditLine, ChainHead
from kubelend.stores import kube_objects, records
from kubelend.stores.kube_objects import RecordKind
from kubelend.stores.records import CorruptRecord
from kubelend.wire.broker_objects import LedgerRecord, StoredRecord
from kubelend.wire.objects import Metadata

MAX_OBJECT_BYTES: Final = 800_000
"""Bytes of text in one object, including JSON escapes: etcd's limit is 1.5 MB for the whole object."""

NO_JSON: Final = msgspec.Raw(b"null")


class RecordWrite(msgspec.Struct, frozen=True, array_like=True):
    """The change of one record in a commit."""

    kind: RecordKind
    id: str
    record: msgspec.Raw = NO_JSON
    """Its JSON text; empty if the record is deleted, or only archived."""
    finished_at: datetime | None = None
    """Set if it is archived from now on."""
    existed_before: bool = False
    """Whether its object existed before the commit; if a finished one is missing then, a user deleted it."""

    @property
    def text(self) -> bytes:
        """Empty for none."""
        return b"" if self.record == NO_JSON else bytes(self.record)

    @property
    def is_archived(self) -> bool:
        return self.finished_at is not None


class ChainedLine(msgspec.Struct, frozen=True, array_like=True):
    """A line of the audit log. Its text is JSON, preserved byte by byte."""

    number: int
    text: msgspec.Raw
    digest: str

    @classmethod
    def of(cls, line: AuditLine) -> ChainedLine:
        return cls(line.number, msgspec.Raw(line.text), line.digest.hex())

    @property
    def line(self) -> AuditLine:
        return AuditLine(self.number, bytes(self.text), bytes.fromhex(self.digest))


class AuditPosition(msgspec.Struct, frozen=True, array_like=True):
    """A start or end of the audit log."""

    number: int = 0
    digest: str = journal.CHAIN_START.digest.hex()

    @classmethod
    def of(cls, head: ChainHead) -> AuditPosition:
        return cls(head.number, head.digest.hex())

    @property
    def head(self) -> ChainHead:
        return ChainHead(self.number, bytes.fromhex(self.digest))


class CommitChanges(msgspec.Struct, frozen=True, omit_defaults=True):
    """The changes of the last commit, until they are in the objects."""

    writes: tuple[RecordWrite, ...] = ()
    lines: tuple[ChainedLine, ...] = ()
    """To be moved from the head to segments of the audit log."""


NO_CHANGES: Final = CommitChanges()


class HeadState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The contents of the head."""

    epoch: int = 0
    """Counts openings for writing: only the last one can write."""
    writer: str = ""
    """Random ID of the writer, so that the heads of two writers are never equal."""
    sequence: int = 0
    """Counts commits; of two versions of a record, the larger is the newer."""
    revision: int = 0
    """The ledger's revision."""
    start: AuditPosition = AuditPosition()
    end: AuditPosition = AuditPosition()
    lines: tuple[ChainedLine, ...] = ()
    """The newest lines of the audit log, without a gap up to its end."""
    cut_from: int = 0
    """Where the audit log began before the last commit."""
    kept_from: datetime | None = None
    """Retention limit: reservations that finished before are not in the archive any more."""
    swept_until: datetime | None = None
    """Objects of reservations that finished before have been deleted."""
    key: str = ""
    """The key of the signatures."""
    unfinished: str = ""
    """Digest of the set of unfinished reservations; empty if unknown."""
    changes: CommitChanges = NO_CHANGES
    elsewhere: tuple[str, ...] = ()
    """Names of the objects with the changes, if they do not fit into the head."""


class SplitState(NamedTuple):
    """A state split into objects: the parts are written before the head."""

    state: HeadState
    """The contents of the head."""
    parts: list[LedgerRecord]


def split_oversized(state: HeadState, namespace: str, label: str) -> SplitState:
    """Move what does not fit into other objects. Each attempt needs a label of its own."""
    if _quoted_size(_encode_contents(state)) <= MAX_OBJECT_BYTES:
        return SplitState(state, [])
    parts = [
        _ledger_record(
            f"pending-{label}-{number}",
            "pending",
            namespace,
            _encode_contents(part),
            state.sequence,
        )
        for number, part in enumerate(_split_changes(state.changes))
    ]
    names = tuple(part.metadata.name for part in parts)
    return SplitState(replace(state, changes=NO_CHANGES, elsewhere=names), parts)


def head_object(state: HeadState, namespace: str, resource_version: str = "") -> LedgerRecord:
    """The object for this state, replacing the one of this version."""
    found = _ledger_record(
        kube_objects.HEAD_NAME,
        kube_objects.HEAD_NAME,
        namespace,
        _encode_contents(state),
        state.sequence,
    )
    return replace(found, metadata=replace(found.metadata, resource_version=resource_version))


def state_from_object(found: LedgerRecord) -> HeadState:
    return _decode_contents(_STATE_DECODER, found)


def changes_from_parts(parts: Iterable[LedgerRecord]) -> CommitChanges:
    read = [_decode_contents(_CHANGES_DECODER, part) for part in parts]
    return CommitChanges(
        tuple(write for part in read for write in part.writes),
        tuple(line for part in read for line in part.lines),
    )


def audit_segment(lines: Sequence[ChainedLine], namespace: str, sequence: int) -> LedgerRecord:
    """A segment of the audit log: an object with these lines, which never changes."""
    name = audit_segment_name(lines[0].number)
    return _ledger_record(name, "audit-log", namespace, _encode_contents(lines), sequence)


def audit_segment_name(first: int) -> str:
    return f"audit-log-{first}"


def lines_from_segment(found: LedgerRecord) -> list[ChainedLine]:
    return _decode_contents(_LINES_DECODER, found)


def lines_size(lines: Iterable[ChainedLine]) -> int:
    """Approximate size in an object."""
    return sum(_quoted_size(bytes(line.text)) + _LINE_OVERHEAD_BYTES for line in lines)


def split_lines(lines: Iterable[ChainedLine]) -> Iterator[list[ChainedLine]]:
    """Groups that fit into one object; a single line is never split."""
    yield from _group_by_size(lines, lambda line: lines_size([line]))


_LINE_OVERHEAD_BYTES: Final = 100
"""Bytes of a line's number, digest and separators."""

_encode_contents = msgspec.json.Encoder().encode
_STATE_DECODER: Final = msgspec.json.Decoder(HeadState)
_CHANGES_DECODER: Final = msgspec.json.Decoder(CommitChanges)
_LINES_DECODER: Final = msgspec.json.Decoder(list[ChainedLine])


def _split_changes(changes: CommitChanges) -> Iterator[CommitChanges]:
    for writes in _group_by_size(
        changes.writes, lambda write: _quoted_size(_encode_contents(write)) + 1
    ):
        yield CommitChanges(tuple(writes))
    for lines in split_lines(changes.lines):
        yield CommitChanges(lines=tuple(lines))


def _quoted_size(text: bytes) -> int:
    """The length of a text as a JSON string."""
    return len(text) + text.count(b'"') + text.count(b"\\")


GroupedItem = TypeVar("GroupedItem")
DecodedContents = TypeVar("DecodedContents")


def _group_by_size(
    items: Iterable[GroupedItem], size_of: Callable[[GroupedItem], int]
) -> Iterator[list[GroupedItem]]:
    group: list[GroupedItem] = []
    weight = 0
    for item in items:
        own = size_of(item)
        if group and weight + own > MAX_OBJECT_BYTES:
            yield group
            group, weight = [], 0
        group.append(item)
        weight += own
    if group:
        yield group


def _ledger_record(
    name: str, contents: str, namespace: str, text: bytes, sequence: int
) -> LedgerRecord:
    metadata = Metadata(name, namespace, labels=kube_objects.ledger_record_labels(contents))
    return LedgerRecord(
        metadata, contents, StoredRecord(sequence, _contents_checksum(name, text), text.decode())
    )


def _decode_contents(
    decoder: msgspec.json.Decoder[DecodedContents], found: LedgerRecord
) -> DecodedContents:
    """`CorruptRecord` if another writer has modified the object."""
    text = found.record.data.encode()
    if _contents_checksum(found.metadata.name, text) != found.record.checksum:
        raise CorruptRecord(f"LedgerRecord {found.key} does not match its checksum")
    try:
        return decoder.decode(text)
    except msgspec.MsgspecError as error:
        raise CorruptRecord(f"LedgerRecord {found.key} cannot be decoded: {error}") from error


def _contents_checksum(name: str, text: bytes) -> str:
    """Detects accidents only: the key of the signatures is in the head, which only the broker may write."""
    return f"{records.record_checksum(name.encode(), text):08x}"
