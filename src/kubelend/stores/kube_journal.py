"""The journal in Kubernetes: its newest lines are in the head, the others in objects that never change.

An object begins with the line that it is named after. Lines are counted in blocks, and no object reaches into
the next block: so a block's first object is known by name, and each says where the next one begins. Nothing
has to list them.

The broker may cut the journal while another reads it. What is gone by then is read as of the version of which
the reader read the head.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import groupby
from typing import Final

from kubelend.core.errors import AlreadyExists, Gone, StoreFailed
from kubelend.core.journal import Head, Line
from kubelend.kube.client import Client
from kubelend.stores import kube_crews, kube_head, kube_objects
from kubelend.stores.kube_head import Sealed, State
from kubelend.stores.records import Damaged
from kubelend.wire.broker_objects import LedgerRecord

BLOCK: Final = 512
"""Lines that are found with one name."""

ROOM: Final = 32_000
"""Bytes of lines that wait in the head, where every commit writes them once more."""


def waiting(state: State, added: Iterable[Sealed]) -> tuple[tuple[Sealed, ...], tuple[Sealed, ...]]:
    """What waits in the head from now on, and what is moved out of it by the commit that adds these."""
    lines = (*state.lines, *added)
    return (lines, ()) if kube_head.size(lines) <= ROOM else ((), lines)


class Shelf:
    """The objects of a journal in one namespace."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._client = client
        self._namespace = namespace

    async def read(self, state: State, after: int, limit: int, at: str = "") -> list[Line]:
        """Lines behind a number, oldest first, as of this state.

        `at`: the version of which the state was read, if there is a broker that goes on meanwhile.
        """
        first = max(after, state.start.number) + 1
        tail = [*state.changes.lines, *state.lines]
        shelved = tail[0].number - 1 if tail else state.end.number
        found: list[Line] = []
        async for part in self._parts(first, shelved, at):
            found += (sealed.line for sealed in part if first <= sealed.number)
            if len(found) >= limit:
                return found[:limit]
        found += (sealed.line for sealed in tail if first <= sealed.number)
        return found[:limit]

    async def find(self, state: State, number: int) -> Head | None:
        """Where the chain stood behind a line that is still there."""
        if not state.start.number < number <= state.end.number:
            return None
        return next((line.head for line in await self.read(state, number - 1, 1)), None)

    async def keep(self, state: State) -> None:
        """Put the lines into objects that the last commit has taken out of the head."""
        parts = [
            kube_head.journal_part(lines, self._namespace, state.sequence)
            for lines in _parts(state.changes.lines)
            if _block(lines[0].number) >= _block(state.start.number + 1)
        ]
        await kube_crews.each(self._create, parts)

    async def cut(self, state: State) -> None:
        """Delete the blocks that the last commit has cut off."""
        blocks = range(_block(state.cut_from + 1), _block(state.start.number + 1))
        await kube_crews.each(self._delete, list(blocks))

    async def _create(self, part: LedgerRecord) -> None:
        try:
            await self._client.create(kube_objects.LEDGER, part)
        except AlreadyExists:
            return  # equal commits make equal objects: this one was finished by somebody before

    async def _delete(self, block: int) -> None:
        """The first one last: it leads to the others."""
        names = [part.metadata.name async for part in self._chain(block * BLOCK + 1)]
        for name in reversed(names):
            await self._client.delete(kube_objects.LEDGER, name, self._namespace)

    async def _parts(self, first: int, last: int, at: str) -> AsyncIterator[list[Sealed]]:
        """The objects that have these lines, and maybe some before them."""
        for block in range(_block(first), _block(last) + 1 if first <= last else 0):
            begun = reached = block * BLOCK
            async for part in self._chain(begun + 1, at):
                lines = kube_head.lines_of(part)
                reached = lines[-1].number
                yield [line for line in lines if line.number <= last]
            if reached < min(last, begun + BLOCK):
                raise Damaged(f"LedgerRecord {kube_head.journal_name(reached + 1)} is missing")

    async def _chain(self, first: int, at: str = "") -> AsyncIterator[LedgerRecord]:
        """The objects of a block, each behind the one before."""
        number, end = first, first + BLOCK
        while number < end:
            found = await self._find(kube_head.journal_name(number), at)
            if found is None:
                return
            yield found
            number = kube_head.lines_of(found)[-1].number + 1

    async def _find(self, name: str, at: str) -> LedgerRecord | None:
        found = await self._client.find(kube_objects.LEDGER, name, self._namespace)
        if found is not None or not at:
            return found
        only = f"metadata.name={name}"
        try:
            listed = await self._client.list(
                kube_objects.LEDGER, self._namespace, fields=only, at=at
            )
        except Gone as error:
            raise StoreFailed(
                "the journal may have been cut off since it was opened", hint="try again"
            ) from error
        return next(iter(listed.objects), None)


def _parts(lines: Iterable[Sealed]) -> Iterator[list[Sealed]]:
    for _, block in groupby(lines, lambda line: _block(line.number)):
        yield from kube_head.split(block)


def _block(number: int) -> int:
    return (number - 1) // BLOCK
