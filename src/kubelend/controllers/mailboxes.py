"""Runs the broker's side of the agents' transport `kubernetes`: one reconciler for each cluster namespace.

One watch for each kind over all namespaces. Only the leader answers requests; followers keep their caches
current, so that a new leader knows all pending requests. See docs/adr/0020-cluster-namespaces.md.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from datetime import timedelta
from typing import Any, Final

import structlog

from kubelend.broker import instructions
from kubelend.controllers import alarms
from kubelend.controllers.looking import Looks
from kubelend.controllers.mailbox_clerk import Clerk
from kubelend.controllers.mailbox_pen import Means
from kubelend.controllers.mailbox_shelves import KINDS
from kubelend.controllers.mailbox_strays import Strays
from kubelend.controllers.seeing import Seeing
from kubelend.core.events import Archived, Change
from kubelend.core.models import ClusterId
from kubelend.core.models import Reservation as Record
from kubelend.kube import resources, watching
from kubelend.kube.answers import Unreadable
from kubelend.kube.resources import Resource
from kubelend.kube.watching import Deleted, Listed
from kubelend.wire import broker_objects, mailboxes
from kubelend.wire.mailboxes import Namespace
from kubelend.wire.objects import Object

log = structlog.get_logger("kubelend.cluster_namespaces")

GRACE: Final = timedelta(seconds=15)
"""For which the watches may fail before the broker is not ready: its REST interface works meanwhile."""


NAMESPACES: Final = resources.of(Namespace, namespaced=False)


class Mailboxes:
    """Use `run` as a root task beside the broker's own."""

    def __init__(self, means: Means, own_namespace: str) -> None:
        """`own_namespace` has the broker's own objects, and is never a cluster namespace."""
        self._means = means
        self._own = own_namespace
        self._clerks: dict[str, Clerk] = {}
        self._strays = Strays(means.client)
        self._named = asyncio.Event()
        """Set once the cluster namespaces are known: objects are not handled before."""
        self._listed: set[str] = set()
        """Kinds that have been listed completely, and are watched from there."""
        self._leaving: list[Clerk] = []
        self._looks = Looks(broker_objects.Mailbox.plural, self._look)
        """By namespace."""
        kinds = (NAMESPACES.plural, *(kind.plural for kind in KINDS))
        self._seeing = Seeing(kinds, " in cluster namespaces", GRACE)

    @property
    def clusters(self) -> list[ClusterId]:
        """Clusters that have a cluster namespace."""
        return [reconciler.cluster for reconciler in self._clerks.values()]

    @property
    def unready(self) -> str | None:
        """Why requests in cluster namespaces cannot be watched, or None."""
        return self._seeing.unready

    async def run(self) -> None:
        """Reconcile all cluster namespaces. Runs until cancelled."""
        listeners = self._means.broker.listeners
        listeners.append(self._hear)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._follow(NAMESPACES, self._see_namespace), name="namespaces")
                for kind in KINDS:
                    group.create_task(self._follow(resources.of(kind), self._see), name=kind.plural)
                group.create_task(self._looks.run(), name="clerks")
                group.create_task(self._tick(), name="time")
        finally:
            listeners.remove(self._hear)
            for reconciler in self._clerks.values():
                await reconciler.dismiss()

    # -- watch events

    async def _follow(self, resource: Resource[Any], take: Callable[[Any, Any], None]) -> None:
        def report(error: str) -> None:
            self._seeing.report(resource.plural, error)
            if error:
                log.warning(
                    "Watch of cluster namespaces failed, will retry",
                    kind=resource.plural,
                    error=error,
                )
            else:
                log.info("Watching cluster namespaces", kind=resource.plural)

        if resource is not NAMESPACES:
            await self._named.wait()
        labels = mailboxes.OWNER if resource is NAMESPACES else ""
        # The broker's own objects can be many, and are no requests.
        fields = "" if resource is NAMESPACES else f"metadata.namespace!={self._own}"
        changes = watching.follow(
            self._means.client, resource, labels=labels, fields=fields, report=report
        )
        async with aclosing(changes):
            async for change in changes:
                take(resource, change)
                if isinstance(change, Listed):
                    self._seeing.listed(resource.plural)

    def _see_namespace(self, _: Resource[Namespace], change: watching.Change[Namespace]) -> None:
        match change:
            case Listed(objects, _):
                present = {one.metadata.name for one in objects}
                for name in self._clerks.keys() - present:
                    self._close(name)
                for one in objects:
                    self._open(one)
                self._named.set()
            case Deleted(found):
                self._close(found.metadata.name)
            case Namespace():
                self._open(change)

    def _open(self, found: Namespace) -> None:
        name, cluster = found.metadata.name, found.owner
        known = self._clerks.get(name)
        if known is not None and known.cluster == cluster:
            known.is_closing = found.metadata.deletion_timestamp is not None
            return
        if known is not None:
            self._close(name)
        if name == self._own or not cluster:
            log.warning("Ignoring label of namespace", namespace=name, cluster=cluster)
            return
        reconciler = Clerk(self._means, name, ClusterId(cluster), lambda: self._looks.add(name))
        reconciler.is_closing = found.metadata.deletion_timestamp is not None
        self._strays.forget(name)
        self._clerks[name] = reconciler
        self._looks.add(name)
        log.info("Cluster namespace added", namespace=name, cluster=cluster)

    def _close(self, name: str) -> None:
        reconciler = self._clerks.pop(name, None)
        if reconciler is not None:
            for one in reconciler.shelf.all():
                self._strays.see(one)
            self._leaving.append(reconciler)
            self._looks.add(name)
            log.info("Cluster namespace removed", namespace=name, cluster=reconciler.cluster)

    def _see(self, resource: Resource[Any], change: watching.Change[Any]) -> None:
        match change:
            case Listed(objects, unreadable):
                uids = {one.metadata.uid for one in objects} | {one.uid for one in unreadable}
                for name, reconciler in self._clerks.items():
                    reconciler.shelf.keep_only(resource.kind, uids)
                    self._looks.add(name)
                if resource.kind == broker_objects.Reservation.kind:
                    self._strays.keep_only(uids)
                self._listed.add(resource.kind)
                for one in objects:
                    self._take(one)
            case Deleted(found):
                self._drop(found)
            case Unreadable():
                self._complain(resource, change)
            case _:
                self._take(change)

    def _take(self, found: Object) -> None:
        name = found.metadata.namespace
        reconciler = self._clerks.get(name)
        if self._strays.see(found) if reconciler is None else reconciler.shelf.see(found):
            self._looks.add(name)

    def _drop(self, gone: Object) -> None:
        name = gone.metadata.namespace
        reconciler = self._clerks.get(name)
        if reconciler is None:
            self._strays.miss(gone)
        else:
            reconciler.shelf.miss(gone)
            self._looks.add(name)

    def _complain(self, resource: Resource[Any], found: Unreadable) -> None:
        if found.namespace in self._clerks and not found.is_deleted:
            log.warning(
                "Skipping object that cannot be decoded",
                kind=resource.kind,
                namespace=found.namespace,
                name=found.name,
                error=found.problem,
            )

    # -- changes of the ledger

    def _hear(self, changes: Sequence[Change] | None) -> None:
        if changes is None:  # the ledger was reloaded: reconcilers compare everything by themselves
            for name in (*self._clerks, *self._strays.namespaces):
                self._looks.add(name)
        for change in changes or ():
            if isinstance(change, Record):
                for reconciler in self._of(instructions.concerned(change)):
                    reconciler.shelf.hear(change.id)
                    self._looks.add(reconciler.namespace)
            elif isinstance(change, Archived):
                for reconciler in self._clerks.values():
                    if reconciler.shelf.tells_of(change.reservation):
                        reconciler.shelf.hear(change.reservation)
                        self._looks.add(reconciler.namespace)

    def _of(self, clusters: set[ClusterId]) -> Iterator[Clerk]:
        return (
            reconciler for reconciler in self._clerks.values() if reconciler.cluster in clusters
        )

    # -- reconcile

    async def _tick(self) -> None:
        """Rejected requests are deleted after a time, without any event."""
        while True:
            await asyncio.sleep(alarms.TICK)
            for name, reconciler in self._clerks.items():
                if reconciler.is_due:
                    self._looks.add(name)

    async def _look(self, name: str) -> None:
        while self._leaving:
            await self._leaving.pop().dismiss()
        reconciler = self._clerks.get(name)
        if reconciler is not None:
            if await self._is_known(reconciler):
                await reconciler.attend()
        elif self._means.broker.leadership.leads:
            await self._strays.let_go(name)

    async def _is_known(self, clerk: Clerk) -> bool:
        """Whether all objects are in the cache. Those from before the label was set are listed here."""
        if any(kind.kind not in self._listed for kind in KINDS):
            return False  # the first list has not arrived, and has all of them
        for kind in KINDS:
            if clerk.shelf.awaits(kind.kind):
                resource: Resource[Any] = resources.of(kind)
                listing = await self._means.client.list(resource, clerk.namespace)
                for one in listing.unreadable:
                    self._complain(resource, one)
                clerk.shelf.fill(kind.kind, listing.objects)
        return True
