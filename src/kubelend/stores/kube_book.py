"""The Kubernetes store: the broker's custom resources are its state, and one object is the commit point.

Kubernetes has no transaction over several objects. A commit is one conditional write of the head, which
contains all its changes; the objects are written afterwards, and the next load finishes what was left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta

import structlog
from msgspec.structs import replace

from kubelend.core.events import Change
from kubelend.core.journal import Line
from kubelend.core.models import Reservation, ReservationId
from kubelend.core.records import Records
from kubelend.kube.client import Client
from kubelend.stores import (
    batches,
    kube_applying,
    kube_archive,
    kube_commits,
    kube_crews,
    kube_journal,
    kube_loading,
    kube_objects,
    kube_projection,
)
from kubelend.stores.batches import Batch
from kubelend.stores.kube_head import Mark, State, Write
from kubelend.stores.kube_keeping import Keeper
from kubelend.stores.kube_seals import Roll
from kubelend.stores.kube_sights import Key, Missed, Sight, Sights
from kubelend.stores.records import Damaged

log = structlog.get_logger("kubelend.store")


class Book:
    """The ledger in one namespace. Call `head.acquire` first to write, or `head.read` to read."""

    def __init__(self, client: Client, namespace: str, archive_for: timedelta) -> None:
        self.keeper = Keeper(client, namespace)
        self._client = client
        self._namespace = namespace
        self._archive_for = archive_for
        self._sights = Sights(client, namespace, self.keeper)
        self._journal = kube_journal.Shelf(client, namespace)
        self._is_applied = False
        """Whether the objects have all changes of the last commit."""
        self._roll: Roll | None = None
        """Digest of the unfinished reservations; None before it is known."""

    async def load(self) -> Records:
        """The working set; finishes the last commit."""
        state = self.keeper.state
        found = await kube_loading.read(self._sights, state)
        self._roll = kube_loading.roll(found.records, state.key)
        await self._settle()
        await kube_crews.each(self._reclaim, kube_loading.misplaced(found, state))
        placeholders = kube_loading.unfinished(found, self.keeper.state)
        self._tell_of(found.robbed.intersection(key for key, _ in placeholders))
        await kube_crews.each(self._forget, placeholders)
        await self.keeper.tidy()
        return kube_loading.arranged(found.records, self.keeper.state.revision)

    async def look(self) -> Records:
        """The working set as a consistent snapshot, without writing anything."""
        records, _ = await kube_loading.look(self.keeper, self._sights)
        return records

    async def commit(self, changes: Sequence[Change], revision: int) -> None:
        await self._settle()
        state, batch = self.keeper.state, batches.fold(changes)
        batches.check_order(state.revision, revision)
        finish_times = {deleted: await self._finish(deleted, batch) for deleted in batch.archived}
        archiving = kube_commits.joining(state, finish_times, self._archive_for)
        after = kube_commits.after(state, batch, revision, archiving, self._sights)
        cut = await self._journal.find(after, batch.cut) if batch.cut else None
        await self._write(replace(after, start=Mark.of(cut)) if cut else after, batch)
        self._is_applied = False
        # An error from here on is raised, although the commit is durable: the next load finishes it.
        await self._apply()

    async def archived(self, reservation: ReservationId) -> Reservation | None:
        """The last commit may have changes that are not in the objects yet."""
        state = self.keeper.state
        for write in state.changes.writes:
            if (write.kind, write.id) == ("reservation", reservation):
                return await self._just_archived(write)
        found = await self._find(reservation, is_archived=True)
        return found if found and self._is_kept(found) else None

    async def lines(self, after: int, limit: int) -> list[Line]:
        try:
            return await self._journal.read(self.keeper.state, after, limit, self.keeper.at)
        except Damaged:
            if not self.keeper.at:  # a new leader may have truncated the audit log
                await self.keeper.check()
            raise

    async def _write(self, after: State, batch: Batch) -> None:
        """Before the first load the digest is unknown: then the next load searches the archive, too."""
        live_set, changes = self._known_roll(), kube_commits.roll_changes(batch)
        digest = live_set.digest_after(changes) if live_set else ""
        await self.keeper.write(replace(after, unfinished=digest))
        if live_set is not None:
            live_set.note(changes)

    def _known_roll(self) -> Roll | None:
        """That of a new store is empty."""
        if self._roll is None and not self.keeper.state.sequence:
            self._roll = Roll(self.keeper.state.key)
        return self._roll

    async def _settle(self) -> None:
        """Apply the last commit to the objects, if no other broker has written since."""
        if not self._is_applied:
            await self.keeper.check()
            await self._apply()

    async def _apply(self) -> None:
        state = self.keeper.state
        await kube_applying.apply(
            self._sights, state.changes.writes, state.sequence, self.keeper.check
        )
        await self._journal.keep(state)
        await self._journal.cut(state)
        swept_until = await kube_archive.sweep(self._sights, state)
        # Stored with the next commit. After a restart before that the sweep is repeated.
        self.keeper.state = replace(state, swept_until=swept_until)
        self._is_applied = True

    async def _finish(self, reservation: ReservationId, batch: Batch) -> datetime:
        known = self._sights.finished_at(reservation)
        if reservation not in batch.reservations and known is not None:
            return known
        last = batch.reservations.get(reservation) or await self._find(reservation)
        return batches.finish(reservation, last)

    async def _find(
        self, reservation: ReservationId, *, is_archived: bool = False
    ) -> Reservation | None:
        name = kube_objects.name_of("reservation", reservation)
        found = await self._client.find(kube_objects.RESERVATIONS, name, self._namespace)
        if found is None or found.record is None or found.is_archived is not is_archived:
            return None
        record: Reservation = kube_loading.record("reservation", found, self._sights.seal_key)
        return record

    async def _just_archived(self, write: Write) -> Reservation | None:
        if not write.is_archived:
            return None
        if write.text:
            record: Reservation = kube_projection.read("reservation", write.text)
            return record
        moved = ReservationId(write.id)
        return await self._find(moved, is_archived=True) or await self._find(moved)

    def _is_kept(self, found: Reservation) -> bool:
        retention_limit = self.keeper.state.kept_from or batches.BEGINNING
        return found.finished_at is not None and found.finished_at >= retention_limit

    async def _reclaim(self, key: Key) -> None:
        await kube_applying.reclaim(self._sights, key)

    def _tell_of(self, robbed: Iterable[Key]) -> None:
        for key in robbed:
            log.warning(
                "Deleting ClusterAdvertisement without a stored record",
                name=key[1],
                namespace=self._namespace,
                hint="cordon the cluster again if it was cordoned",
            )

    async def _forget(self, blank: tuple[Key, Sight]) -> None:
        with suppress(Missed):  # changed by others
            await kube_applying.remove(self._sights, *blank)
