"""The head of the Kubernetes store: one object, and every commit is one conditional write of it. Pure.

It says where the store stands, holds the journal's newest lines, and holds what the last commit changed until
the objects say so too. What does not fit into one object is put into others first, which the head names:
they count for nothing before it does.
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
"""Bytes of text in one object, with what quoting adds: etcd takes 1.5 MB, with all that is around it."""

NO_RECORD: Final = msgspec.Raw(b"null")


class Write(msgspec.Struct, frozen=True, array_like=True):
    """What a commit has made of one record."""

    kind: RecordKind
    id: str
    record: msgspec.Raw = NO_RECORD
    """Its text; without one it exists no more, or is only moved to the archive."""
    finished_at: datetime | None = None
    """Set if it belongs to the archive from now on."""
    was_there: bool = False
    """Whether its object was seen before the commit; if so, and it is over and gone, somebody deleted it."""

    @property
    def text(self) -> bytes:
        """Empty for none."""
        return b"" if self.record == NO_RECORD else bytes(self.record)

    @property
    def is_archived(self) -> bool:
        return self.finished_at is not None


class Sealed(msgspec.Struct, frozen=True, array_like=True):
    """A line of the journal. Its text is JSON, and kept byte by byte."""

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
    """An end of the journal."""

    number: int = 0
    digest: str = journal.START.digest.hex()

    @classmethod
    def of(cls, head: Head) -> Mark:
        return cls(head.number, head.digest.hex())

    @property
    def head(self) -> Head:
        return Head(self.number, bytes.fromhex(self.digest))


class Changes(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the last commit changed: to be found in the objects, or put there by whoever loads them."""

    writes: tuple[Write, ...] = ()
    lines: tuple[Sealed, ...] = ()
    """To be moved from the head to objects of the journal."""


NO_CHANGES: Final = Changes()


class State(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the head says."""

    epoch: int = 0
    """Counts who has opened the store to write: none but the last can."""
    writer: str = ""
    """Who that is, by a name made up for it: no two heads of different writers are equal."""
    sequence: int = 0
    """Counts commits; of two copies of a record, the one with the larger is the newer."""
    revision: int = 0
    """The ledger's."""
    start: Mark = Mark()
    end: Mark = Mark()
    lines: tuple[Sealed, ...] = ()
    """The journal's newest, without a gap up to its end."""
    cut_from: int = 0
    """Where the journal began before the last commit."""
    kept_from: datetime | None = None
    """What finished before is not in the archive any more."""
    swept_until: datetime | None = None
    """Of what finished before, nothing is left to delete."""
    key: str = ""
    """What seals are made with."""
    unfinished: str = ""
    """The digest of the roll of reservations that are not over; empty if it is not known."""
    changes: Changes = NO_CHANGES
    elsewhere: tuple[str, ...] = ()
    """Names of the objects that have the changes, if they are too many."""


class Packed(NamedTuple):
    """A state as objects keep it: the parts have to be written before the head."""

    state: State
    """As the head will say it."""
    parts: list[LedgerRecord]


def pack(state: State, namespace: str, label: str) -> Packed:
    """Take out of the head what does not fit. No two attempts may give the same label."""
    if _quoted(_encode(state)) <= ROOM:
        return Packed(state, [])
    parts = [
        _object(f"pending-{label}-{number}", "pending", namespace, _encode(part), state.sequence)
        for number, part in enumerate(_portions(state.changes))
    ]
    names = tuple(part.metadata.name for part in parts)
    return Packed(replace(state, changes=NO_CHANGES, elsewhere=names), parts)


def head(state: State, namespace: str, resource_version: str = "") -> LedgerRecord:
    """The object of this state, to be written over the one of that version."""
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
    """An object that holds these lines for good."""
    name = journal_name(lines[0].number)
    return _object(name, "journal", namespace, _encode(lines), sequence)


def journal_name(first: int) -> str:
    return f"journal-{first}"


def lines_of(found: LedgerRecord) -> list[Sealed]:
    return _decoded(_LINES, found)


def size(lines: Iterable[Sealed]) -> int:
    """About as much as they take in an object."""
    return sum(_quoted(bytes(line.text)) + _AROUND for line in lines)


def split(lines: Iterable[Sealed]) -> Iterator[list[Sealed]]:
    """As many as one object takes at a time; a single one is never split."""
    yield from _grouped(lines, lambda line: size([line]))


_AROUND: Final = 100
"""Bytes of a line's number and digest, and the commas."""

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
    """The length of a text as a string inside JSON."""
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
    """What an object says. `Damaged` if somebody else has written it."""
    text = found.record.data.encode()
    if _checksum(found.metadata.name, text) != found.record.checksum:
        raise Damaged(f"LedgerRecord {found.key} does not have its checksum")
    try:
        return decoder.decode(text)
    except msgspec.MsgspecError as error:
        raise Damaged(f"LedgerRecord {found.key} cannot be read: {error}") from error


def _checksum(name: str, text: bytes) -> str:
    """Against accidents: the key to seal with is in the head, and nobody else may write what is beside it."""
    return f"{records.checksum(name.encode(), text):08x}"
