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
from kubelend.core.journal import Head, Line
from kubelend.stores import kube_objects, records
from kubelend.stores.kube_objects import RecordKind
from kubelend.stores.records import Damaged
from kubelend.wire.broker_objects import Kept, LedgerRecord
from kubelend.wire.objects import Metadata

ROOM: Final = 800_000
"""Bytes of text in one object, including JSON escapes: etcd's limit is 1.5 MB for the whole object."""

NO_RECORD: Final = msgspec.Raw(b"null")


class Write(msgspec.Struct, frozen=True, array_like=True):
    """The change of one record in a commit."""

    kind: RecordKind
    id: str
    record: msgspec.Raw = NO_RECORD
    """Its JSON text; empty if the record is deleted, or only archived."""
    finished_at: datetime | None = None
    """Set if it is archived from now on."""
    was_there: bool = False
    """Whether its object existed before the commit; if a finished one is missing then, a user deleted it."""

    @property
    def text(self) -> bytes:
        """Empty for none."""
        return b"" if self.record == NO_RECORD else bytes(self.record)

    @property
    def is_archived(self) -> bool:
        return self.finished_at is not None


class Sealed(msgspec.Struct, frozen=True, array_like=True):
    """A line of the audit log. Its text is JSON, preserved byte by byte."""

    number: int
    text: msgspec.Raw
    digest: str

    @classmethod
    def of(cls, line: Line) -> Sealed:
        return cls(line.number, msgspec.Raw(line.text), line.digest.hex())

    @property
    def line(self) -> Line:
        return Line(self.number, bytes(self.text), bytes.fromhex(self.digest))


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """A start or end of the audit log."""

    number: int = 0
    digest: str = journal.START.digest.hex()

    @classmethod
    def of(cls, head: Head) -> Mark:
        return cls(head.number, head.digest.hex())

    @property
    def head(self) -> Head:
        return Head(self.number, bytes.fromhex(self.digest))


class Changes(msgspec.Struct, frozen=True, omit_defaults=True):
    """The changes of the last commit, until they are in the objects."""

    writes: tuple[Write, ...] = ()
    lines: tuple[Sealed, ...] = ()
    """To be moved from the head to segments of the audit log."""


NO_CHANGES: Final = Changes()


class State(msgspec.Struct, frozen=True, omit_defaults=True):
    """The contents of the head."""

    epoch: int = 0
    """Counts openings for writing: only the last one can write."""
    writer: str = ""
    """Random ID of the writer, so that the heads of two writers are never equal."""
    sequence: int = 0
    """Counts commits; of two versions of a record, the larger is the newer."""
    revision: int = 0
    """The ledger's revision."""
    start: Mark = Mark()
    end: Mark = Mark()
    lines: tuple[Sealed, ...] = ()
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
    changes: Changes = NO_CHANGES
    elsewhere: tuple[str, ...] = ()
    """Names of the objects with the changes, if they do not fit into the head."""


class Packed(NamedTuple):
    """A state split into objects: the parts are written before the head."""

    state: State
    """The contents of the head."""
    parts: list[LedgerRecord]


def pack(state: State, namespace: str, label: str) -> Packed:
    """Move what does not fit into other objects. Each attempt needs a label of its own."""
    if _quoted(_encode(state)) <= ROOM:
        return Packed(state, [])
    parts = [
        _object(f"pending-{label}-{number}", "pending", namespace, _encode(part), state.sequence)
        for number, part in enumerate(_portions(state.changes))
    ]
    names = tuple(part.metadata.name for part in parts)
    return Packed(replace(state, changes=NO_CHANGES, elsewhere=names), parts)


def head(state: State, namespace: str, resource_version: str = "") -> LedgerRecord:
    """The object for this state, replacing the one of this version."""
    found = _object(kube_objects.HEAD, kube_objects.HEAD, namespace, _encode(state), state.sequence)
    return replace(found, metadata=replace(found.metadata, resource_version=resource_version))


def state_of(found: LedgerRecord) -> State:
    return _decoded(_STATES, found)


def changes_of(parts: Iterable[LedgerRecord]) -> Changes:
    read = [_decoded(_CHANGES, part) for part in parts]
    return Changes(
        tuple(write for part in read for write in part.writes),
        tuple(line for part in read for line in part.lines),
    )


def journal_part(lines: Sequence[Sealed], namespace: str, sequence: int) -> LedgerRecord:
    """A segment of the audit log: an object with these lines, which never changes."""
    name = journal_name(lines[0].number)
    return _object(name, "audit-log", namespace, _encode(lines), sequence)


def journal_name(first: int) -> str:
    return f"audit-log-{first}"


def lines_of(found: LedgerRecord) -> list[Sealed]:
    return _decoded(_LINES, found)


def size(lines: Iterable[Sealed]) -> int:
    """Approximate size in an object."""
    return sum(_quoted(bytes(line.text)) + _AROUND for line in lines)


def split(lines: Iterable[Sealed]) -> Iterator[list[Sealed]]:
    """Groups that fit into one object; a single line is never split."""
    yield from _grouped(lines, lambda line: size([line]))


_AROUND: Final = 100
"""Bytes of a line's number, digest and separators."""

_encode = msgspec.json.Encoder().encode
_STATES: Final = msgspec.json.Decoder(State)
_CHANGES: Final = msgspec.json.Decoder(Changes)
_LINES: Final = msgspec.json.Decoder(list[Sealed])


def _portions(changes: Changes) -> Iterator[Changes]:
    for writes in _grouped(changes.writes, lambda write: _quoted(_encode(write)) + 1):
        yield Changes(tuple(writes))
    for lines in split(changes.lines):
        yield Changes(lines=tuple(lines))


def _quoted(text: bytes) -> int:
    """The length of a text as a JSON string."""
    return len(text) + text.count(b'"') + text.count(b"\\")


Item = TypeVar("Item")
Read = TypeVar("Read")


def _grouped(items: Iterable[Item], weigh: Callable[[Item], int]) -> Iterator[list[Item]]:
    group: list[Item] = []
    weight = 0
    for item in items:
        own = weigh(item)
        if group and weight + own > ROOM:
            yield group
            group, weight = [], 0
        group.append(item)
        weight += own
    if group:
        yield group


def _object(name: str, holds: str, namespace: str, text: bytes, sequence: int) -> LedgerRecord:
    metadata = Metadata(name, namespace, labels=kube_objects.labels_of(holds))
    return LedgerRecord(metadata, holds, Kept(sequence, _checksum(name, text), text.decode()))


def _decoded(decoder: msgspec.json.Decoder[Read], found: LedgerRecord) -> Read:
    """`CorruptRecord` if another writer has modified the object."""
    text = found.record.data.encode()
    if _checksum(found.metadata.name, text) != found.record.checksum:
        raise Damaged(f"LedgerRecord {found.key} does not match its checksum")
    try:
        return decoder.decode(text)
    except msgspec.MsgspecError as error:
        raise Damaged(f"LedgerRecord {found.key} cannot be decoded: {error}") from error


def _checksum(name: str, text: bytes) -> str:
    """Detects accidents only: the key of the signatures is in the head, which only the broker may write."""
    return f"{records.checksum(name.encode(), text):08x}"
