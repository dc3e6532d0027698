"""Applies committed changes to Kubernetes objects. Idempotent.

The commit is durable in the head before. An object that has the record of this commit or of a later one is
not touched, and every write is conditional on the version that was read. So an interrupted apply can start
again, and a broker that was suspended cannot undo the writes of its successor.

Objects are created as placeholders, and get their record only if the head is still this store's own:
otherwise an object that the successor has deleted meanwhile would come back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from datetime import UTC, datetime
from typing import Final, NamedTuple

from kubelend.core.errors import InvalidInput, StoreFailed
from kubelend.core.models import Reservation
from kubelend.kube import patches
from kubelend.stores import kube_crews, kube_objects, kube_projection, kube_sights
from kubelend.stores.kube_head import Write
from kubelend.stores.kube_objects import Seen, Spec, Stored
from kubelend.stores.kube_projection import Shown
from kubelend.stores.kube_sights import BLANK, Key, Missed, Sight, Sights
from kubelend.wire.broker_objects import RESERVATION_FINALIZER, Kept, LedgerRecord
from kubelend.wire.objects import Metadata

MOST_TRIES: Final = 50
"""How often a write is tried again that conflicts with writes of others."""

Check = Callable[[], Awaitable[None]]
"""Raises `StoreFailed` if the head is not this store's own any more."""


async def apply(sights: Sights, writes: Iterable[Write], sequence: int, check: Check) -> None:
    """Bring the objects into agreement with these writes."""
    object_writes = [_order(write, sequence, sights.seal_key) for write in writes]
    work = _Work(sights, check)
    # Releases first: who reads the objects must not see more reserved than there is.
    for takes in (False, True):
        await work.do(
            [object_write for object_write in object_writes if object_write.takes is takes]
        )


async def remove(sights: Sights, key: Key, seen: Sight) -> None:
    """Delete an object as it was read; `StaleWrite` if it has changed."""
    if seen.holds_on:
        seen = await _let_go(sights, key, seen)
    await sights.delete(key, seen)


async def reclaim(sights: Sights, key: Key) -> None:
    """Remove the archive labels from an unfinished reservation, and add the finalizer again."""
    for _ in range(MOST_TRIES):
        cached = await sights.of(key)
        if cached is None or not cached.is_archived:
            return
        try:
            await sights.patch(key, cached, {"metadata": _reclaiming(cached)})
        except Missed:
            sights.forget(key)
        else:
            return
    raise _busy(key)


def hour_of(at: datetime) -> str:
    """As in the label of archived reservations."""
    return f"{at.astimezone(UTC):%Y-%m-%dT%H}"


class _Order(NamedTuple):
    """A write, with all that does not depend on the object."""

    write: Write
    key: Key
    sequence: int
    shown: Shown
    kept: Kept
    takes: bool
    """Whether the reservation holds capacity from now on."""
    is_over: bool
    uid: str = ""
    """Of the object that requested it; empty if it was not requested by an object."""

    @property
    def is_put(self) -> bool:
        return bool(self.kept.data)

    @property
    def stays_away(self) -> bool:
        """Whether a missing object is not created again, because its user has deleted it."""
        return bool(self.uid) or (self.is_over and self.write.was_there)

    @property
    def keeps_hold(self) -> bool:
        """Whether the object needs the finalizer."""
        return self.write.kind == "reservation" and not self.write.is_archived


def _order(write: Write, sequence: int, seal_key: str) -> _Order:
    key = kube_sights.key_of(write)
    if not write.text:
        nothing = kube_projection.NOTHING
        return _Order(write, key, sequence, nothing, BLANK, takes=False, is_over=True)
    record = kube_projection.read(write.kind, write.text)
    kept = kube_projection.kept(seal_key, write.kind, write.id, write.text, sequence)
    is_over = isinstance(record, Reservation) and record.finished_at is not None
    takes = isinstance(record, Reservation) and record.is_live
    uid = kube_objects.asked_by(record) if isinstance(record, Reservation) else ""
    return _Order(write, key, sequence, kube_projection.shown(record), kept, takes, is_over, uid)


