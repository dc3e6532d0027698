"""The broker through a cluster namespace: a namespace of the broker's API server that belongs to this
cluster.

A call is written into an object, and the broker's response is read from it; docs/transports.md shows
how. Calls are idempotent: each has an ID, and a Reservation object is named after its idempotency key.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from datetime import timedelta
from typing import Final

from kubelend.communicators import endings, kube_asking, kube_bodies, kube_stream
from kubelend.communicators.kube_asking import Asker
from kubelend.communicators.kube_requests import Requests
from kubelend.communicators.kube_stream import OPEN, Diary, Events, Stream
from kubelend.communicators.options import Options
from kubelend.core import durations, transitions
from kubelend.core.errors import (
    BrokerUnreachable,
    Conflict,
    Forbidden,
    InvalidInput,
    KubelendError,
    NotFound,
    WrongPhase,
    no_reservation,
)
from kubelend.core.lifecycle import FINAL, Phase
from kubelend.kube import access
from kubelend.kube.client import Client
from kubelend.wire import bodies, mailboxes, route
from kubelend.wire.broker_objects import ClusterAdvertisement, Mailbox

LEAVES_WITHIN: Final = 2.0
"""Seconds that a stopping agent takes to end its session. Otherwise the broker ends it by timeout."""


async def connect(options: Options) -> KubernetesCommunicator:
    """Loads the kubeconfig; the first call opens the connection."""
    found = access.find(options.kubeconfig)
    namespace = options.namespace or found.namespace
    stack = AsyncExitStack()
    client = await stack.enter_async_context(Client.open(found, timeout=options.timeout))
    asker = Asker(client, namespace, options.instance)
    return KubernetesCommunicator(asker, options.timeout, stack)


class KubernetesCommunicator:
    """One cluster's connection, identified by its account at the broker's API server."""

    def __init__(self, asker: Asker, timeout: timedelta, stack: AsyncExitStack) -> None:
        """`stack` is closed with the communicator."""
        self._asker = asker
        self._timeout = timeout
        self._stack = stack
        self._turn = asyncio.Lock()
        self._diary = Diary()
        self._requests = Requests(asker)
        self._advertised: ClusterAdvertisement | None = None
        self._streams: set[Events] = set()
        self._has_spoken = False
        self._is_closed = False

    # -- provider

    async def publish(self, advertisement: bodies.Advertisement) -> bodies.Published:
        async with self._call():
            question = self._asker.question("publish")
            wanted = kube_bodies.advertised(advertisement, question, self._asker.namespace)
            found = await self._applied(wanted)
            while not kube_asking.ADVERTISEMENTS.has_answered(found, question.id):
                found = await self._asker.settled(kube_asking.ADVERTISEMENTS, found)
                if not kube_asking.ADVERTISEMENTS.has_answered(found, question.id):
                    found = await self._applied(wanted)
            self._advertised = found
            accepted = mailboxes.advertisement(kube_asking.granted(found.status.response))
            return bodies.Published(accepted, await self._holds())

    async def acknowledge(self, reservation: str) -> bodies.Reservation:
        status: dict[str, object] = {"enforced": True, "phase": "Held", "message": ""}
        return await self._provide(reservation, "acknowledge", "", status)

    async def refuse(self, reservation: str, reason: str) -> bodies.Reservation:
        status: dict[str, object] = {"enforced": False, "phase": "Refused", "message": reason}
        return await self._provide(reservation, "refuse", reason, status)

    # -- requester

    async def request(self, request: bodies.ReservationRequest, key: str) -> bodies.Reservation:
        async with self._call():
            question = self._asker.question("reserve")
            wanted = kube_bodies.wanted(
                request, route.checked_key(key), question, self._asker.namespace
            )
            try:
                found = await self._asker.settled(
                    kube_asking.RESERVATIONS, await self._requests.placed(wanted)
                )
            except InvalidInput as problem:
                kube_bodies.check(request)
                raise problem
            return await self._requests.outcome(found)

    async def activate(self, reservation: str) -> bodies.Reservation:
        return await self._use(reservation, "activate")

    async def renew(self, reservation: str, duration: str = "") -> bodies.Reservation:
        return await self._use(reservation, "renew", duration)

    async def release(self, reservation: str) -> bodies.Reservation:
        return await self._use(reservation, "release")

    # -- reading

    async def find(self, reservation: str) -> bodies.Reservation:
        async with self._call():
            _, found = await self._read(reservation)
            return found

    async def instructions(self) -> list[bodies.Reservation]:
        async with self._call():
            await self._ask("read")
            found = [*await self._requests.own(), *await self._lending()]
        found.sort(key=lambda one: one.revision)
        return [one.reservation for one in found if one.action in OPEN]

    async def stream(
        self, on_reset: Callable[[], None]
    ) -> AsyncGenerator[bodies.Instruction, None]:
        async with self._call():
            status = (await self._ask("listen")).status
        is_new = not status.compacted_revision <= self._diary.seen <= status.revision
        if is_new:
            self._diary.begin()
            on_reset()
        stream = Stream(self._asker, status.session, status.revision, self._diary, is_new)
        events = Events(self._asker, endings.closed)
        self._streams.add(events)
        try:
            async with events.running(), aclosing(stream.told(events)) as instructions:
                async for instruction in instructions:
                    yield instruction
        finally:
            self._streams.discard(events)

    async def ping(self) -> None:
        async with self._call():
            await self._ask("ping")

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for events in self._streams:
            events.end()
        if self._has_spoken:
            with contextlib.suppress(KubelendError, TimeoutError):
                async with asyncio.timeout(LEAVES_WITHIN):
                    await self._leave()
        await self._stack.aclose()

    # -- helpers

    @asynccontextmanager
    async def _call(self) -> AsyncIterator[None]:
        if self._is_closed:
            raise endings.closed()
        self._has_spoken = True
        try:
            async with asyncio.timeout(self._timeout.total_seconds()):
                yield
        except TimeoutError:
            within = durations.short(self._timeout)
            raise BrokerUnreachable(f"the broker did not answer within {within}") from None
        except (BrokerUnreachable, RuntimeError):
            if self._is_closed:  # closed during the call
                raise endings.closed() from None
            raise

    async def _ask(self, call: str, text: str = "") -> Mailbox:
        """After the response the namespace contains everything that the broker knew when it was
        called.
        """
        async with self._turn:
            try:
                found = await self._asker.ask(
                    kube_asking.MAILBOXES, mailboxes.NAME, self._asker.question(call, text), {}
                )
            except NotFound as error:
                raise BrokerUnreachable(
                    f"namespace {self._asker.namespace} of the broker's cluster has no session object",
                    hint="have an administrator apply the output of `kubelend create clusternamespace`",
                ) from error
        kube_asking.granted(found.status.response)
        return found

    async def _leave(self) -> None:
        question = mailboxes.question(self._asker.question("leave"))
        await self._asker.client.patch(
            kube_asking.MAILBOXES.resource,
            mailboxes.NAME,
            self._asker.namespace,
            {"spec": {"request": question}},
        )

    async def _applied(self, wanted: ClusterAdvertisement) -> ClusterAdvertisement:
        """Replaced as a whole, so that nothing of the previous advertisement is left."""
        slot, client, known = kube_asking.ADVERTISEMENTS, self._asker.client, self._advertised
        self._advertised = None
        while True:
            if known is None or known.metadata.name != wanted.metadata.name:
                known = await self._asker.find(slot, wanted.metadata.name)
            with contextlib.suppress(Conflict), kube_asking.unreachable(Conflict):
                if known is None:
                    return await client.create(slot.resource, wanted)
                return await client.replace(slot.resource, kube_bodies.renewed(known, wanted))
            known = None

    async def _holds(self) -> list[bodies.Reservation]:
        found = sorted(await self._lending(), key=lambda one: one.revision)
        held = (one.reservation for one in found if one.action == "Hold")
        return [one for one in held if one.status.phase == "Reserved"]

    async def _read(self, reservation: str) -> tuple[Mailbox, bodies.Reservation]:
        """The broker's state, also of a reservation that finished too long ago to be in the
        namespace.
        """
        mailbox = await self._ask("read", reservation)
        found = mailboxes.reservation(mailbox.status.response)
        # An older broker does not respond for a single reservation: read the namespace.
        found = found or await self._lent(reservation) or await self._own(reservation)
        if found is None:
            raise no_reservation(reservation)
        return mailbox, found

    async def _own(self, reservation: str) -> bodies.Reservation | None:
        own = await self._requests.own()
        return next((one.reservation for one in own if one.reservation.id == reservation), None)

    async def _use(self, reservation: str, call: str, text: str = "") -> bodies.Reservation:
        async with self._call():
            question = self._asker.question(call, text)
            if (name := await self._name_of(reservation)) is None:
                return await self._use_unseen(reservation, call)
            try:
                found = await self._asker.ask(kube_asking.RESERVATIONS, name, question, {})
            except NotFound:
                self._requests.names.pop(reservation, None)
                return await self._use_unseen(reservation, call)
            return await self._requests.outcome(found)

    async def _name_of(self, reservation: str) -> str | None:
        """Of the Reservation object; None if this cluster has none."""
        if reservation not in self._requests.names:
            await self._requests.own()
        if reservation not in self._requests.names:
            await self._ask("read")  # it may have been requested elsewhere just now
            await self._requests.own()
        return self._requests.names.get(reservation)

    async def _use_unseen(self, reservation: str, call: str) -> bodies.Reservation:
        """An archived reservation can be released again, and nothing else."""
        mailbox, found = await self._read(reservation)
        if found.requester_id != mailbox.status.cluster_id:
            raise Forbidden(
                f"{reservation} belongs to {found.requester_id}",
                hint="only its requester may change it",
            )
        if call == "release" and found.status.phase in FINAL:
            return found
        raise _unusable(found)

    async def _lending(self) -> list[bodies.Instruction]:
        found = map(kube_stream.said, await self._asker.list(kube_asking.INSTRUCTIONS))
        return [one for one in found if one is not None]

    async def _lent(self, reservation: str) -> bodies.Reservation | None:
        name = mailboxes.instruction_name(reservation)
        found = await self._asker.find(kube_asking.INSTRUCTIONS, name)
        instruction = None if found is None else kube_stream.said(found)
        return None if instruction is None else instruction.reservation

    async def _provide(
        self, reservation: str, call: str, text: str, status: dict[str, object]
    ) -> bodies.Reservation:
        async with self._call():
            question, slot = self._asker.question(call, text), kube_asking.INSTRUCTIONS
            name = mailboxes.instruction_name(reservation)
            if await self._lent(reservation) is None:
                await self._ask("read")
            try:
                found = await self._asker.ask(slot, name, question, status)
            except NotFound:
                raise await self._not_lent(reservation) from None
            instruction = mailboxes.instruction(kube_asking.granted(found.spec.response))
            if instruction is None:
                raise BrokerUnreachable("the broker's response is empty")
            return instruction.reservation

    async def _not_lent(self, reservation: str) -> KubelendError:
        """The error for a reservation without a ProviderInstruction."""
        try:
            _, found = await self._read(reservation)
        except NotFound as error:
            return error
        if found.status.phase in FINAL:
            return _unusable(found)
        return Forbidden(f"{reservation} is not placed on this cluster")


def _unusable(found: bodies.Reservation) -> KubelendError:
    """For a reservation without an object: it has finished, or was removed a moment ago."""
    phase = found.status.phase
    if phase not in FINAL:
        return no_reservation(found.id)
    return WrongPhase(f"{found.id} is {phase}", hint=transitions.next_step(Phase(phase)))
