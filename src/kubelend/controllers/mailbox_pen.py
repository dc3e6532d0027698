"""Writes the objects of a cluster namespace. Each result is put into the cache as the API server returned it.

`NamespaceReconciler` decides what is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import NamedTuple

from msgspec.structs import replace

from kubelend.broker import parties
from kubelend.broker.service import Broker
from kubelend.broker.speakers import Speakers
from kubelend.controllers import mailbox_answers, mailbox_plans, marks, removals
from kubelend.controllers.mailbox_plans import Tell, Told
from kubelend.controllers.mailbox_shelves import Shelf
from kubelend.core.errors import InvalidInput, NotFound
from kubelend.core.models import ClusterId
from kubelend.core.models import Reservation as Record
from kubelend.kube import resources
from kubelend.kube.client import Client
from kubelend.kube.resources import Resource
from kubelend.stores import kube_objects
from kubelend.stores.kube_objects import Stored
from kubelend.wire import mailboxes
from kubelend.wire.broker_objects import RESERVATION_FINALIZER, Reservation
from kubelend.wire.conversion import Terms
from kubelend.wire.objects import Kind, ProviderInstruction, Reply

AT_ONCE = 16
"""Concurrent writes in one namespace."""

Granting = Callable[[Record, ClusterId], Awaitable[str | None]]


class Means(NamedTuple):
    """Dependencies of all cluster namespaces."""

    client: Client
    broker: Broker
    terms: Terms
    speakers: Speakers | None = None
    """Without it every agent of a cluster may send requests."""
    granting: Granting | None = None
    """Signs the grants for the two sides of a reservation."""
    silence: timedelta = timedelta(minutes=15)
    """After which an agent session without requests expires."""


class Pen:
    """Writes into one cluster namespace."""

    def __init__(self, means: Means, namespace: str, cluster: ClusterId, shelf: Shelf) -> None:
        self._means = means
        self._namespace = namespace
        self._cluster = cluster
        self._shelf = shelf
        self._writes = asyncio.Semaphore(AT_ONCE)

    async def tell_own(
        self, seen: Told | None, record: Record, question: str | None = None
    ) -> None:
        part = mailbox_answers.part(self._cluster, record, mailbox_answers.REQUESTER)
        if part is None or isinstance(seen, ProviderInstruction):
            return
        target = await self._show(record) if seen is None else seen
        response = await self._said(Tell(part, seen), question)
        status = mailbox_plans.own_status(target, record, response, self._means.broker.clock())
        await self._patch(marks.RESERVATIONS, target.metadata.name, {"status": status}, "status")

    async def _show(self, record: Record) -> Stored:
        """With all fields, or the minimal ones if the server's CRD rejects them."""
        create, kind = self._means.client.create, kube_objects.RESERVATIONS
        async with self._writes:
            try:
                return await create(kind, mailbox_plans.own_object(record, self._namespace))
            except InvalidInput:
                least = mailbox_plans.own_object(record, self._namespace, in_full=False)
                return await create(kind, least)

    async def tell_lent(self, step: Tell, question: str | None = None) -> None:
        response = await self._said(step, question)
        if step.seen is None:
            made = mailbox_plans.lent_object(step.instruction, response, self._namespace)
            async with self._writes:
                self._shelf.see(
                    await self._means.client.create(resources.of(ProviderInstruction), made)
                )
        elif isinstance(step.seen, ProviderInstruction):
            spec = mailbox_plans.lent_change(step.instruction, response)
            await self.patch(resources.of(ProviderInstruction), step.seen, {"spec": spec})

    async def _said(self, step: Tell, question: str | None) -> Reply:
        """The response for an object; without a new request the request ID of the last one stays."""
        record, granting = step.instruction.reservation, self._means.granting
        grant = None if granting is None else await granting(record, self._cluster)
        body = mailboxes.text(parties.told(step.instruction, grant or ""))
        before = mailboxes.NOBODY if step.seen is None else mailbox_plans.reply(step.seen)
        if question is not None:
            return Reply(question, body)
        return replace(before or mailboxes.NOBODY, body=body)

    async def hold_on_to(self, seen: Reservation) -> Reservation | None:
        """None if the object no longer exists: then nothing is requested."""
        return await self.write_finalizers(seen, [*seen.metadata.finalizers, RESERVATION_FINALIZER])

    async def write_finalizers(self, seen: Reservation, left: list[str]) -> Reservation | None:
        version = seen.metadata.resource_version
        change: dict[str, object] = {"metadata": {"finalizers": left, "resourceVersion": version}}
        return await self.patch(marks.RESERVATIONS, seen, change)

    async def remove(self, seen: Told) -> None:
        """If the object has changed meanwhile, it stays, and the watch reports it."""
        async with self._writes:
            await removals.remove(self._means.client, resources.of(type(seen)), seen)

    async def patch_status(self, seen: Kind, status: dict[str, object]) -> None:
        await self.patch(resources.of(type(seen)), seen, {"status": status}, "status")

    async def patch(
        self,
        resource: Resource[Kind],
        seen: Kind,
        change: dict[str, object],
        subresource: str = "",
    ) -> Kind | None:
        """None if the object no longer exists."""
        return await self._patch(resource, seen.metadata.name, change, subresource)

    async def _patch(
        self, resource: Resource[Kind], name: str, change: dict[str, object], subresource: str
    ) -> Kind | None:
        async with self._writes:
            try:
                found = await self._means.client.patch(
                    resource, name, self._namespace, change, subresource=subresource
                )
            except NotFound:
                return None
        self._shelf.see(found)
        return found
