"""The head of the Kubernetes store: one object, of which every conditional write is a commit.

It has the store's position, the newest lines of the audit log, and the changes of the last commits until they
are in the objects. What does not fit into one object is written into others before, which the head names:
they are ignored unless it does.

Older lines of the audit log are in immutable segments, each named after its first line. Lines are counted in
blocks, and no segment crosses a block boundary: so the first segment of a block is known by name, and each
one leads to the next. Nothing has to list them.
"""

from __future__ import annotations

import asyncio
import base64
import secrets
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import groupby
from typing import Final, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from kubelend.core import audit_log
from kubelend.core.audit_log import AuditLine, ChainHead
from kubelend.core.errors import AlreadyExists, Conflict, Gone, NotFound, StoreFailed, Unavailable
from kubelend.kits import tasks
from kubelend.kube.client import Client
from kubelend.stores import batch
from kubelend.stores.batch import CorruptRecord
from kubelend.stores.kubernetes import objects
from kubelend.stores.kubernetes.objects import (
    CONTENTS_LABEL,
    HEAD_NAME,
    LEDGER_RECORDS,
    STORED_ADVERTISEMENTS,
    STORED_RESERVATIONS,
    RecordKind,
)
from kubelend.wire.broker_objects import LedgerRecord, StoredRecord
from kubelend.wire.objects import Metadata

BLOCK_LINES: Final = 512
"""Lines of the audit log in a block."""
MAX_HEAD_LOG_BYTES: Final = 32_000
"""Bytes of lines in the head, where every commit writes them again."""
LINE_OVERHEAD_BYTES: Final = 100
"""Bytes of a line's number, digest and separators."""
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
    digest: str = audit_log.CHAIN_START.digest.hex()

    @classmethod
    def of(cls, head: ChainHead) -> AuditPosition:
        return cls(head.number, head.digest.hex())

    @property
    def head(self) -> ChainHead:
        return ChainHead(self.number, bytes.fromhex(self.digest))


class CommitChanges(msgspec.Struct, frozen=True, omit_defaults=True):
    """The changes of one commit."""

    sequence: int
    writes: tuple[RecordWrite, ...] = ()
    lines: tuple[ChainedLine, ...] = ()
    """To be moved from the head to segments of the audit log."""


class PackedChanges(msgspec.Struct, frozen=True, array_like=True):
    """The changes of one commit, compressed: each later commit writes them again until objects have them."""

    text: str = ""
    parts: tuple[str, ...] = ()
    """Names of the objects with the text, if it does not fit into the head."""

    @classmethod
    def of(cls, changes: CommitChanges) -> PackedChanges:
        return cls(base64.b64encode(zlib.compress(_encode_contents(changes), 1)).decode())

    def unpack(self) -> CommitChanges:
        return _CHANGES_DECODER.decode(zlib.decompress(base64.b64decode(self.text)))

    @property
    def as_written(self) -> PackedChanges:
        return replace(self, text="") if self.parts else self


class PendingWrite(NamedTuple):
    """The change of a record by its last pending commit."""

    sequence: int
    write: RecordWrite


def pending_writes(commits: Iterable[CommitChanges]) -> list[PendingWrite]:
    """One for each record, however many of these commits have changed it. Oldest commit first."""
    last: dict[tuple[str, str], PendingWrite] = {}
    for commit in commits:
        for write in commit.writes:
            key = write.kind, write.id
            before = last.pop(key, None)
            merged = write if before is None else _merged(before.write, write)
            last[key] = PendingWrite(commit.sequence, merged)
    return [*last.values()]


def _merged(before: RecordWrite, after: RecordWrite) -> RecordWrite:
    """A record that is only archived keeps the text of the write before.

    What exists since the first of these writes may be an object without the record, or of an earlier
    reservation of that name.
    """
    existed = before.existed_before and bool(before.text) and not before.is_archived
    is_only_archived = after.is_archived and not after.text
    record = before.record if is_only_archived else after.record
    return replace(after, record=record, existed_before=existed)


class HeadState(msgspec.Struct, frozen=True, omit_defaults=True):
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
    """Where the audit log began before the oldest pending commit."""
    kept_from: datetime | None = None
    """Retention limit: reservations that finished before are not in the archive any more."""
    swept_until: datetime | None = None
    """Objects of reservations that finished before have been deleted."""
    unfinished: int = 0
    """Number of unfinished reservations; 0 if unknown."""
    changes: tuple[PackedChanges, ...] = ()
    """Of the last commit, and of all since the oldest one that may not be in the objects: those of a later
    commit are always there if those of an earlier one are.
    """

    @property
    def pending(self) -> list[CommitChanges]:
        return [packed.unpack() for packed in self.changes]

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(name for packed in self.changes for name in packed.parts)


