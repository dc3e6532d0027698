"""What is written into a mailbox, and how: each write is taken in again as the API server gave it back.

`controllers.mailbox_clerk` says what; by then it is decided.
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
"""Objects of one mailbox that are written at the same time."""

Granting = Callable[[Record, ClusterId], Awaitable[str | None]]


class Means(NamedTuple):
    """What all mailboxes share."""

    client: Client
    broker: Broker
    terms: Terms
    speakers: Speakers | None = None
    """Without them every agent of a cluster may speak."""
    granting: Granting | None = None
    """Signs what is told to the two sides of a reservation."""
    silence: timedelta = timedelta(minutes=15)
    """After which an agent that listens, and says nothing, is taken to be gone."""


class Pen:
    """Writes into one mailbox."""

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
        shown = await self._show(record) if seen is None else seen
        said = await self._said(Tell(part, seen), question)
        status = mailbox_plans.own_status(shown, record, said, self._means.broker.clock())
        await self._patch(marks.RESERVATIONS, shown.metadata.name, {"status": status}, "status")

    async def _show(self, record: Record) -> Stored:
        """In full, or as much of it as the server's definition takes."""
        create, kind = self._means.client.create, kube_objects.RESERVATIONS
        async with self._writes:
            try:
                return await create(kind, mailbox_plans.own_object(record, self._namespace))
            except InvalidInput:
                least = mailbox_plans.own_object(record, self._namespace, in_full=False)
                return await create(kind, least)

    async def tell_lent(self, step: Tell, question: str | None = None) -> None:
        said = await self._said(step, question)
        if step.seen is None:
            made = mailbox_plans.lent_object(step.instruction, said, self._namespace)
            async with self._writes:
                self._shelf.see(
                    await self._means.client.create(resources.of(ProviderInstruction), made)
                )
        elif isinstance(step.seen, ProviderInstruction):
            spec = mailbox_plans.lent_change(step.instruction, said)
            await self.patch(resources.of(ProviderInstruction), step.seen, {"spec": spec})

    async def _said(self, step: Tell, question: str | None) -> Reply:
        """The words for an object; without a question the answer to the last one stays."""
        record, granting = step.instruction.reservation, self._means.granting
        grant = None if granting is None else await granting(record, self._cluster)
        told = mailboxes.text(parties.told(step.instruction, grant or ""))
        before = mailboxes.NOBODY if step.seen is None else mailbox_plans.reply(step.seen)
        if question is not None:
            return Reply(question, told)
        return replace(before or mailboxes.NOBODY, body=told)

    async def hold_on_to(self, seen: Reservation) -> Reservation | None:
        """None if it is gone: then there is nothing to hold on to, and nothing is asked for."""
        return await self.write_finalizers(seen, [*seen.metadata.finalizers, RESERVATION_FINALIZER])

    async def write_finalizers(self, seen: Reservation, left: list[str]) -> Reservation | None:
        version = seen.metadata.resource_version
        change: dict[str, object] = {"metadata": {"finalizers": left, "resourceVersion": version}}
        return await self.patch(marks.RESERVATIONS, seen, change)

    async def remove(self, seen: Told) -> None:
        """If somebody has changed it meanwhile, the watch tells."""
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
        """None if it is gone: then nobody waits for it."""
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
