"""The broker over HTTP with mutual TLS: what `transports.http_client` offers, as the agent's port.

Calls that can be repeated without harm are, a few times; all others fail at the first fault. Whoever calls
does the long waiting: a stream that is cut raises, and is asked for again by the agent.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from datetime import timedelta
from typing import Self

from kubelend.communicators import endings
from kubelend.communicators.options import SILENCE, Options
from kubelend.core.errors import InvalidSettings
from kubelend.kits import backoff
from kubelend.kits.backoff import Backoff
from kubelend.transports.http_client import BrokerClient
from kubelend.wire import bodies

UNFINISHED = "Pending,Reserved,Active"

RETRIES = Backoff(retries=2)
"""For a connection that was closed while it was idle, and a broker that restarts; not for an outage."""


async def connect(options: Options) -> HttpCommunicator:
    """Read the certificates; no connection is made before the first call."""
    if not options.url:
        raise InvalidSettings("the broker's address is missing", hint="give --broker-url")
    if options.certificates is None:
        raise InvalidSettings("the certificate is missing", hint="give --broker-cert-path")
    client = BrokerClient(
        options.url,
        options.certificates,
        timeout=options.timeout,
        backoff=RETRIES,
        report=options.report,
        instance=options.instance,
    )
    return await HttpCommunicator(client, silence=options.silence).open()


class HttpCommunicator:
    """One cluster's conversation, by its certificate. Open it before use."""

    def __init__(self, client: BrokerClient, *, silence: timedelta = SILENCE) -> None:
        self._client = client
        self._silence = silence
        self._last_event = ""
        self._is_closed = False

    async def open(self) -> Self:
        await self._client.__aenter__()
        return self

    async def publish(self, advertisement: bodies.Advertisement) -> bodies.Published:
        return await self._open_client().publish(advertisement)

    async def request(self, request: bodies.ReservationRequest, key: str) -> bodies.Reservation:
        return await self._open_client().reserve(request, key=key)

    async def activate(self, reservation: str) -> bodies.Reservation:
        return await self._open_client().activate(reservation)

    async def renew(self, reservation: str, duration: str = "") -> bodies.Reservation:
        return await self._open_client().renew(reservation, duration)

    async def release(self, reservation: str) -> bodies.Reservation:
        return await self._open_client().release(reservation)

    async def find(self, reservation: str) -> bodies.Reservation:
        return await self._open_client().get_reservation(reservation)

    async def instructions(self) -> list[bodies.Reservation]:
        return await self._open_client().all_reservations(phase=UNFINISHED)

    async def stream(
        self, on_reset: Callable[[], None]
    ) -> AsyncGenerator[bodies.Instruction, None]:
        events = self._open_client().stream(
            after=self._last_event,
            on_reset=lambda: self._reset(on_reset),
            backoff=backoff.NONE,
            silence=self._silence,
        )
        async with aclosing(events):
            async for instruction in events:
                self._last_event = str(instruction.revision)
                yield instruction

    async def acknowledge(self, reservation: str) -> bodies.Reservation:
        return await self._open_client().acknowledge(reservation)

    async def refuse(self, reservation: str, reason: str) -> bodies.Reservation:
        return await self._open_client().refuse(reservation, reason)

    async def ping(self) -> None:
        await self._open_client().readyz()

    async def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            await self._client.__aexit__(None, None, None)

    def _open_client(self) -> BrokerClient:
        if self._is_closed:
            raise endings.closed()
        return self._client

    def _reset(self, on_reset: Callable[[], None]) -> None:
        # The numbers of before mean nothing any more: the broker may have begun to count anew.
        self._last_event = ""
        on_reset()
