"""The broker over HTTP with mutual TLS: implements the agent's port with `transports.client`.

Idempotent calls are retried a few times; all others fail at the first error. Longer retries are the
caller's: a disconnected stream raises, and the agent opens it again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from typing import Self

from kubelend.communicators import factory
from kubelend.communicators.factory import IDLE_TIMEOUT, CommunicatorOptions
from kubelend.communicators.published import PublishedBroker
from kubelend.core.errors import InvalidSettings, MissingRoute
from kubelend.core.lifecycle import Phase
from kubelend.kits import backoff
from kubelend.kits.backoff import Backoff
from kubelend.transports.client import BrokerClient
from kubelend.wire import bodies

UNFINISHED_PHASES_QUERY = "Pending,Reserved,Active"

RETRIES = Backoff(retries=2)
"""For an idle connection that was closed and a broker that restarts; not for an outage."""


async def connect(options: CommunicatorOptions) -> HttpCommunicator:
    """Loads the certificates; the first call opens the connection."""
    if not options.url:
        raise InvalidSettings("the broker's address is missing", hint="set --broker-url")
    if options.certificates is None:
        raise InvalidSettings("the client certificate is missing", hint="set --broker-cert-path")
    client = BrokerClient(
        options.url,
        options.certificates,
        timeout=options.timeout,
        backoff=RETRIES,
        report=options.on_reload_error,
        instance=options.instance,
    )
    return await HttpCommunicator(
        client, idle_timeout=options.idle_timeout, on_handshake=options.on_handshake
    ).open()


class HttpCommunicator:
    """One cluster's connection, identified by its certificate. Call `open` before use."""

    def __init__(
        self,
        client: BrokerClient,
        *,
        idle_timeout: timedelta = IDLE_TIMEOUT,
        on_handshake: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._client = client
        self._on_handshake = on_handshake
        self._idle_timeout = idle_timeout
        self._last_event_id = ""
        self._is_closed = False
        self._published = PublishedBroker(client)

    async def open(self) -> Self:
        await self._client.__aenter__()
        return self

    async def publish(self, advertisement: bodies.Advertisement) -> bodies.PublishResult:
        self._published.on_publish(advertisement)
        return self._published.on_published(await self._open_client().publish(advertisement))

    async def request(self, request: bodies.ReservationRequest, key: str) -> bodies.Reservation:
        reservation = await self._open_client().reserve(request, key=key)
        self._published.on_requested(reservation)
        return reservation

    async def activate(self, reservation: str) -> bodies.Reservation:
        try:
            return await self._open_client().activate(reservation)
        except MissingRoute as error:
            published = await self._published_broker(error)
            return published.mark(reservation, phase=Phase.ACTIVE.value)

    async def renew(self, reservation: str, duration: str = "") -> bodies.Reservation:
        return await self._open_client().renew(reservation, duration)

    async def release(self, reservation: str) -> bodies.Reservation:
        try:
            return await self._open_client().release(reservation)
        except MissingRoute as error:
            return (await self._published_broker(error)).release(reservation)

    async def find(self, reservation: str) -> bodies.Reservation:
        try:
            return await self._open_client().get_reservation(reservation)
        except MissingRoute as error:
            return await (await self._published_broker(error)).find(reservation)

    async def instructions(self) -> list[bodies.Reservation]:
        try:
            return await self._open_client().all_reservations(phase=UNFINISHED_PHASES_QUERY)
        except MissingRoute as error:
            return await (await self._published_broker(error)).reservations()

    async def exchange_handshake(
        self, reservation: str, handshake: bodies.Handshake
    ) -> bodies.HandshakeResult:
        return await self._open_client().exchange_handshake(reservation, handshake)

    async def grant_keys(self) -> bodies.KeySet:
        return await self._open_client().grant_keys()

    async def stream(
        self, on_reset: Callable[[], None]
    ) -> AsyncGenerator[bodies.Instruction, None]:
        events = self._open_client().stream(
            after=self._last_event_id,
            on_reset=lambda: self._on_reset(on_reset),
            on_handshake=self._on_handshake,
            backoff=backoff.NO_RETRIES,
            read_timeout=self._idle_timeout,
        )
        try:
            async with aclosing(events):
                async for instruction in events:
                    self._last_event_id = str(instruction.revision)
                    yield instruction
        except MissingRoute as error:
            published = await self._published_broker(error)
            async with aclosing(published.poll(on_reset)) as polled:
                async for instruction in polled:
                    yield instruction

    async def acknowledge(
        self, reservation: str, held: bodies.HoldReport | None = None
    ) -> bodies.Reservation:
        try:
            return await self._open_client().acknowledge(reservation, held)
        except MissingRoute as error:
            published = await self._published_broker(error)
            return published.mark(reservation, acknowledged_at=datetime.now(UTC), held=held)

    async def refuse(self, reservation: str, reason: str) -> bodies.Reservation:
        try:
            return await self._open_client().refuse(reservation, reason)
        except MissingRoute as error:
            return (await self._published_broker(error)).refuse(reservation, reason)

    async def ping(self) -> None:
        try:
            await self._open_client().readyz()
        except MissingRoute:
            await self._open_client().healthz()

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            await self._client.__aexit__(None, None, None)

    async def _published_broker(self, missing: MissingRoute) -> PublishedBroker:
        """Raises the error if the broker is ours: then a proxy has answered in its place."""
        if await self._published.is_there():
            return self._published
        raise missing

    def _open_client(self) -> BrokerClient:
        if self._is_closed:
            raise factory.closed_error()
        return self._client

    def _on_reset(self, on_reset: Callable[[], None]) -> None:
        # Earlier event IDs are invalid: the broker's revisions may have restarted.
        self._last_event_id = ""
        on_reset()
