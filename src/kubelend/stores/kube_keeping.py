"""Reads and writes the head of the Kubernetes store. A successful write is a commit.

Each write is conditional on the version of the head that it builds on. So of two brokers that have the store
open, only the one that opened it last can write: opening raises the epoch, which is a write, too.
"""

from __future__ import annotations

import secrets
from contextlib import suppress
from typing import Final

from msgspec.structs import replace

from kubelend.core.errors import (
    AlreadyExists,
    Conflict,
    Gone,
    NotFound,
    StoreFailed,
    Unavailable,
)
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
"""How often opening is retried because another broker has just written the head."""

MOST_READS: Final = 3
"""How often a read is retried because the server has compacted the version."""


class Keeper:
    """The head of one namespace, as it was last read or written."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._version = ""
        self.state = State()
        """With all changes of the last commit, in whichever object they are."""
        self.at = ""
        """The version of the namespace at which it was read; empty for a writer."""

    async def read(self) -> str:
        """Read an existing store. Returns the version of the whole namespace at that moment."""
        for _ in range(MOST_READS):
            with suppress(Gone):
                found, at = await self._newest()
                if found is None:
                    raise StoreFailed(
                        f"there is no store in namespace {self._namespace}",
                        hint="check the namespace",
                    )
                await self._take_in(found, at)
                self.at = at
                return at
        raise forgetful()

    async def take_over(self) -> None:
        """Become the only writer; creates a missing store."""
        for _ in range(MOST_TRIES):
            with suppress(Conflict):
                found, at = await self._newest()
                if found is None:
                    await self._check_empty()
                    placeholder = kube_head.head(_new(), self._namespace)
                    await self._take_in(await self._client.create(LEDGER, placeholder), at)
                else:
                    await self._take_in(found, at)
                    epoch = self.state.epoch + 1
                    await self._put(replace(self.state, epoch=epoch, writer=_new_name()))
                return
        raise _hasty()

    async def write(self, state: State) -> None:
        """Commit. `StoreFailed` if another broker has written since the last read or write."""
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
        """`StoreFailed` if another broker has written."""
        found = await self._client.find(LEDGER, HEAD, self._namespace)
        if found is None or found.metadata.resource_version != self._version:
            raise kube_failures.taken_over()

    async def tidy(self) -> None:
        """Delete parts of commits that were never written to the head."""
        listed = await self._client.list(LEDGER, self._namespace, labels=f"{HOLDS}=pending")
        names = {found.metadata.name for found in listed.objects} - {*self.state.elsewhere}
        await kube_crews.each(self._delete, sorted(names))

    async def _newest(self) -> tuple[LedgerRecord | None, str]:
        """The head, and a current version: that of the head itself may already be compacted."""
        listed = await self._client.list(LEDGER, self._namespace, fields=f"metadata.name={HEAD}")
        for one in listed.unreadable:
            raise Damaged(f"LedgerRecord {one.name}: {one.problem}")
        return next(iter(listed.objects), None), listed.resource_version

    async def _take_in(self, found: LedgerRecord, at: str) -> None:
        """With all its parts, at a version at which the head existed, and so did they."""
        state = kube_head.state_of(found)
        if not state.key:
            raise Damaged(f"LedgerRecord {found.key} has no signature key")
        if state.elsewhere:
            state = replace(state, changes=kube_head.changes_of(await self._parts(state, at)))
        self.state, self._version = state, found.metadata.resource_version

    async def _parts(self, state: State, at: str) -> list[LedgerRecord]:
        labels = f"{HOLDS}=pending"
        listed = await self._client.list(LEDGER, self._namespace, labels=labels, at=at)
        known = {found.metadata.name: found for found in listed.objects}
        for name in state.elsewhere:
            if name not in known:
                raise Damaged(f"LedgerRecord {name} is missing")
        return [known[name] for name in state.elsewhere]

    async def _put(self, state: State) -> None:
        """Parts in other objects stay there."""
        written = replace(state, changes=NO_CHANGES) if state.elsewhere else state
        sent = kube_head.head(written, self._namespace, self._version)
        try:
            found = await self._client.replace(LEDGER, sent)
        except (Conflict, Unavailable):
            arrived = await self._arrived(sent)
            if arrived is None:
                raise
            found = arrived
        self._version = found.metadata.resource_version
        self.state = state

    async def _arrived(self, sent: LedgerRecord) -> LedgerRecord | None:
        """The head, if it is what was sent, and only the response was lost.

        If a connection breaks before the response, the HTTP library sends a PUT again, which then conflicts
        with the first one. No other writer, and no other commit of this writer, can have written the same.
        """
        found = await self._client.find(LEDGER, HEAD, self._namespace)
        return found if found is not None and found.record == sent.record else None

    async def _put_part(self, part: LedgerRecord) -> None:
        """An existing one is from an earlier attempt at the same commit."""
        try:
            await self._client.create(LEDGER, part)
        except AlreadyExists:
            await self._delete(part.metadata.name)
            await self._client.create(LEDGER, part)

    async def _delete(self, name: str) -> None:
        await self._client.delete(LEDGER, name, self._namespace)

    async def _check_empty(self) -> None:
        """Records without the head are useless, because it has their key and order."""
        for resource in (ADVERTISEMENTS, RESERVATIONS):
            listed = await self._client.list(resource, self._namespace)
            if any(found.record for found in listed.objects) or listed.unreadable:
                raise Damaged(
                    f"{resource} have records of a broker, but LedgerRecord head is missing"
                )


def forgetful() -> StoreFailed:
    return StoreFailed(
        "the API server compacts versions before they can be read", hint="check the load of etcd"
    )


def _new() -> State:
    key = kube_seals.new_key()
    live_set = kube_seals.Roll(key).digest
    return State(epoch=1, writer=_new_name(), key=key, unfinished=live_set)


def _new_name() -> str:
    return secrets.token_hex(8)


def _hasty() -> StoreFailed:
    return StoreFailed(
        "another broker writes too often for the store to be opened", hint="try again"
    )