class _Work:
    """Carries out writes concurrently."""

    def __init__(self, sights: Sights, check: Check) -> None:
        self._sights = sights
        self._check = check

    async def do(self, orders: list[_Order]) -> None:
        puts = [object_write for object_write in orders if object_write.is_put]
        await kube_crews.each(
            self._end, [object_write for object_write in orders if not object_write.is_put]
        )
        prepared = await kube_crews.each(self._prepare, puts)
        if any(_is_blank(cached) for cached in prepared):
            await self._check()  # once for all: it is a call
        both = list(zip(puts, prepared, strict=True))
        done = await kube_crews.each(lambda pair: self._fill(*pair), both)
        await kube_crews.each(
            self._put_alone,
            [object_write for object_write, is_done in zip(puts, done, strict=True) if not is_done],
        )

    async def _put_alone(self, order: _Order) -> None:
        """One with concurrent writes by others."""
        for _ in range(MOST_TRIES):
            cached = await self._prepare_seen(order, await self._sights.look(order.key))
            if _is_blank(cached):
                await self._check()
            if await self._fill(order, cached):
                return
        raise _busy(order.key)

    async def _prepare(self, order: _Order) -> Sight | None:
        """The object, created if needed, with the right spec; None if it has this record or a newer one.

        An unknown object is usually new. It is created without a read: the server reports a conflict.
        """
        cached = self._sights.known(order.key)
        if cached is None and order.stays_away:
            cached = await self._sights.look(order.key)
        return await self._prepare_seen(order, cached)

    async def _prepare_seen(self, order: _Order, seen: Sight | None) -> Sight | None:
        for _ in range(MOST_TRIES):
            try:
                if seen is None:
                    return None if order.stays_away else await self._create(order)
                if _is_of_another(order, seen):
                    return None
                if seen.sequence < order.sequence:
                    return await self._correct(order, seen)
                await self._release(order, seen)
            except Missed:
                seen = await self._sights.look(order.key)
            else:
                return None
        raise _busy(order.key)

    async def _create(self, order: _Order) -> Sight:
        try:
            placeholder = _blank(order, order.shown.spec, self._sights.namespace)
            return await self._sights.create(order.key, placeholder)
        except InvalidInput:
            spec = kube_projection.plain(order.shown).spec
            placeholder = _blank(order, spec, self._sights.namespace)
            return await self._sights.create(order.key, placeholder)

    async def _correct(self, order: _Order, seen: Sight) -> Sight:
        """Correct edits, and apply changes, outside of the status."""
        metadata, spec = _metadata_change(order, seen), _spec_change(order, seen)
        if spec:
            try:
                change = {"metadata": metadata, "spec": spec}
                return await self._sights.patch(order.key, seen, change)
            except InvalidInput:
                pass  # the spec is informative; the record follows
        if metadata:
            return await self._sights.patch(order.key, seen, {"metadata": metadata})
        return seen

    async def _fill(self, order: _Order, seen: Sight | None) -> bool:
        """Write the record, which makes it valid; False after a conflict."""
        try:
            if seen is not None:
                await self._release(order, await self._keep(order, seen))
        except Missed:
            return False
        return True

    async def _keep(self, order: _Order, seen: Sight) -> Sight:
        key, finished_at = order.key, order.shown.finished_at
        if not order.shown.status:
            return await self._sights.patch(key, seen, {"record": _fields(order.kept)})
        try:
            change = {"status": {**order.shown.status, "record": _fields(order.kept)}}
            return await self._sights.patch(
                key, seen, change, subresource="status", finished_at=finished_at
            )
        except InvalidInput:
            status = kube_projection.plain(order.shown).status
            change = {"status": {**status, "record": _fields(order.kept)}}
            return await self._sights.patch(
                key, seen, change, subresource="status", finished_at=finished_at
            )

    async def _release(self, order: _Order, seen: Sight) -> None:
        """The finalizer of a finished reservation that its user has deleted is removed."""
        if order.is_over and seen.is_leaving and seen.holds_on:
            await _let_go(self._sights, order.key, seen)

    async def _end(self, order: _Order) -> None:
        """Delete an object, or archive it."""
        cached = await self._sights.of(order.key)
        for _ in range(MOST_TRIES):
            if cached is None or cached.sequence > order.sequence or _is_of_another(order, cached):
                return
            try:
                await self._end_seen(order, cached)
            except Missed:
                cached = await self._sights.look(order.key)
            else:
                return
        raise _busy(order.key)

    async def _end_seen(self, order: _Order, seen: Sight) -> None:
        if not order.write.is_archived:
            if not seen.is_wish:
                await remove(self._sights, order.key, seen)
        elif metadata := _metadata_change(order, seen):
            await self._sights.patch(order.key, seen, {"metadata": metadata})
        self._sights.forget(order.key)


