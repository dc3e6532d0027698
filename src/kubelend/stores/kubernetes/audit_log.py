"""The audit log in Kubernetes: its newest lines are in the head, the others in immutable segments.

A segment is named after its first line. Lines are counted in blocks, and no segment crosses a block boundary:
so the first segment of a block is known by name, and each one leads to the next. Nothing has to list them.

The broker may truncate the audit log during a read. Segments that are deleted by then are read at the version
at which the head was read.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import groupby
from typing import Final

from kubelend.core.audit_log import AuditLine, ChainHead
from kubelend.core.errors import AlreadyExists, Gone, StoreFailed
from kubelend.kits import tasks
from kubelend.kube.client import Client
from kubelend.stores.batch import CorruptRecord
from kubelend.stores.kubernetes import head, objects
from kubelend.stores.kubernetes.head import ChainedLine, HeadState
from kubelend.wire.broker_objects import LedgerRecord

BLOCK_LINES: Final = 512
"""Lines in a block."""

MAX_HEAD_LOG_BYTES: Final = 32_000
"""Bytes of lines in the head, where every commit writes them again."""


def split_log_tail(
    state: HeadState, added: Iterable[ChainedLine]
) -> tuple[tuple[ChainedLine, ...], tuple[ChainedLine, ...]]:
    """The lines in the head after a commit that adds these, and those that it moves into segments."""
    lines = (*state.lines, *added)
    return (lines, ()) if head.lines_size(lines) <= MAX_HEAD_LOG_BYTES else ((), lines)


class AuditSegments:
    """The segments in one namespace."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._client = client
        self._namespace = namespace

    async def read(self, state: HeadState, after: int, limit: int, at: str = "") -> list[AuditLine]:
        """Lines after a number, oldest first, as of this state.

        `at`: the version at which the state was read, if a broker may write meanwhile.
        """
        first = max(after, state.start.number) + 1
        tail = [*state.changes.lines, *state.lines]
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

    async def create_segments(self, state: HeadState) -> None:
        """Create the segments of the last commit."""
        parts = [
            head.audit_segment(lines, self._namespace, state.sequence)
            for lines in _split_at_blocks(state.changes.lines)
            if _block_of(lines[0].number) >= _block_of(state.start.number + 1)
        ]
        await tasks.gather_limited(self._create, parts)

    async def delete_truncated(self, state: HeadState) -> None:
        """Delete the blocks that the last commit has truncated."""
        blocks = range(_block_of(state.cut_from + 1), _block_of(state.start.number + 1))
        await tasks.gather_limited(self._delete, list(blocks))

    async def _create(self, part: LedgerRecord) -> None:
        try:
            await self._client.create(objects.LEDGER_RECORDS, part)
        except AlreadyExists:
            return  # equal commits make equal objects: it was written before

    async def _delete(self, block: int) -> None:
        """The first one last: it leads to the others."""
        names = [
            part.metadata.name async for part in self._segments_of_block(block * BLOCK_LINES + 1)
        ]
        for name in reversed(names):
            await self._client.delete(objects.LEDGER_RECORDS, name, self._namespace)

    async def _segment_lines(
        self, first: int, last: int, at: str
    ) -> AsyncIterator[list[ChainedLine]]:
        """The segments with these lines, and maybe some before them."""
        for block in range(_block_of(first), _block_of(last) + 1 if first <= last else 0):
            begun = reached = block * BLOCK_LINES
            async for part in self._segments_of_block(begun + 1, at):
                lines = head.lines_from_segment(part)
                reached = lines[-1].number
                yield [line for line in lines if line.number <= last]
            if reached < min(last, begun + BLOCK_LINES):
                raise CorruptRecord(
                    f"LedgerRecord {head.audit_segment_name(reached + 1)} is missing"
                )

    async def _segments_of_block(self, first: int, at: str = "") -> AsyncIterator[LedgerRecord]:
        """The segments of a block, in order."""
        number, end = first, first + BLOCK_LINES
        while number < end:
            found = await self._find(head.audit_segment_name(number), at)
            if found is None:
                return
            yield found
            number = head.lines_from_segment(found)[-1].number + 1

    async def _find(self, name: str, at: str) -> LedgerRecord | None:
        found = await self._client.find(objects.LEDGER_RECORDS, name, self._namespace)
        if found is not None or not at:
            return found
        only = f"metadata.name={name}"
        try:
            listed = await self._client.list(
                objects.LEDGER_RECORDS, self._namespace, fields=only, at=at
            )
        except Gone as error:
            raise StoreFailed(
                "the audit log may have been truncated since it was opened", hint="try again"
            ) from error
        return next(iter(listed.objects), None)


def _split_at_blocks(lines: Iterable[ChainedLine]) -> Iterator[list[ChainedLine]]:
    for _, block in groupby(lines, lambda line: _block_of(line.number)):
        yield from head.split_lines(block)


def _block_of(number: int) -> int:
    return (number - 1) // BLOCK_LINES
