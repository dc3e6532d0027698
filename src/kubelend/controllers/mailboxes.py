"""The broker's end of the agents' transport `kubernetes`: namespaces that are clusters' mailboxes.

One watch for each kind over all namespaces, one clerk for each mailbox. Only the broker that leads answers;
the others keep up, so that one that takes over knows at once what was asked. docs/adr/0020.
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
from kubelend.core.models import ClusterId, Reservation
from kubelend.kube import resources, watching
from kubelend.kube.answers import Unreadable
from kubelend.kube.resources import Resource
from kubelend.kube.watching import Deleted, Listed
from kubelend.wire import broker_objects, mailboxes
from kubelend.wire.mailboxes import Namespace
from kubelend.wire.objects import Object

log = structlog.get_logger("kubelend.mailboxes")

GRACE: Final = timedelta(seconds=15)
"""For which mailboxes may be out of sight: the rest of the broker serves its callers meanwhile."""


NAMESPACES: Final = resources.of(Namespace, namespaced=False)


class Mailboxes:
    """Use `run` as a root task beside the broker's own."""

    def __init__(self, means: Means, own_namespace: str) -> None:
        """`own_namespace` has the broker's own objects, and is nobody's mailbox."""
        self._means = means
        self._own = own_namespace
        self._clerks: dict[str, Clerk] = {}
        self._strays = Strays(means.client)
        self._named = asyncio.Event()
        """Whether it is known which namespaces are mailboxes: before, objects tell nothing."""
        self._listed: set[str] = set()
        """Kinds of which all objects have been seen, and are followed from there."""
        self._leaving: list[Clerk] = []
        self._looks = Looks(broker_objects.Mailbox.plural, self._look)
        """By namespaces."""
        kinds = (NAMESPACES.plural, *(kind.plural for kind in KINDS))
        self._seeing = Seeing(kinds, " in mailboxes", GRACE)

    @property
    def clusters(self) -> list[ClusterId]:
        """Who has a mailbox."""
        return [clerk.cluster for clerk in self._clerks.values()]

    @property
    def unready(self) -> str | None:
        """Why agents cannot be heard in their mailboxes, or None."""
        return self._seeing.unready

    async def run(self) -> None:
        """Attend to all of them, for ever."""
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
            for clerk in self._clerks.values():
                await clerk.dismiss()

    # -- what is seen

    async def _follow(self, resource: Resource[Any], take: Callable[[Any, Any], None]) -> None:
        def report(problem: str) -> None:
            self._seeing.report(resource.plural, problem)
            if problem:
                log.warning("mailboxes cannot be seen", kind=resource.plural, problem=problem)
            else:
                log.info("mailboxes are seen", kind=resource.plural)

        if resource is not NAMESPACES:
            await self._named.wait()
        labels = mailboxes.OWNER if resource is NAMESPACES else ""
        # The broker's own objects can be many, and are no mail.
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
            log.warning("namespace cannot be a mailbox", namespace=name, cluster=cluster)
            return
        clerk = Clerk(self._means, name, ClusterId(cluster), lambda: self._looks.add(name))
        clerk.is_closing = found.metadata.deletion_timestamp is not None
        self._strays.forget(name)
        self._clerks[name] = clerk
        self._looks.add(name)
        log.info("mailbox opened", namespace=name, cluster=cluster)

    def _close(self, name: str) -> None:
        clerk = self._clerks.pop(name, None)
        if clerk is not None:
            for one in clerk.shelf.all():
                self._strays.see(one)
            self._leaving.append(clerk)
            self._looks.add(name)
            log.info("mailbox closed", namespace=name, cluster=clerk.cluster)

    def _see(self, resource: Resource[Any], change: watching.Change[Any]) -> None:
        match change:
            case Listed(objects, unreadable):
                uids = {one.metadata.uid for one in objects} | {one.uid for one in unreadable}
                for name, clerk in self._clerks.items():
                    clerk.shelf.keep_only(resource.kind, uids)
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
        clerk = self._clerks.get(name)
        if self._strays.see(found) if clerk is None else clerk.shelf.see(found):
            self._looks.add(name)

    def _drop(self, gone: Object) -> None:
        name = gone.metadata.namespace
        clerk = self._clerks.get(name)
        if clerk is None:
            self._strays.miss(gone)
        else:
            clerk.shelf.miss(gone)
            self._looks.add(name)

    def _complain(self, resource: Resource[Any], found: Unreadable) -> None:
        if found.namespace in self._clerks and not found.is_deleted:
            log.warning(
                "object in a mailbox cannot be read",
                kind=resource.kind,
                namespace=found.namespace,
                object=found.name,
                why=found.problem,
            )

    # -- what the ledger tells

    def _hear(self, changes: Sequence[Change] | None) -> None:
        if changes is None:  # all was read anew: clerks notice by themselves
            for name in (*self._clerks, *self._strays.namespaces):
                self._looks.add(name)
        for change in changes or ():
            if isinstance(change, Reservation):
                for clerk in self._of(instructions.concerned(change)):
                    clerk.shelf.hear(change.id)
                    self._looks.add(clerk.namespace)
            elif isinstance(change, Archived):
                for clerk in self._clerks.values():
                    if clerk.shelf.tells_of(change.reservation):
                        clerk.shelf.hear(change.reservation)
                        self._looks.add(clerk.namespace)

    def _of(self, clusters: set[ClusterId]) -> Iterator[Clerk]:
        return (clerk for clerk in self._clerks.values() if clerk.cluster in clusters)

    # -- what is done

    async def _tick(self) -> None:
        """What was refused long ago is taken away by the time alone."""
        while True:
            await asyncio.sleep(alarms.TICK)
            for name, clerk in self._clerks.items():
                if clerk.is_due:
                    self._looks.add(name)

    async def _look(self, name: str) -> None:
        while self._leaving:
            await self._leaving.pop().dismiss()
        clerk = self._clerks.get(name)
        if clerk is not None:
            if await self._is_known(clerk):
                await clerk.attend()
        elif self._means.broker.leadership.leads:
            await self._strays.let_go(name)

    async def _is_known(self, clerk: Clerk) -> bool:
        """Whether all of a mailbox has been seen. What was there before it became one is listed here."""
        if any(kind.kind not in self._listed for kind in KINDS):
            return False  # the first list is to come, and has all of it
        for kind in KINDS:
            if clerk.shelf.awaits(kind.kind):
                resource: Resource[Any] = resources.of(kind)
                listing = await self._means.client.list(resource, clerk.namespace)
                for one in listing.unreadable:
                    self._complain(resource, one)
                clerk.shelf.fill(kind.kind, listing.objects)
        return True
