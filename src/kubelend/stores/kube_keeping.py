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
from kubelend.stores.kube_head import NO_CHANGES, HeadState
from kubelend.stores.kube_objects import (
    CONTENTS_LABEL,
    HEAD_NAME,
    LEDGER_RECORDS,
    STORED_ADVERTISEMENTS,
    STORED_RESERVATIONS,
)
from kubelend.stores.records import CorruptRecord
from kubelend.wire.broker_objects import LedgerRecord

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
        self.state = HeadState()
        """With all changes of the last commit, in whichever object they are."""
        self.read_version = ""
        """The version of the namespace at which it was read; empty for a writer."""

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
                if found is None:
                    await self._check_no_records()
                    placeholder = kube_head.head_object(_new_state(), self._namespace)
                    await self._set_state(
                        await self._client.create(LEDGER_RECORDS, placeholder), at
                    )
                else:
                    await self._set_state(found, at)
                    epoch = self.state.epoch + 1
                    await self._replace_head(
                        replace(self.state, epoch=epoch, writer=_new_writer_id())
                    )
                return
        raise _too_many_conflicts()

    async def write(self, state: HeadState) -> None:
        """Commit. `StoreFailed` if another broker has written since the last read or write."""
        packed = kube_head.split_oversized(state, self._namespace, self._version)
        await kube_crews.gather_limited(self._create_part, packed.parts)
        before = self.state.elsewhere
        try:
            await self._replace_head(replace(packed.state, changes=state.changes))
        except Conflict as error:
            raise kube_failures.fenced_error() from error
        except NotFound as error:
            raise kube_failures.head_deleted_error() from error
        await kube_crews.gather_limited(self._delete_part, before)

    async def check_fencing(self) -> None:
        """`StoreFailed` if another broker has written."""
        found = await self._client.find(LEDGER_RECORDS, HEAD_NAME, self._namespace)
        if found is None or found.metadata.resource_version != self._version:
            raise kube_failures.fenced_error()

    async def collect_garbage(self) -> None:
        """Delete parts of commits that were never written to the head."""
        listed = await self._client.list(
            LEDGER_RECORDS, self._namespace, labels=f"{CONTENTS_LABEL}=pending"
        )
        names = {found.metadata.name for found in listed.objects} - {*self.state.elsewhere}
        await kube_crews.gather_limited(self._delete_part, sorted(names))

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
        state = kube_head.state_from_object(found)
        if not state.key:
            raise CorruptRecord(f"LedgerRecord {found.key} has no signature key")
        if state.elsewhere:
            state = replace(
                state, changes=kube_head.changes_from_parts(await self._read_parts(state, at))
            )
        self.state, self._version = state, found.metadata.resource_version

    async def _read_parts(self, state: HeadState, at: str) -> list[LedgerRecord]:
        labels = f"{CONTENTS_LABEL}=pending"
        listed = await self._client.list(LEDGER_RECORDS, self._namespace, labels=labels, at=at)
        known = {found.metadata.name: found for found in listed.objects}
        for name in state.elsewhere:
            if name not in known:
                raise CorruptRecord(f"LedgerRecord {name} is missing")
        return [known[name] for name in state.elsewhere]

    async def _replace_head(self, state: HeadState) -> None:
        """Parts in other objects stay there."""
        written = replace(state, changes=NO_CHANGES) if state.elsewhere else state
        sent = kube_head.head_object(written, self._namespace, self._version)
        try:
            found = await self._client.update(LEDGER_RECORDS, sent)
        except (Conflict, Unavailable):
            arrived = await self._was_written(sent)
            if arrived is None:
                raise
            found = arrived
        self._version = found.metadata.resource_version
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
        """Records without the head are useless, because it has their key and order."""
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


def _new_state() -> HeadState:
    key = kube_seals.new_signature_key()
    live_set = kube_seals.LiveSetDigest(key).digest
    return HeadState(epoch=1, writer=_new_writer_id(), key=key, unfinished=live_set)


def _new_writer_id() -> str:
    return secrets.token_hex(8)


def _too_many_conflicts() -> StoreFailed:
    return StoreFailed(
        "another broker writes too often for the store to be opened", hint="try again"
    )
