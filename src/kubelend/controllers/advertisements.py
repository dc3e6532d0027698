"""Reconciles the ClusterAdvertisement objects of the broker's namespace.

A cluster whose object is deleted offers nothing until it advertises again. What was lent there stays
reserved, because every reservation names its provider; it counts again with the next advertisement.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from kubelend.broker import service
from kubelend.broker.service import Broker
from kubelend.controllers import advertisement_plan, events, labels
from kubelend.controllers.advertisement_plan import (
    AdminRequest,
    AdvertisementAction,
    MergePatch,
)
from kubelend.controllers.reconciler import NextDue, Reconciler
from kubelend.core import models
from kubelend.core.errors import InvalidInput, Revoked, Unavailable
from kubelend.core.events import Change, ClusterDeleted, RecordDeleted
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import Role
from kubelend.core.members import Member, member_id
from kubelend.core.models import Cluster, ClusterId, Reservation
from kubelend.kube.client import Client
from kubelend.kube.events import EventRecorder
from kubelend.stores.kubernetes import objects, projection
from kubelend.wire import broker_objects
from kubelend.wire.broker_objects import ClusterAdvertisement
from kubelend.wire.events import EventRecord

RECONCILE_DELAY: Final = timedelta(milliseconds=100)
"""Delay of a reconcile after a change: further changes often follow, and the store is still writing."""
WRITE_INTERVAL: Final = timedelta(seconds=1)
"""Minimum time between two writes of an object: the status of a busy provider changes all the time."""
OUTDATED: Final = (
    "Ignored because the cluster has sent a newer advertisement; set a later timestamp"
)

_PAST: Final = datetime.min.replace(tzinfo=UTC)


class AdvertisementReconciler(Reconciler[ClusterAdvertisement]):
    """Call `on_change` as well, with committed changes."""

    def __init__(
        self, broker: Broker, client: Client, namespace: str, recorder: EventRecorder
    ) -> None:
        super().__init__(labels.ADVERTISEMENT_RESOURCE, broker, client, namespace, recorder)
        self._processed: dict[str, models.Advertisement] = {}
        """By object UID: the last advertisement processed since this broker leads."""
        self._aliases: dict[str, set[str]] = {}
        """Names of objects that are not named after their cluster, by cluster."""
        self._missing: dict[str, ClusterId] = {}
        """Clusters whose objects were missing in the last full check, by object name."""
        self._written_at: dict[str, float] = {}
        self._written: dict[str, ClusterAdvertisement] = {}
        """By UID: the objects with the last status that this broker has written since it leads."""
        self._staleness_due = NextDue()
        """When the next cluster may become stale."""

    def enqueue_all(self) -> None:
        self._staleness_due.set(_PAST)
        self._processed.clear()  # another leader may have processed more since
        self._written.clear()
        super().enqueue_all()

    def on_change(self, changes: Sequence[Change]) -> None:
        changed_names: dict[str, None] = {}
        for change in changes:
            match change:
                case Reservation():
                    changed_names.update(dict.fromkeys(filter(None, (change.target, *change.left))))
                case Cluster():
                    changed_names[change.id] = None
                    self._staleness_due.set(change.valid_until)
                case ClusterDeleted():
                    changed_names[change.cluster] = None
                case Member(role=Role.CLUSTER):
                    changed_names[change.name] = None
                case RecordDeleted(kind="member"):  # it may advertise again
                    changed_names[change.id.removeprefix(member_id(Role.CLUSTER, ""))] = None
        for cluster in changed_names:
            self._enqueue_cluster(cluster)

    def tick(self) -> None:
        """Enqueue clusters that have become stale; nothing else does."""
        now = self._broker.clock()
        if not self._staleness_due.is_due(now) or not self._broker.is_leader:
            return
        try:
            ledger, _ = self._broker.current()
        except Unavailable:  # lost leadership a moment ago
            return
        self._staleness_due.clear()
        for cluster in ledger.clusters.values():
            if cluster.is_stale(now):
                self._enqueue_cluster(cluster.id)
            else:
                self._staleness_due.set(cluster.valid_until)

    def _enqueue_cluster(self, cluster: str) -> None:
        self._enqueue(objects.record_object_name("cluster", cluster))
        for name in self._aliases.get(cluster, ()):
            self._enqueue(name)

    def _enqueue(self, name: str) -> None:
        self.queue.add_after(name, RECONCILE_DELAY)

    # -- reconcile

    async def _sync(self, found: ClusterAdvertisement) -> None:
        self._missing.pop(found.metadata.name, None)
        if labels.is_being_deleted(found.metadata):
            return
        request = advertisement_plan.admin_request(found.metadata)
        if request is not None and self._record_for(found) is not None:
            await self._administer(found, request)
            return
        if not advertisement_plan.is_record_object(found):
            self._aliases.setdefault(found.spec.cluster_id, set()).add(found.metadata.name)
        advertisement, error = self._advertisement(found)
        record, uid = self._record_for(found), found.metadata.uid
        action = advertisement_plan.plan_advertisement(
            found, advertisement, self._processed.get(uid), record
        )
        if advertisement is not None:
            if action is AdvertisementAction.ADVERTISE:
                await self._broker.advertise(advertisement)
            self._processed[uid] = advertisement
        match action:
            case AdvertisementAction.ADVERTISE:
                self._enqueue(found.metadata.name)
            case AdvertisementAction.IGNORE_OUTDATED:
                self._recorder.emit(EventRecord("Warning", "Outdated", OUTDATED, found))
                self._enqueue(found.metadata.name)
            case AdvertisementAction.REPAIR | AdvertisementAction.DELETE_ORPHAN:
                await self._repair(found, record)
            case None:
                self._drift.clear(found)
                await self._sync_status(found, error)

    async def _administer(self, found: ClusterAdvertisement, request: AdminRequest) -> None:
        """Carry out the request and remove it. Repeated after a crash in between, without further effect.

        It is read again, because it may have changed meanwhile.
        """
        cluster = ClusterId(found.spec.cluster_id)
        match request.annotation:
            case broker_objects.CORDON_ANNOTATION:
                await self._broker.cordon(cluster, request.reason)
                event = EventRecord("Normal", "Cordoned", request.reason, found)
            case broker_objects.UNCORDON_ANNOTATION:
                await self._broker.uncordon(cluster)
                event = EventRecord("Normal", "Uncordoned", "Open to new reservations", found)
            case _:
                _, drained = await self._broker.drain(cluster, request.reason)
                message = f"Reservations moved or released: {len(drained)}; {request.reason}"
                event = EventRecord("Normal", "Drained", message, found)
        current = await self._read_current(found.metadata.name)
        if current is None or advertisement_plan.admin_request(current.metadata) != request:
            return
        # Whatever its version: the store is about to write what the commit has changed.
        change = {"metadata": {"annotations": {request.annotation: None}}}
        await self._client.patch(self.resource, found.metadata.name, self._namespace, change)
        self._recorder.emit(event)

    async def _repair(self, found: ClusterAdvertisement, record: Cluster | None) -> None:
        """Usually the store has not finished; otherwise the object was edited."""
        if not self._drift.is_persistent(found):
            return
        current = await self._read_current(found.metadata.name)
        if current is None or self._record_for(current) is not record:
            return
        action = advertisement_plan.plan_advertisement(current, None, None, record)
        if action is AdvertisementAction.DELETE_ORPHAN:
            await self._broker.check_fencing()
            await self._delete_orphan(current)
        elif action is not None and record is not None and self._drift.may_repair(current, action):
            await self._broker.rewrite_record(record)

    async def _finalize(self, deleted: ClusterAdvertisement) -> None:
        record = self._record_for(deleted)
        processed = self._processed.get(deleted.metadata.uid) or self._advertisement(deleted)[0]
        if record is not None and advertisement_plan.is_withdrawn(deleted, processed, record):
            await self._broker.withdraw(record.id)

    def _expected_names(self, ledger: Ledger) -> Iterable[str]:
        known = {
            objects.record_object_name("cluster", cluster): cluster for cluster in ledger.clusters
        }
        self._missing = {
            name: cluster for name, cluster in known.items() if self.cache.find(name) is None
        }
        return self._missing

    async def _on_missing(self, name: str) -> None:
        """A new object is usually about to be created, so only those missing in a full check count."""
        cluster = self._missing.get(name)
        record = None if cluster is None else self._record_of(cluster)
        is_lost = record is not None and await self._read_current(name) is None
        # A cluster that has advertised meanwhile gets a new object.
        if record is not None and is_lost and self._record_of(record.id) is record:
            await self._broker.withdraw(record.id)
        self._missing.pop(name, None)

    def _forget(self, deleted: ClusterAdvertisement) -> None:
        name, cluster = deleted.metadata.name, deleted.spec.cluster_id
        self._aliases.get(cluster, set()).discard(name)
        if not self._aliases.get(cluster):
            self._aliases.pop(cluster, None)
        self._written_at.pop(name, None)
        self._processed.pop(deleted.metadata.uid, None)
        self._written.pop(deleted.metadata.uid, None)
        super()._forget(deleted)

    def _record_for(self, found: ClusterAdvertisement) -> Cluster | None:
        return self._record_of(ClusterId(found.spec.cluster_id))

    def _record_of(self, cluster: ClusterId) -> Cluster | None:
        ledger, _ = self._broker.current()
        return ledger.clusters.get(cluster)

    def _advertisement(
        self, found: ClusterAdvertisement
    ) -> tuple[models.Advertisement | None, str]:
        """The advertisement in the spec, and if it is rejected, why."""
        if labels.is_managed(found.metadata):
            return None, ""
        try:
            labels.check_not_revoked(self._broker.members, ClusterId(found.spec.cluster_id))
            return projection.advertisement_from_object(found), ""
        except (InvalidInput, Revoked) as error:
            return None, f"{advertisement_plan.REJECTED_PREFIX}{error}"

    # -- status

    async def _sync_status(self, found: ClusterAdvertisement, error: str) -> None:
        if not any(self._patches(found, error)):
            return
        name = found.metadata.name
        since = time.monotonic() - self._written_at.get(name, float("-inf"))
        if since < WRITE_INTERVAL.total_seconds():
            self.queue.add_after(name, WRITE_INTERVAL - timedelta(seconds=since))
            return
        await self._broker.wait_written()
        # Conditional on this version: a spec that has not been processed yet must not be marked as observed.
        if self.cache.find(name) is found:
            await self._write_status(found, error)

    def _patches(self, found: ClusterAdvertisement, error: str) -> tuple[MergePatch, MergePatch]:
        ledger, now = self._broker.current()
        cluster = ledger.clusters.get(ClusterId(found.spec.cluster_id))
        view = None if cluster is None else service.cluster_view(ledger, cluster)
        spec = {} if view is None else advertisement_plan.spec_patch(found, view)
        return spec, advertisement_plan.status_patch(found, view, error, now)

    async def _write_status(self, found: ClusterAdvertisement, error: str) -> None:
        self._written_at[found.metadata.name] = time.monotonic()
        spec, _ = self._patches(found, error)
        patched = await self._patch(found, {"spec": spec}) if spec else found
        if patched is not None:
            _, status = self._patches(patched, error)
            written = status and await self._patch(patched, {"status": status}, "status")
            if written:
                self._emit_events(patched, written)

    def _emit_events(self, before: ClusterAdvertisement, written: ClusterAdvertisement) -> None:
        """Since the last write of this broker: others may have edited the status."""
        known = self._written.get(written.metadata.uid, before)
        self._written[written.metadata.uid] = written
        for event in events.advertisement_events(known, written):
            self._recorder.emit(event)
