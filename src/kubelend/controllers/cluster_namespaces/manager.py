"""Runs the broker's side of the agents' transport `kubernetes`: one reconciler for each cluster namespace.

One watch for each kind over all namespaces. Only the leader acts; followers keep their caches current, so
that a new leader knows what is pending. See docs/adr/0033-spec-and-status-in-cluster-namespaces.md.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import aclosing
from datetime import timedelta
from typing import Any, Final

import structlog

from kubelend.broker import streams
from kubelend.controllers import labels as controllers_labels
from kubelend.controllers import reconciler as controllers_reconciler
from kubelend.controllers.cluster_namespaces.handlers import Dependencies
from kubelend.controllers.cluster_namespaces.plan import NAMESPACE_KINDS, NamespaceCache
from kubelend.controllers.cluster_namespaces.reconciler import NamespaceReconciler
from kubelend.core.errors import Conflict, NotFound
from kubelend.core.events import Archived, Change
from kubelend.core.models import ClusterId
from kubelend.core.models import Reservation as Record
from kubelend.kits.workqueue import ReconcileQueue
from kubelend.kube import informer, resources
from kubelend.kube.codec import UndecodableObject
from kubelend.kube.informer import Deleted, Listed, WatchHealth
from kubelend.kube.resources import Resource
from kubelend.wire import broker_objects, cluster_namespaces
from kubelend.wire.broker_objects import RESERVATION_FINALIZER, Reservation
from kubelend.wire.cluster_namespaces import Namespace
from kubelend.wire.objects import Object

log = structlog.get_logger("kubelend.cluster_namespaces")

WATCH_GRACE: Final = timedelta(seconds=15)
"""For which the watches may fail before the broker is not ready: its REST interface works meanwhile."""


NAMESPACE_RESOURCE: Final = resources.resource_for(Namespace, namespaced=False)


class ClusterNamespaces:
    """Use `run` as a root task beside the broker's own."""

    def __init__(self, dependencies: Dependencies, own_namespace: str) -> None:
        """`own_namespace` has the broker's own objects, and is never a cluster namespace."""
        self._dependencies = dependencies
        self._own_namespace = own_namespace
        self._reconcilers: dict[str, NamespaceReconciler] = {}
        self._caches: defaultdict[str, NamespaceCache] = defaultdict(NamespaceCache)
        """Objects by namespace, also of others: a label can be added at any time, and removed."""
        self._namespaces_known = asyncio.Event()
        """Set once the cluster namespaces are known: objects are not handled before."""
        self._listed: set[str] = set()
        """Kinds that have been listed completely, and are watched from there."""
        self._stopping: list[NamespaceReconciler] = []
        self._queue = ReconcileQueue(broker_objects.ClusterSession.plural, self._reconcile, log)
        """By namespace."""
        kinds = (NAMESPACE_RESOURCE.plural, *(kind.plural for kind in NAMESPACE_KINDS))
        self._watch_health = WatchHealth(kinds, " in cluster namespaces", WATCH_GRACE)

    @property
    def clusters(self) -> list[ClusterId]:
        return [reconciler.cluster for reconciler in self._reconcilers.values()]

    @property
    def unready(self) -> str | None:
        """Why requests in cluster namespaces cannot be watched, or None."""
        return self._watch_health.unready

    async def run(self) -> None:
        """Reconcile all cluster namespaces. Runs until cancelled."""
        listeners = self._dependencies.broker.listeners
        listeners.append(self._on_change)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(
                    self._watch(NAMESPACE_RESOURCE, self._handle_namespace), name="namespaces"
                )
                for kind in NAMESPACE_KINDS:
                    group.create_task(
                        self._watch(resources.resource_for(kind), self._handle), name=kind.plural
                    )
                group.create_task(self._queue.run(), name="reconcilers")
                group.create_task(self._tick(), name="time")
        finally:
            listeners.remove(self._on_change)
            for reconciler in self._reconcilers.values():
                await reconciler.stop()

    # -- watch events

    async def _watch(self, resource: Resource[Any], handle: Callable[[Any, Any], None]) -> None:
        kind = resource.plural

        def report(error: str) -> None:
            self._watch_health.report(kind, error)
            if error:
                log.warning(
                    "Watch of cluster namespaces failed, will retry", kind=kind, error=error
                )
            else:
                log.info("Watching cluster namespaces", kind=kind)

        labels, fields = cluster_namespaces.CLUSTER_LABEL, ""
        if resource is not NAMESPACE_RESOURCE:
            await self._namespaces_known.wait()
            # The broker's own objects can be many, and are no requests.
            labels, fields = "", f"metadata.namespace!={self._own_namespace}"
        changes = informer.list_and_watch(
            self._dependencies.client, resource, labels=labels, fields=fields, report=report
        )
        async with aclosing(changes):
            async for change in changes:
                handle(resource, change)
                if isinstance(change, Listed):
                    self._watch_health.listed(resource.plural)

    def _handle_namespace(self, _: Resource[Namespace], change: informer.Change[Namespace]) -> None:
        match change:
            case Listed(objects, _):
                present = {one.metadata.name for one in objects}
                for name in self._reconcilers.keys() - present:
                    self._remove_namespace(name)
                for one in objects:
                    self._add_namespace(one)
                self._namespaces_known.set()
            case Deleted(found):
                self._remove_namespace(found.metadata.name)
            case Namespace():
                self._add_namespace(change)

    def _add_namespace(self, found: Namespace) -> None:
        name, cluster = found.metadata.name, found.cluster_id
        known = self._reconcilers.get(name)
        if known is not None and known.cluster == cluster:
            known.is_being_deleted = found.metadata.deletion_timestamp is not None
            return
        if known is not None:
            self._remove_namespace(name)
        if name == self._own_namespace or not cluster:
            log.warning("Ignoring label of namespace", namespace=name, cluster=cluster)
            return
        reconciler = NamespaceReconciler(
            self._dependencies,
            name,
            ClusterId(cluster),
            self._caches[name],
            lambda: self._queue.add(name),
        )
        reconciler.is_being_deleted = found.metadata.deletion_timestamp is not None
        self._reconcilers[name] = reconciler
        self._queue.add(name)
        log.info("Cluster namespace added", namespace=name, cluster=cluster)

    def _remove_namespace(self, name: str) -> None:
        reconciler = self._reconcilers.pop(name, None)
        if reconciler is not None:
            self._stopping.append(reconciler)
            self._queue.add(name)
            log.info("Cluster namespace removed", namespace=name, cluster=reconciler.cluster)

    def _handle(self, resource: Resource[Any], change: informer.Change[Any]) -> None:
        match change:
            case Listed(objects, unreadable):
                uids = {one.metadata.uid for one in objects} | {one.uid for one in unreadable}
                for one in objects:
                    self._caches[one.metadata.namespace].handle(one)
                for cache in self._caches.values():
                    cache.on_list(resource.kind, uids)
                self._listed.add(resource.kind)
                self._enqueue_all()
            case Deleted(found):
                self._caches[found.metadata.namespace].on_delete(found)
                self._queue.add(found.metadata.namespace)
            case UndecodableObject():
                self._log_undecodable(resource, change)
            case found:
                if self._caches[found.metadata.namespace].handle(found):
                    self._queue.add(found.metadata.namespace)

    def _enqueue_all(self) -> None:
        for name in {*self._reconcilers, *self._caches}:
            self._queue.add(name)

    def _log_undecodable(self, resource: Resource[Any], found: UndecodableObject) -> None:
        if found.namespace in self._reconcilers and not found.is_deleted:
            log.warning(
                "Skipping object that cannot be decoded",
                kind=resource.kind,
                namespace=found.namespace,
                name=found.name,
                error=found.error,
            )

    # -- changes of the ledger

    def _on_change(self, changes: Sequence[Change] | None) -> None:
        if changes is None:  # the ledger was reloaded: reconcilers compare everything by themselves
            self._enqueue_all()
        known = self._reconcilers.values()
        for change in changes or ():
            if isinstance(change, Record):
                changed, clusters = change.id, streams.clusters_of(change)
                affected = [one for one in known if one.cluster in clusters]
            elif isinstance(change, Archived):
                changed = change.reservation
                affected = [one for one in known if one.cache.shows(changed)]
            else:
                continue
            for reconciler in affected:
                reconciler.cache.enqueue_reservation(changed)
                self._queue.add(reconciler.namespace)

    # -- reconcile

    async def _tick(self) -> None:
        """Rejected requests are deleted after a time, without any event."""
        while True:
            await asyncio.sleep(controllers_reconciler.TICK_SECONDS)
            for name, reconciler in self._reconcilers.items():
                if reconciler.is_due:
                    self._queue.add(name)

    async def _reconcile(self, name: str) -> None:
        while self._stopping:
            await self._stopping.pop().stop()
        if any(kind.kind not in self._listed for kind in NAMESPACE_KINDS):
            return  # the first lists have not arrived
        reconciler = self._reconcilers.get(name)
        if reconciler is not None:
            await reconciler.reconcile()
        elif self._dependencies.broker.leadership.is_leader:
            await self._remove_finalizers(name)

    async def _remove_finalizers(self, namespace: str) -> None:
        """Of a namespace that lost its label. After a conflict the watch reports the object again."""
        for found in filter(has_leftover_finalizer, self._caches[namespace].all()):
            known = found.metadata
            left = [one for one in known.finalizers if one != RESERVATION_FINALIZER]
            change = {"metadata": {"finalizers": left, "resourceVersion": known.resource_version}}
            resource = controllers_labels.RESERVATION_RESOURCE
            with contextlib.suppress(NotFound, Conflict):
                await self._dependencies.client.patch(resource, known.name, namespace, change)


def has_leftover_finalizer(found: Object) -> bool:
    """Whether it got its finalizer in a cluster namespace. Objects with a record are a store's."""
    if not isinstance(found, Reservation) or not controllers_labels.has_finalizer(found.metadata):
        return False
    was_managed = (
        found.status.instruction is not None
        or cluster_namespaces.IDEMPOTENCY_ANNOTATION in found.metadata.annotations
    )
    return was_managed and found.status.record is None
