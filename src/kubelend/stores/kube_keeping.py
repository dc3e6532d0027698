"""Reads and writes the head of the Kubernetes store. A write that goes through is a commit.

Each write names the version of the head that it is made on. So of two brokers that have the store open, only
the one that opened it last can write: opening raises the epoch, and that is a write too.
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
"""How often the head is read anew because a broker that is still busy has just written it."""

MOST_READS: Final = 3
"""How often a reader begins anew because the server has forgotten the version that it reads."""


class Keeper:
    """One namespace's head, as it was last read or written."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._version = ""
        self.state = State()
        """With all changes of the last commit, wherever they are kept."""
        self.at = ""
        """The version of the whole namespace at which it was read; empty for one who writes."""

    async def read(self) -> str:
        """Look at a store that is there. Gives the version that the whole namespace had at that moment."""
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
        """Make this the only one who can write; a store that is not there is made."""
        for _ in range(MOST_TRIES):
            with suppress(Conflict):
                found, at = await self._newest()
                if found is None:
                    await self._check_empty()
                    blank = kube_head.head(_new(), self._namespace)
                    await self._take_in(await self._client.create(LEDGER, blank), at)
                else:
                    await self._take_in(found, at)
                    epoch = self.state.epoch + 1
                    await self._put(replace(self.state, epoch=epoch, writer=_new_name()))
                return
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
        found = await self._client.find(LEDGER, HEAD, self._namespace)
        if found is None or found.metadata.resource_version != self._version:
            raise kube_failures.taken_over()

    async def tidy(self) -> None:
        """Delete what was put beside a head that was never written."""
        listed = await self._client.list(LEDGER, self._namespace, labels=f"{HOLDS}=pending")
        names = {found.metadata.name for found in listed.objects} - {*self.state.elsewhere}
        await kube_crews.each(self._delete, sorted(names))

    async def _newest(self) -> tuple[LedgerRecord | None, str]:
        """The head, and a version of now: its own may be so old that the server has forgotten it."""
        listed = await self._client.list(LEDGER, self._namespace, fields=f"metadata.name={HEAD}")
        for one in listed.unreadable:
            raise Damaged(f"LedgerRecord {one.name}: {one.problem}")
        return next(iter(listed.objects), None), listed.resource_version

    async def _take_in(self, found: LedgerRecord, at: str) -> None:
        """With all parts of it, as of a version at which it was there, and so they were."""
        state = kube_head.state_of(found)
        if not state.key:
            raise Damaged(f"LedgerRecord {found.key} has no key to seal with")
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
        """Parts that are elsewhere stay there."""
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
        """The head, if it is what was sent, and only the answer was lost.

        A connection that breaks before a PUT is answered has the HTTP library send it once more, and then it
        is the first one that the second is in conflict with. No other writer, and no other commit of this
        one, can have written the same.
        """
        found = await self._client.find(LEDGER, HEAD, self._namespace)
        return found if found is not None and found.record == sent.record else None

    async def _put_part(self, part: LedgerRecord) -> None:
        """One of this name is of an earlier attempt at this very commit."""
        try:
            await self._client.create(LEDGER, part)
        except AlreadyExists:
            await self._delete(part.metadata.name)
            await self._client.create(LEDGER, part)

    async def _delete(self, name: str) -> None:
        await self._client.delete(LEDGER, name, self._namespace)

    async def _check_empty(self) -> None:
        """Records count for nothing without the head that tells how new they are."""
        for resource in (ADVERTISEMENTS, RESERVATIONS):
            listed = await self._client.list(resource, self._namespace)
            if any(found.record for found in listed.objects) or listed.unreadable:
                raise Damaged(
                    f"there are {resource} that a broker keeps, but LedgerRecord head is gone"
                )


def forgetful() -> StoreFailed:
    return StoreFailed(
        "the API server forgets versions before they can be read", hint="is its etcd overloaded?"
    )


def _new() -> State:
    key = kube_seals.new_key()
    roll = kube_seals.Roll(key).digest
    return State(epoch=1, writer=_new_name(), key=key, unfinished=roll)


def _new_name() -> str:
    return secrets.token_hex(8)


def _hasty() -> StoreFailed:
    return StoreFailed(
        "another broker writes so often that the store cannot be read", hint="try again"
    )
