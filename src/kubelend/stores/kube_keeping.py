"""Reads and writes the head of the Kubernetes store. A write that goes through is a commit.

Each write names the version of the head that it is made on. So of two brokers that have the store open, only
the one that opened it last can write: opening raises the epoch, and that is a write too.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from kubelend.core.errors import AlreadyExists, Conflict, NotFound, StoreFailed
from kubelend.kube.client import Client
from kubelend.stores import kube_crews, kube_failures, kube_head, kube_seals
from kubelend.stores.kube_head import NO_CHANGES, State
from kubelend.stores.kube_objects import (
    ADVERTISEMENTS,
    HEAD,
    HOLDS,
    LEDGER,
    RESERVATIONS,
)
from kubelend.stores.records import Damaged
from kubelend.wire.broker_objects import LedgerRecord

MOST_TRIES: Final = 100
"""How often the head is read anew because a broker that is still busy has just written it."""


class Keeper:
    """One namespace's head, as it was last read or written."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._version = ""
        self.state = State()
        """With all changes of the last commit, wherever they are kept."""

    async def read(self) -> None:
        """Look at a store that is there."""
        for _ in range(MOST_TRIES):
            found = await self._find(HEAD)
            if found is None:
                raise StoreFailed(
                    f"there is no store in namespace {self._namespace}", hint="check the namespace"
                )
            if await self._take_in(found):
                return
        raise _hasty()

    async def take_over(self) -> None:
        """Make this the only one who can write; a store that is not there is made."""
        for _ in range(MOST_TRIES):
            try:
                found = await self._find(HEAD)
                if found is None:
                    await self._check_empty()
                    blank = kube_head.head(_new(), self._namespace)
                    await self._take_in(await self._client.create(LEDGER, blank))
                    return
                if await self._take_in(found):
                    await self._put(replace(self.state, epoch=self.state.epoch + 1))
                    return
            except Conflict:
                continue
        raise _hasty()

    async def write(self, state: State) -> None:
        """Commit. `StoreFailed` if somebody else has written since this one read or wrote."""
        packed = kube_head.pack(state, self._namespace, self._version)
        await kube_crews.each(self._put_part, packed.parts)
        before = self.state.elsewhere
        try:
            await self._put(replace(packed.state, changes=state.changes))
        except Conflict as error:
            raise kube_failures.taken_over() from error
        except NotFound as error:
            raise kube_failures.head_gone() from error
        await kube_crews.each(self._delete, before)

    async def check(self) -> None:
        """`StoreFailed` if somebody else has written."""
        if not await self.is_newest():
            raise kube_failures.taken_over()

    async def is_newest(self) -> bool:
        found = await self._find(HEAD)
        return found is not None and found.metadata.resource_version == self._version

    async def tidy(self) -> None:
        """Delete what was put beside a head that was never written."""
        listed = await self._client.list(LEDGER, self._namespace, labels=f"{HOLDS}=pending")
        names = {found.metadata.name for found in listed.objects} - {*self.state.elsewhere}
        await kube_crews.each(self._delete, sorted(names))

    async def _take_in(self, found: LedgerRecord) -> bool:
        """False if a part of it was gone by the time it was read, because there is a newer one."""
        state = kube_head.state_of(found)
        if not state.key:
            raise Damaged(f"LedgerRecord {found.key} has no key to seal with")
        self._version = found.metadata.resource_version
        parts = await kube_crews.each(self._find, state.elsewhere)
        read = [part for part in parts if part is not None]
        if len(read) < len(parts):
            if await self.is_newest():
                missing = next(
                    n for n, part in zip(state.elsewhere, parts, strict=True) if not part
                )
                raise Damaged(f"LedgerRecord {missing} is missing")
            return False
        self.state = replace(state, changes=kube_head.changes_of(read)) if read else state
        return True

    async def _put(self, state: State) -> None:
        """Parts that are elsewhere stay there."""
        written = replace(state, changes=NO_CHANGES) if state.elsewhere else state
        found = kube_head.head(written, self._namespace, self._version)
        self._version = (await self._client.replace(LEDGER, found)).metadata.resource_version
        self.state = state

    async def _put_part(self, part: LedgerRecord) -> None:
        """One of this name is of an earlier attempt at this very commit."""
        try:
            await self._client.create(LEDGER, part)
        except AlreadyExists:
            await self._delete(part.metadata.name)
            await self._client.create(LEDGER, part)

    async def _find(self, name: str) -> LedgerRecord | None:
        return await self._client.find(LEDGER, name, self._namespace)

    async def _delete(self, name: str) -> None:
        await self._client.delete(LEDGER, name, self._namespace)

    async def _check_empty(self) -> None:
        """Records count for nothing without the head that tells how new they are."""
        for resource in (ADVERTISEMENTS, RESERVATIONS):
            listed = await self._client.list(resource, self._namespace)
            if any(found.kept for found in listed.objects) or listed.unreadable:
                raise Damaged(
                    f"there are {resource} that a broker keeps, but LedgerRecord head is gone"
                )


def _new() -> State:
    key = kube_seals.new_key()
    return State(epoch=1, key=key, unfinished=kube_seals.Roll(key).digest)


def _hasty() -> StoreFailed:
    return StoreFailed(
        "another broker writes so often that the store cannot be read", hint="try again"
    )