def split_oversized(
    state: HeadState, namespace: str, label: str
) -> tuple[HeadState, list[LedgerRecord]]:
    """The state with the last commit's changes in parts if it is too large, and these, to be written before.

    Each attempt needs a label of its own.
    """
    if _quoted_size(_encode_contents(_as_written(state))) <= MAX_OBJECT_BYTES:
        return state, []
    *earlier, last = state.changes
    begins = range(0, len(last.text), MAX_OBJECT_BYTES)
    texts = [last.text[begin : begin + MAX_OBJECT_BYTES] for begin in begins]
    parts = [
        _ledger_record(f"pending-{label}-{number}", "pending", namespace, text, state.sequence)
        for number, text in enumerate(texts)
    ]
    moved = replace(last, parts=tuple(part.metadata.name for part in parts))
    return replace(state, changes=(*earlier, moved)), parts


def _as_written(state: HeadState) -> HeadState:
    return replace(state, changes=tuple(packed.as_written for packed in state.changes))


def head_object(state: HeadState, namespace: str, resource_version: str = "") -> LedgerRecord:
    """The object for this state, replacing the one of this version."""
    written = _as_written(state)
    found = _ledger_record(HEAD_NAME, HEAD_NAME, namespace, written, state.sequence)
    return replace(found, metadata=replace(found.metadata, resource_version=resource_version))


def state_from_object(found: LedgerRecord) -> HeadState:
    return _decode_contents(_STATE_DECODER, found)


def with_parts(packed: PackedChanges, parts: Mapping[str, LedgerRecord]) -> PackedChanges:
    for name in packed.parts:
        if name not in parts:
            raise CorruptRecord(f"LedgerRecord {name} is missing")
    texts = (_decode_contents(_PART_DECODER, parts[name]) for name in packed.parts)
    return replace(packed, text="".join(texts)) if packed.parts else packed


def split_log_tail(
    state: HeadState, added: Iterable[ChainedLine]
) -> tuple[tuple[ChainedLine, ...], tuple[ChainedLine, ...]]:
    """The lines in the head after a commit that adds these, and those that it moves into segments."""
    lines = (*state.lines, *added)
    return (lines, ()) if sum(map(_line_size, lines)) <= MAX_HEAD_LOG_BYTES else ((), lines)


_encode_contents = msgspec.json.Encoder().encode
_STATE_DECODER: Final = msgspec.json.Decoder(HeadState)
_CHANGES_DECODER: Final = msgspec.json.Decoder(CommitChanges)
_PART_DECODER: Final = msgspec.json.Decoder(str)
_LINES_DECODER: Final = msgspec.json.Decoder(list[ChainedLine])


def _line_size(line: ChainedLine) -> int:
    return _quoted_size(bytes(line.text)) + LINE_OVERHEAD_BYTES


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
    name: str, contents: str, namespace: str, content: object, sequence: int
) -> LedgerRecord:
    metadata = Metadata(name, namespace, labels=objects.ledger_record_labels(contents))
    text = _encode_contents(content)
    record = StoredRecord(sequence, _contents_checksum(name, text), text.decode())
    return LedgerRecord(metadata, contents, record)


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
    return f"{batch.record_checksum(name.encode(), text):08x}"


MAX_ACQUIRE_ATTEMPTS: Final = 100
"""How often opening is retried because another broker has just written the head."""

MAX_READ_ATTEMPTS: Final = 3
"""How often a read is retried because the server has compacted the version."""


