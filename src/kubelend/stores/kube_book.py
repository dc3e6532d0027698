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
from kubelend.core.journal import AuditLine
from kubelend.core.models import Reservation, ReservationId
from kubelend.core.records import WorkingSet
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
from kubelend.stores.batches import WriteBatch
from kubelend.stores.kube_head import AuditPosition, HeadState, RecordWrite
from kubelend.stores.kube_keeping import HeadRecord
from kubelend.stores.kube_seals import LiveSetDigest
from kubelend.stores.kube_sights import CachedObject, ObjectCache, ObjectKey, StaleWrite
from kubelend.stores.records import CorruptRecord

log = structlog.get_logger("kubelend.store")


class KubernetesLedger:
    """The ledger in one namespace. Call `head.acquire` first to write, or `head.read` to read."""

    def __init__(self, client: Client, namespace: str, archive_for: timedelta) -> None:
        self.head = HeadRecord(client, namespace)
        self._client = client
        self._namespace = namespace
        self._archive_for = archive_for
        self._cache = ObjectCache(client, namespace, self.head)
        self._audit_segments = kube_journal.AuditSegments(client, namespace)
        self._is_applied = False
        """Whether the objects have all changes of the last commit."""
        self._live_set: LiveSetDigest | None = None
        """Digest of the unfinished reservations; None before it is known."""

    async def load(self) -> WorkingSet:
        """The working set; finishes the last commit."""
        state = self.head.state
        found = await kube_loading.load_objects(self._cache, state)
        self._live_set = kube_loading.live_set_of(found.records, state.key)
        await self._finish_last_commit()
        await kube_crews.gather_limited(self._unarchive, kube_loading.to_unarchive(found, state))
        placeholders = kube_loading.abandoned_placeholders(found, self.head.state)
        self._log_without_record(found.without_record.intersection(key for key, _ in placeholders))
        await kube_crews.gather_limited(self._delete_placeholder, placeholders)
        await self.head.collect_garbage()
        return kube_loading.working_set(found.records, self.head.state.revision)

    async def read_only(self) -> WorkingSet:
        """The working set as a consistent snapshot, without writing anything."""
        records, _ = await kube_loading.snapshot(self.head, self._cache)
        return records

    async def commit(self, changes: Sequence[Change], revision: int) -> None:
        await self._finish_last_commit()
        state, batch = self.head.state, batches.fold(changes)
        batches.check_revision(state.revision, revision)
        finish_times = {
            deleted: await self._finish_time(deleted, batch) for deleted in batch.archived
        }
        archiving = kube_commits.plan_archiving(state, finish_times, self._archive_for)
        after = kube_commits.state_after(state, batch, revision, archiving, self._cache)
        cut = (
            await self._audit_segments.chain_head_at(after, batch.truncate_to)
            if batch.truncate_to
            else None
        )
        await self._write_head(replace(after, start=AuditPosition.of(cut)) if cut else after, batch)
        self._is_applied = False
        # An error from here on is raised, although the commit is durable: the next load finishes it.
        await self._apply_last_commit()

    async def archived(self, reservation: ReservationId) -> Reservation | None:
        """The last commit may have changes that are not in the objects yet."""
        state = self.head.state
        for write in state.changes.writes:
            if (write.kind, write.id) == ("reservation", reservation):
                return await self._archived_by(write)
        found = await self._find_reservation(reservation, is_archived=True)
        return found if found and self._is_retained(found) else None

    async def lines(self, after: int, limit: int) -> list[AuditLine]:
        try:
            return await self._audit_segments.read(
                self.head.state, after, limit, self.head.read_version
            )
        except CorruptRecord:
            if not self.head.read_version:  # a new leader may have truncated the audit log
                await self.head.check_fencing()
            raise

    async def _write_head(self, after: HeadState, batch: WriteBatch) -> None:
        """Before the first load the digest is unknown: then the next load searches the archive, too."""
        live_set, changes = self._known_live_set(), kube_commits.live_set_changes(batch)
        digest = live_set.digest_after(changes) if live_set else ""
        await self.head.write(replace(after, unfinished=digest))
        if live_set is not None:
            live_set.apply(changes)

    def _known_live_set(self) -> LiveSetDigest | None:
        """That of a new store is empty."""
        if self._live_set is None and not self.head.state.sequence:
            self._live_set = LiveSetDigest(self.head.state.key)
        return self._live_set

    async def _finish_last_commit(self) -> None:
        """Apply the last commit to the objects, if no other broker has written since."""
        if not self._is_applied:
            await self.head.check_fencing()
            await self._apply_last_commit()

    async def _apply_last_commit(self) -> None:
        state = self.head.state
        await kube_applying.apply_writes(
            self._cache, state.changes.writes, state.sequence, self.head.check_fencing
        )
        await self._audit_segments.create_segments(state)
        await self._audit_segments.delete_truncated(state)
        swept_until = await kube_archive.sweep_archive(self._cache, state)
        # Stored with the next commit. After a restart before that the sweep is repeated.
        self.head.state = replace(state, swept_until=swept_until)
        self._is_applied = True

    async def _finish_time(self, reservation: ReservationId, batch: WriteBatch) -> datetime:
        known = self._cache.finished_at(reservation)
        if reservation not in batch.reservations and known is not None:
            return known
        last = batch.reservations.get(reservation) or await self._find_reservation(reservation)
        return batches.finish_time(reservation, last)

    async def _find_reservation(
        self, reservation: ReservationId, *, is_archived: bool = False
    ) -> Reservation | None:
        name = kube_objects.record_object_name("reservation", reservation)
        found = await self._client.find(kube_objects.STORED_RESERVATIONS, name, self._namespace)
        if found is None or found.record is None or found.is_archived is not is_archived:
            return None
        record: Reservation = kube_loading.decode_stored_record(
            "reservation", found, self._cache.signature_key
        )
        return record

    async def _archived_by(self, write: RecordWrite) -> Reservation | None:
        if not write.is_archived:
            return None
        if write.text:
            record: Reservation = kube_projection.decode_record_text("reservation", write.text)
            return record
        moved = ReservationId(write.id)
        return await self._find_reservation(
            moved, is_archived=True
        ) or await self._find_reservation(moved)

    def _is_retained(self, found: Reservation) -> bool:
        retention_limit = self.head.state.kept_from or batches.MIN_TIME
        return found.finished_at is not None and found.finished_at >= retention_limit

    async def _unarchive(self, key: ObjectKey) -> None:
        await kube_applying.unarchive(self._cache, key)

    def _log_without_record(self, without_record: Iterable[ObjectKey]) -> None:
        for key in without_record:
            log.warning(
                "Deleting ClusterAdvertisement without a stored record",
                name=key[1],
                namespace=self._namespace,
                hint="cordon the cluster again if it was cordoned",
            )

    async def _delete_placeholder(self, placeholder: tuple[ObjectKey, CachedObject]) -> None:
        with suppress(StaleWrite):  # changed by others
            await kube_applying.delete_object(self._cache, *placeholder)