def _is_of_another(order: _Order, seen: Sight) -> bool:
    """Whether the reservation's object was deleted, and another one of its name created since."""
    return order.write.kind == "reservation" and seen.is_wish and seen.uid != order.uid


def _is_blank(seen: Sight | None) -> bool:
    """Whether it has no valid record: then only the head tells who may write one."""
    return seen is not None and seen.sequence <= 0


def _blank(order: _Order, spec: Spec, namespace: str) -> Seen:
    write, (_, name) = order.write, order.key
    if write.kind not in {"cluster", "reservation"}:
        metadata = Metadata(name, namespace, labels=kube_objects.labels_of(write.kind))
        return LedgerRecord(metadata, write.kind, BLANK)
    labels = {kube_objects.MADE_BY: kube_objects.BROKER, **_archive_labels(write)}
    finalizers = (RESERVATION_FINALIZER,) if order.keeps_hold else ()
    return Stored(Metadata(name, namespace, finalizers=finalizers, labels=labels), spec)


def _metadata_change(order: _Order, seen: Sight) -> dict[str, object]:
    if order.write.kind != "reservation":
        return {}
    change: dict[str, object] = {}
    if order.keeps_hold:
        change |= _holding(seen)
    elif seen.holds_on:
        change["finalizers"] = _others(seen)
    if order.write.is_archived != seen.is_archived:
        change["labels"] = _archive_labels(order.write) or _NOT_ARCHIVED
    return change


_NOT_ARCHIVED: Final = {kube_objects.ARCHIVED: None, kube_objects.FINISHED: None}


def _reclaiming(seen: Sight) -> dict[str, object]:
    return {"labels": _NOT_ARCHIVED, **_holding(seen)}


def _holding(seen: Sight) -> dict[str, object]:
    if seen.holds_on or seen.is_leaving:
        return {}
    return {"finalizers": [*seen.finalizers, RESERVATION_FINALIZER]}


def _spec_change(order: _Order, seen: Sight) -> Spec:
    """Of an object that a user made, only the target cluster: the rest of the spec is the user's."""
    wanted = order.shown.spec
    if seen.is_own:
        if seen.spec == kube_sights.spec_text(wanted):
            return {}
        has = kube_sights.spec_of(seen)
        return patches.difference(has, kube_projection.comparable(wanted))
    target = wanted.get("targetClusterID")
    if target and kube_sights.spec_of(seen).get("targetClusterID") != target:
        return {"targetClusterID": target}
    return {}


def _archive_labels(write: Write) -> dict[str, str]:
    if write.finished_at is None:
        return {}
    return {kube_objects.ARCHIVED: "true", kube_objects.FINISHED: hour_of(write.finished_at)}


async def _let_go(sights: Sights, key: Key, seen: Sight) -> Sight:
    return await sights.patch(key, seen, {"metadata": {"finalizers": _others(seen)}})


def _others(seen: Sight) -> list[str]:
    return [name for name in seen.finalizers if name != RESERVATION_FINALIZER]


def _fields(kept: Kept) -> dict[str, object]:
    return {"revision": kept.revision, "checksum": kept.checksum, "data": kept.data}


def _busy(key: Key) -> StoreFailed:
    kind, name = key
    return StoreFailed(
        f"{kube_sights.resource(kind)} {name}: too many conflicting writes by others",
        hint="find the other writer with `kubectl get --show-managed-fields`",
    )