class HeadRecord:
    """The head of one namespace, as it was last read or written."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._version = ""
        self._own_versions: deque[str] = deque(maxlen=8)
        """The last versions that this broker has written, the current one included."""
        self.state = HeadState()
        """With all pending changes, in whichever object they are."""
        self.read_version = ""
        """The version of the namespace at which it was read; empty for a writer."""
        self._writing = asyncio.Lock()
        """Held while the head is replaced."""

    async def read(self) -> str:
        """Read an existing store. Returns the version of the whole namespace at that moment."""
        for _ in range(MAX_READ_ATTEMPTS):
            with suppress(Gone):
                found, at = await self._latest()
                if found is None:
                    raise StoreFailed(
                        f"there is no store in namespace {self._namespace}",
                        hint="check the namespace",
                    )
                await self._set_state(found, at)
                self.read_version = at
                return at
        raise version_compacted_error()

    async def acquire(self) -> None:
        """Become the only writer; creates a missing store."""
        for _ in range(MAX_ACQUIRE_ATTEMPTS):
            with suppress(Conflict):
                found, at = await self._latest()
                writer = secrets.token_hex(8)
                if found is None:
                    await self._check_no_records()
                    made = head_object(HeadState(epoch=1, writer=writer), self._namespace)
                    await self._set_state(await self._client.create(LEDGER_RECORDS, made), at)
                else:
                    await self._set_state(found, at)
                    epoch = self.state.epoch + 1
                    await self._replace_head(replace(self.state, epoch=epoch, writer=writer))
                return
        raise StoreFailed(
            "another broker writes too often for the store to be opened", hint="try again"
        )

    async def write(self, state: HeadState) -> None:
        """Commit. `StoreFailed` if another broker has written since the last read or write."""
        packed, parts = split_oversized(state, self._namespace, self._version)
        await tasks.gather_limited(self._create_part, parts)
        before = self.state.parts
        try:
            await self._replace_head(packed)
        except Conflict as error:
            raise objects.fenced_error() from error
        except NotFound as error:
            raise objects.head_deleted_error() from error
        await tasks.gather_limited(self._delete_part, sorted({*before} - {*packed.parts}))

    async def check_fencing(self) -> None:
        """`StoreFailed` if another broker has written. A commit of this one may be in flight."""
        found = await self._client.find(LEDGER_RECORDS, HEAD_NAME, self._namespace)
        async with self._writing:
            if found is None or found.metadata.resource_version not in self._own_versions:
                raise objects.fenced_error()

    async def collect_garbage(self) -> None:
        """Delete parts of commits that were never written to the head."""
        names = (await self._list_pending()).keys() - {*self.state.parts}
        await tasks.gather_limited(self._delete_part, sorted(names))

    async def _latest(self) -> tuple[LedgerRecord | None, str]:
        """The head, and a current version: that of the head itself may already be compacted."""
        listed = await self._client.list(
            LEDGER_RECORDS, self._namespace, fields=f"metadata.name={HEAD_NAME}"
        )
        for one in listed.undecodable:
            raise CorruptRecord(f"LedgerRecord {one.name}: {one.error}")
        return next(iter(listed.objects), None), listed.resource_version

    async def _set_state(self, found: LedgerRecord, at: str) -> None:
        """With all its parts, at a version at which the head existed, and so did they."""
        state = state_from_object(found)
        if state.parts:
            parts = await self._list_pending(at)
            whole = tuple(with_parts(packed, parts) for packed in state.changes)
            state = replace(state, changes=whole)
        self._set_version(found)
        self.state = state

    def _set_version(self, found: LedgerRecord) -> None:
        self._version = found.metadata.resource_version
        self._own_versions.append(self._version)

    async def _list_pending(self, at: str = "") -> dict[str, LedgerRecord]:
        """The parts of commits, by name."""
        labels = f"{CONTENTS_LABEL}=pending"
        listed = await self._client.list(LEDGER_RECORDS, self._namespace, labels=labels, at=at)
        return {found.metadata.name: found for found in listed.objects}

    async def _replace_head(self, state: HeadState) -> None:
        sent = head_object(state, self._namespace, self._version)
        async with self._writing:
            try:
                found = await self._client.update(LEDGER_RECORDS, sent)
            except (Conflict, Unavailable):
                arrived = await self._was_written(sent)
                if arrived is None:
                    raise
                found = arrived
            self._set_version(found)
        self.state = state

    async def _was_written(self, sent: LedgerRecord) -> LedgerRecord | None:
        """The head, if it is what was sent, and only the response was lost.

        If a connection breaks before the response, the HTTP library sends a PUT again, which then conflicts
        with the first one. No other writer, and no other commit of this writer, can have written the same.
        """
        found = await self._client.find(LEDGER_RECORDS, HEAD_NAME, self._namespace)
        return found if found is not None and found.record == sent.record else None

    async def _create_part(self, part: LedgerRecord) -> None:
        """An existing one is from an earlier attempt at the same commit."""
        try:
            await self._client.create(LEDGER_RECORDS, part)
        except AlreadyExists:
            await self._delete_part(part.metadata.name)
            await self._client.create(LEDGER_RECORDS, part)

    async def _delete_part(self, name: str) -> None:
        await self._client.delete(LEDGER_RECORDS, name, self._namespace)

    async def _check_no_records(self) -> None:
        """Records without the head are useless: the newest ones are in it."""
        for resource in (STORED_ADVERTISEMENTS, STORED_RESERVATIONS):
            listed = await self._client.list(resource, self._namespace)
            if any(found.record for found in listed.objects) or listed.undecodable:
                raise CorruptRecord(
                    f"{resource} have records of a broker, but LedgerRecord head is missing"
                )


def version_compacted_error() -> StoreFailed:
    return StoreFailed(
        "the API server compacts versions before they can be read", hint="check the load of etcd"
    )


class AuditSegments:
    """The segments of the audit log in one namespace.

    The broker may truncate the audit log during a read. Segments that are deleted by then are read at the
    version at which the head was read.
    """

    def __init__(self, client: Client, namespace: str) -> None:
        self._client = client
        self._namespace = namespace

    async def read(self, state: HeadState, after: int, limit: int, at: str = "") -> list[AuditLine]:
        """Lines after a number, oldest first, as of this state.

        `at`: the version at which the state was read, if a broker may write meanwhile.
        """
        first = max(after, state.start.number) + 1
        tail = [*(line for commit in state.pending for line in commit.lines), *state.lines]
        last_in_segments = tail[0].number - 1 if tail else state.end.number
        found: list[AuditLine] = []
        async for part in self._segment_lines(first, last_in_segments, at):
            found += (chained.line for chained in part if first <= chained.number)
            if len(found) >= limit:
                return found[:limit]
        found += (chained.line for chained in tail if first <= chained.number)
        return found[:limit]

    async def chain_head_at(self, state: HeadState, number: int) -> ChainHead | None:
        """The chain head after a line that has not been truncated."""
        if not state.start.number < number <= state.end.number:
            return None
        return next((line.head for line in await self.read(state, number - 1, 1)), None)

    async def create_segments(self, commit: CommitChanges, state: HeadState) -> None:
        """Move the lines of a commit."""
        for block, lines in groupby(commit.lines, lambda line: _block_of(line.number)):
            if block >= _block_of(state.start.number + 1):
                groups = list(_group_by_size(lines, _line_size))
                names = [_segment_name(group[0].number) for group in groups]
                if commit.sequence == 1:  # a copied log may begin in the middle of its first block
                    names[0] = _segment_name(block * BLOCK_LINES + 1)
                create = partial(self._create, commit.sequence)
                await tasks.gather_limited(create, list(zip(names, groups, strict=True)))

    async def delete_truncated(self, state: HeadState) -> None:
        """Delete the blocks that the last commits have truncated."""
        blocks = range(_block_of(state.cut_from + 1), _block_of(state.start.number + 1))
        await tasks.gather_limited(self._delete, list(blocks))

    async def _create(self, sequence: int, segment: tuple[str, Sequence[ChainedLine]]) -> None:
        name, lines = segment
        made = _ledger_record(name, "audit-log", self._namespace, lines, sequence)
        with suppress(AlreadyExists):  # equal commits make equal objects: it was written before
            await self._client.create(LEDGER_RECORDS, made)

    async def _delete(self, block: int) -> None:
        """The first one last: it leads to the others."""
        names = [
            part.metadata.name async for part in self._segments_of_block(block * BLOCK_LINES + 1)
        ]
        for name in reversed(names):
            await self._client.delete(LEDGER_RECORDS, name, self._namespace)

    async def _segment_lines(
        self, first: int, last: int, at: str
    ) -> AsyncIterator[list[ChainedLine]]:
        """The segments with these lines, and maybe some before them."""
        for block in range(_block_of(first), _block_of(last) + 1 if first <= last else 0):
            begun = reached = block * BLOCK_LINES
            async for part in self._segments_of_block(begun + 1, at):
                lines = _decode_contents(_LINES_DECODER, part)
                reached = lines[-1].number
                yield [line for line in lines if line.number <= last]
            if reached < min(last, begun + BLOCK_LINES):
                raise CorruptRecord(f"LedgerRecord {_segment_name(reached + 1)} is missing")

    async def _segments_of_block(self, first: int, at: str = "") -> AsyncIterator[LedgerRecord]:
        number, end = first, first + BLOCK_LINES
        while number < end:
            found = await self._find(_segment_name(number), at)
            if found is None:
                return
            yield found
            number = _decode_contents(_LINES_DECODER, found)[-1].number + 1

    async def _find(self, name: str, at: str) -> LedgerRecord | None:
        found = await self._client.find(LEDGER_RECORDS, name, self._namespace)
        if found is not None or not at:
            return found
        only = f"metadata.name={name}"
        try:
            listed = await self._client.list(LEDGER_RECORDS, self._namespace, fields=only, at=at)
        except Gone as error:
            raise StoreFailed(
                "the audit log may have been truncated since it was opened", hint="try again"
            ) from error
        return next(iter(listed.objects), None)


def _segment_name(first: int) -> str:
    return f"audit-log-{first}"


def _block_of(number: int) -> int:
    return (number - 1) // BLOCK_LINES
