"""What the Kubernetes store last saw of each object, so that it can write without reading first.

A write carries the version that was seen. If somebody has written since, it is refused, and the object is
read and judged again: what is remembered here saves a call, and never decides.
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
"""What an object keeps that is made, and yet to be filled."""

SPOILT: Final = -1
"""Older than any commit, whatever number somebody has written there."""


class Missed(Exception):
    """Somebody else has written, made or deleted an object since it was seen."""


class Sight(NamedTuple):
    """An object, as far as its next write depends on it."""

    version: str
    sequence: int
    """Of the commit whose record it keeps; 0 for none, and `SPOILT` for what no broker wrote."""
    is_own: bool
    """Whether the broker made it."""
    is_leaving: bool
    """Whether somebody has deleted it, and finalizers hold it."""
    is_archived: bool
    finalizers: tuple[str, ...]
    spec: bytes
    finished_at: datetime | None = None
    uid: str = ""

    @property
    def is_wish(self) -> bool:
        """Whether somebody has made it, and the broker has not taken it up yet."""
        return not self.sequence and not self.is_own

    @property
    def holds_on(self) -> bool:
        return RESERVATION_FINALIZER in self.finalizers


class Sights:
    """Objects of one namespace: read, and remembered."""

    def __init__(self, client: Client, namespace: str, keeper: Keeper) -> None:
        self.client = client
        self.namespace = namespace
        self._keeper = keeper
        self._known: dict[Key, Sight] = {}

    @property
    def seal_key(self) -> str:
        """Of the head, which has to be read before any object is."""
        return self._keeper.state.key

    async def of(self, key: Key) -> Sight | None:
        """As it was last seen, or as it is; None if it is not there."""
        return self.known(key) or await self.look(key)

    def known(self, key: Key) -> Sight | None:
        """As it was last seen; None if it never was."""
        return self._known.get(key)

    async def look(self, key: Key) -> Sight | None:
        """As it is now."""
        kind, name = key
        found: Seen | None = await self.client.find(resource(kind), name, self.namespace)
        if found is None:
            self.forget(key)
            return None
        return self.saw(kind, found)

    def saw(self, kind: RecordKind, found: Seen, finished_at: datetime | None = None) -> Sight:
        """Remember an object; of a reservation's record also when it finished."""
        seen = _sight(found, self._sequence(kind, found), finished_at)
        key = kind, found.metadata.name
        if seen.is_wish:
            # Whoever made it may delete it and make another, which is another wish.
            self.forget(key)
        else:
            self._known[key] = seen
        return seen

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
        """Change an object as it was seen, with a merge patch."""
        kind, name = key
        metadata = {**_mapping(change.get("metadata")), "resourceVersion": seen.version}
        whole = {**change, "metadata": metadata}
        with _noticed(gone=True):
            found = await self.client.patch(
                resource(kind), name, self.namespace, whole, subresource=subresource
            )
        return self.saw(kind, found, finished_at or seen.finished_at)

    async def delete(self, key: Key, seen: Sight) -> None:
        """Delete an object as it was seen."""
        kind, name = key
        path = resource(kind).path(self.namespace, name)
        only = {"preconditions": {"resourceVersion": seen.version}}
        with _noticed(gone=True):
            await self.client.raw("DELETE", path, only)
        self.forget(key)

    def _sequence(self, kind: RecordKind, found: Seen) -> int:
        kept = found.record
        if kept is None or kept == BLANK:
            return 0
        is_whole = kube_seals.is_whole(self.seal_key, kind, found.metadata.name, kept)
        return kept.revision if is_whole else SPOILT

    def forget(self, key: Key) -> None:
        self._known.pop(key, None)

    def knows(self, key: Key) -> bool:
        return key in self._known

    def finished_at(self, id: str) -> datetime | None:
        """When a reservation finished, of which this was seen."""
        seen = self._known.get(("reservation", kube_objects.name_of("reservation", id)))
        return seen and seen.finished_at


def key_of(write: Write) -> Key:
    return write.kind, kube_objects.name_of(write.kind, write.id)


def resource(kind: RecordKind) -> Resource[Any]:
    """Where objects of either type are kept."""
    match kind:
        case "cluster":
            return ADVERTISEMENTS
        case "reservation":
            return RESERVATIONS
    return LEDGER


def spec_text(spec: Spec) -> bytes:
    """Equal for specs that say the same, whatever the controllers have put into them."""
    return _encode(kube_projection.comparable(spec))


def spec_of(seen: Sight) -> Spec:
    return _SPECS.decode(seen.spec)


@contextmanager
def _noticed(*, gone: bool = False) -> Iterator[None]:
    """A server's refusal because the object is not as it was seen, or if so told not there, is `Missed`."""
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
