"""Cache of the objects that the Kubernetes store has read or written, so that it can write without a read.

A write is conditional on the cached version. After a conflict the object is read and evaluated again: the
cache saves a call, and never decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final, NamedTuple

import msgspec

from kubelend.core.errors import Conflict, NotFound
from kubelend.kube import answers
from kubelend.kube.client import Client
from kubelend.kube.resources import Resource
from kubelend.stores import kube_objects, kube_projection, kube_seals
from kubelend.stores.kube_head import Write
from kubelend.stores.kube_keeping import Keeper
from kubelend.stores.kube_objects import (
    ADVERTISEMENTS,
    LEDGER,
    RESERVATIONS,
    RecordKind,
    Seen,
    Spec,
)
from kubelend.wire.broker_objects import RESERVATION_FINALIZER, Kept, LedgerRecord

Key = tuple[RecordKind, str]
"""A record's kind and the name of its object."""


BLANK: Final = Kept(0, "", "")
"""The record of a placeholder."""

SPOILT: Final = -1
"""Older than any commit, whatever revision the object claims."""


class Missed(Exception):
    """Somebody else has written, created or deleted the object since it was read."""


class Sight(NamedTuple):
    """What the next write of an object depends on."""

    version: str
    sequence: int
    """Of the commit that wrote its record; 0 for none, and `TAMPERED` if the signature is invalid."""
    is_own: bool
    """Whether the broker created it."""
    is_leaving: bool
    """Whether it has a deletionTimestamp and waits for its finalizers."""
    is_archived: bool
    finalizers: tuple[str, ...]
    spec: bytes
    finished_at: datetime | None = None
    uid: str = ""

    @property
    def is_wish(self) -> bool:
        """Whether a user made it, and the broker has not processed it yet."""
        return not self.sequence and not self.is_own

    @property
    def holds_on(self) -> bool:
        return RESERVATION_FINALIZER in self.finalizers


class Sights:
    """Reads and caches the objects of one namespace."""

    def __init__(self, client: Client, namespace: str, keeper: Keeper) -> None:
        self.client = client
        self.namespace = namespace
        self._keeper = keeper
        self._known: dict[Key, Sight] = {}

    @property
    def seal_key(self) -> str:
        """From the head, which has to be read before any object."""
        return self._keeper.state.key

    async def of(self, key: Key) -> Sight | None:
        """The cached object, or else the current one; None if it does not exist."""
        return self.known(key) or await self.look(key)

    def known(self, key: Key) -> Sight | None:
        """The cached object; None if it is unknown."""
        return self._known.get(key)

    async def look(self, key: Key) -> Sight | None:
        """The current object."""
        kind, name = key
        found: Seen | None = await self.client.find(resource(kind), name, self.namespace)
        if found is None:
            self.forget(key)
            return None
        return self.saw(kind, found)

    def saw(self, kind: RecordKind, found: Seen, finished_at: datetime | None = None) -> Sight:
        """Cache an object; of a reservation also when it finished."""
        cached = _sight(found, self._sequence(kind, found), finished_at)
        key = kind, found.metadata.name
        if cached.is_wish:
            # Its user may delete it and make another one, which is another request.
            self.forget(key)
        else:
            self._known[key] = cached
        return cached

    async def create(self, key: Key, blank: Seen) -> Sight:
        with _noticed():
            made = await self.client.create(resource(key[0]), blank)
        return self.saw(key[0], made)

    async def patch(
        self,
        key: Key,
        seen: Sight,
        change: Mapping[str, object],
        *,
        subresource: str = "",
        finished_at: datetime | None = None,
    ) -> Sight:
        """Apply a merge patch, if the object has not changed."""
        kind, name = key
        metadata = {**_mapping(change.get("metadata")), "resourceVersion": seen.version}
        whole = {**change, "metadata": metadata}
        with _noticed(gone=True):
            found = await self.client.patch(
                resource(kind), name, self.namespace, whole, subresource=subresource
            )
        return self.saw(kind, found, finished_at or seen.finished_at)

    async def delete(self, key: Key, seen: Sight) -> None:
        """Delete the object, if it has not changed."""
        kind, name = key
        path = resource(kind).path(self.namespace, name)
        only = {"preconditions": {"resourceVersion": seen.version}}
        with _noticed(gone=True):
            await self.client.raw("DELETE", path, only)
        self.forget(key)

    def _sequence(self, kind: RecordKind, found: Seen) -> int:
        record = found.record
        if record is None or record == BLANK:
            return 0
        is_whole = kube_seals.is_whole(self.seal_key, kind, found.metadata.name, record)
        return record.revision if is_whole else SPOILT

    def forget(self, key: Key) -> None:
        self._known.pop(key, None)

    def knows(self, key: Key) -> bool:
        return key in self._known

    def finished_at(self, id: str) -> datetime | None:
        """When a reservation finished, if that is cached."""
        cached = self._known.get(("reservation", kube_objects.name_of("reservation", id)))
        return cached and cached.finished_at


def key_of(write: Write) -> Key:
    return write.kind, kube_objects.name_of(write.kind, write.id)


def resource(kind: RecordKind) -> Resource[Any]:
    """The resource of a kind of record."""
    match kind:
        case "cluster":
            return ADVERTISEMENTS
        case "reservation":
            return RESERVATIONS
    return LEDGER


def spec_text(spec: Spec) -> bytes:
    """Equal for equal specs, ignoring the fields that the controllers write."""
    return _encode(kube_projection.comparable(spec))


def spec_of(seen: Sight) -> Spec:
    return _SPECS.decode(seen.spec)


@contextmanager
def _noticed(*, gone: bool = False) -> Iterator[None]:
    """Raises `StaleWrite` after a conflict, and with `deleted` if the object does not exist."""
    try:
        yield
    except Conflict as error:
        raise Missed from error
    except NotFound as error:
        if gone and answers.is_missing_object(error):
            raise Missed from error
        raise


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


_encode = msgspec.json.Encoder(order="sorted").encode
_SPECS: Final = msgspec.json.Decoder(Spec)


def _sight(found: Seen, sequence: int, finished_at: datetime | None) -> Sight:
    metadata = found.metadata
    return Sight(
        metadata.resource_version,
        sequence,
        metadata.labels.get(kube_objects.MADE_BY) == kube_objects.BROKER,
        metadata.deletion_timestamp is not None,
        metadata.labels.get(kube_objects.ARCHIVED) == "true",
        metadata.finalizers,
        b"{}" if isinstance(found, LedgerRecord) else spec_text(found.spec),
        finished_at,
        metadata.uid,
    )
