"""A broker at the other end of the agent's port that really decides, by a ledger in memory.

    broker = FakeBroker("me", make.runner(me="cpu=4,memory=8Gi", other="cpu=4,memory=8Gi"))
    found = broker.runner.reserve("cpu=3,memory=1Gi")
    broker.send(found)                      # on the stream, if one is open
    broker.error = errors.BrokerUnreachable("gone")

Time is that of `virtual_time`; `calls` has the calls and their times.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

from msgspec.structs import replace

import make
import virtual_time
from kubelend.broker import streams
from kubelend.core import durations, explanations
from kubelend.core.errors import BrokerUnreachable, KubelendError
from kubelend.core.events import RetentionExpired
from kubelend.core.explanations import NoFit
from kubelend.core.lifecycle import FINAL
from kubelend.core.models import ClusterId, ReservationId
from kubelend.wire import bodies, conversion

LIMITS = conversion.RequestLimits(make.HOUR, 24 * make.HOUR, make.HOUR)
UNREACHABLE = BrokerUnreachable("no route")


class Call(NamedTuple):
    at: float
    name: str
    reservation: str = ""


class FakeBroker:
    """Responds at once, unless an error or a duration is set."""

    def __init__(self, cluster: str, runner: make.CommandRunner) -> None:
        self.cluster = cluster
        self.runner = runner
        self.offers: dict[str, str] = {}
        """Of clusters that advertise before every call; then reservations expire in time, too."""
        self.calls: list[Call] = []
        self.error: KubelendError | None = None
        """Of all calls but the stream."""
        self.errors: dict[str, KubelendError] = {}
        """Errors of single calls, by name."""
        self.stream_error: KubelendError | None = None
        self.seconds: dict[str, float] = {}
        """Duration of calls, by name."""
        self.response_delay = 0.0
        """Seconds between the decision and the response."""
        self.loses_responses = False
        """Whether calls take effect without a response."""
        self.resets_streams = False
        """Whether a stream that is opened again starts with a reset."""
        self.refusals: dict[str, str] = {}
        """The reason of each refusal, by reservation."""
        self.keys: list[str] = []
        """The idempotency key of each request."""
        self.accepted: list[tuple[float, bodies.Advertisement]] = []
        """Each advertisement and when it was accepted."""
        self.available: bodies.Amounts | None = None
        """Of the response to every advertisement, as are these reservations."""
        self.listed: list[bodies.Reservation] = []
        self._stream: asyncio.Queue[bodies.Instruction | KubelendError | None] | None = None
        self._has_streamed = False

    def named(self, name: str) -> list[Call]:
        return [call for call in self.calls if call.name == name]

    def times(self, name: str) -> list[float]:
        """When this call was made."""
        return [call.at for call in self.named(name)]

    def body(self, reservation: str) -> bodies.Reservation:
        return conversion.from_reservation(self.runner[ReservationId(reservation)])

    def archive(self, reservation: str) -> None:
        """Release it, and archive it."""
        self.runner.release(ReservationId(reservation))
        self.runner.ledger.apply(RetentionExpired(self.runner.now, ReservationId(reservation)))

    @property
    def reserved(self) -> dict[str, str]:
        """Reserved amounts by provider."""
        amounts = {name: self.runner.reserved(name) for name in self.offers}
        return {name: amount.describe() for name, amount in amounts.items() if amount}

    def advance(self) -> None:
        """Set the time, expire what is due, and advertise."""
        self.runner.now = virtual_time.now()
        if self.offers:
            self.runner.expire()
        for name, offer in self.offers.items():
            self.runner.advertise(name, offer)

    # -- the stream

    def stream(self, on_reset: Callable[[], None]) -> AsyncGenerator[bodies.Instruction, None]:
        return self._read(on_reset)

    def send(self, reservation: str) -> None:
        """Send the current state on the stream, if one is open."""
        body = self.body(reservation)
        if self._stream is not None:
            self._stream.put_nowait(bodies.Instruction(body.revision, "", "", "", body))

    def disconnect(self, error: KubelendError | None) -> None:
        """End the open stream, with an error or without."""
        assert self._stream is not None
        self._stream.put_nowait(error)

    async def _read(self, on_reset: Callable[[], None]) -> AsyncGenerator[bodies.Instruction]:
        self._record("stream")
        if self.stream_error is not None:
            raise self.stream_error
        self._stream = asyncio.Queue()
        try:
            if self.resets_streams or not self._has_streamed:
                self._has_streamed = True
                on_reset()
            while isinstance(sent := await self._stream.get(), bodies.Instruction):
                yield sent
            if sent is not None:
                raise sent
        finally:
            self._stream = None

    # -- calls

    async def publish(self, advertisement: bodies.Advertisement) -> bodies.PublishResult:
        await self._called("publish")
        self.accepted.append((_seconds(), advertisement))
        resources = replace(advertisement.resources, available=self.available)
        return bodies.PublishResult(replace(advertisement, resources=resources), self.listed)

    async def request(self, request: bodies.ReservationRequest, key: str) -> bodies.Reservation:
        self.keys.append(key)
        await self._called("request")
        wanted = conversion.to_request(request, ClusterId(self.cluster), key, LIMITS)
        decision = self.runner.ask(wanted)
        if isinstance(decision, NoFit):
            raise explanations.no_capacity_error(decision.explanation)
        return await self._response(decision)

    async def find(self, reservation: str) -> bodies.Reservation:
        await self._called("find", reservation)
        return self.body(reservation)

    async def instructions(self) -> list[bodies.Reservation]:
        answer = [
            conversion.from_reservation(found)
            for found in self.runner.ledger.reservations.values()
            if ClusterId(self.cluster) in streams.clusters_of(found) and found.phase not in FINAL
        ]
        await self._called("instructions")  # the response is as old as the call
        return answer

    async def acknowledge(
        self, reservation: str, held: bodies.HoldReport | None = None
    ) -> bodies.Reservation:
        await self._called("acknowledge", reservation)
        report = None if held is None else conversion.to_hold_report(held)
        self.runner.acknowledge(ReservationId(reservation), self.cluster, report)
        return await self._response(reservation)

    async def refuse(self, reservation: str, reason: str) -> bodies.Reservation:
        await self._called("refuse", reservation)
        self.runner.refuse(ReservationId(reservation), self.cluster, reason)
        self.refusals.setdefault(reservation, reason)
        return await self._response(reservation)

    async def activate(self, reservation: str) -> bodies.Reservation:
        await self._called("activate", reservation)
        self.runner.activate(ReservationId(reservation))
        return await self._response(reservation)

    async def renew(self, reservation: str, duration: str = "") -> bodies.Reservation:
        await self._called("renew", reservation)
        found = self.runner[ReservationId(reservation)]
        longer = durations.parse_duration(duration) if duration else found.request.duration
        self.runner.renew(found.id, longer)
        return await self._response(reservation)

    async def release(self, reservation: str) -> bodies.Reservation:
        await self._called("release", reservation)
        self.runner.release(ReservationId(reservation))
        return await self._response(reservation)

    async def ping(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    async def _called(self, name: str, reservation: str = "") -> None:
        self._record(name, reservation)
        error = self.error or self.errors.get(name)
        await asyncio.sleep(self.seconds.get(name, 0))
        if error is not None:
            raise error
        self.advance()

    async def _response(self, reservation: str) -> bodies.Reservation:
        body = self.body(reservation)
        await asyncio.sleep(self.response_delay)
        if self.loses_responses:
            raise UNREACHABLE
        return body

    def _record(self, name: str, reservation: str = "") -> None:
        self.calls.append(Call(_seconds(), name, reservation))


def _seconds() -> float:
    return round(asyncio.get_running_loop().time(), 3)
