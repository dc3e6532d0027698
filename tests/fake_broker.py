"""A broker at the other end of the agent's port that really decides, by a ledger in memory.

    broker = FakeBroker("me", make.desk(me="cpu=4,memory=8Gi", other="cpu=4,memory=8Gi"))
    found = broker.desk.reserve("cpu=3,memory=1Gi")
    broker.send(found)                      # on the stream, if one is open
    broker.error = errors.BrokerUnreachable("gone")

Time is that of `virtual_time`; `calls` has the calls and their times.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple, TypeVar

import make
import virtual_time
from kubelend.broker import streams
from kubelend.core.errors import BrokerUnreachable, KubelendError
from kubelend.core.events import RetentionExpired
from kubelend.core.lifecycle import FINAL
from kubelend.core.models import ClusterId, ReservationId
from kubelend.wire import bodies, conversion

Answer = TypeVar("Answer")


class Call(NamedTuple):
    at: float
    name: str
    reservation: str = ""


class FakeBroker:
    """Responds at once, unless an error or a duration is set."""

    def __init__(self, cluster: str, desk: make.Desk) -> None:
        self.cluster = cluster
        self.desk = desk
        self.calls: list[Call] = []
        self.error: KubelendError | None = None
        """Of all calls but the stream."""
        self.stream_error: KubelendError | None = None
        """Of the stream."""
        self.seconds: dict[str, float] = {}
        """Duration of calls, by name."""
        self.errors: dict[str, KubelendError] = {}
        """Errors of single calls, by name."""
        self.lost_responses: set[str] = set()
        """Names of calls that take effect, but whose responses are lost."""
        self.resets_streams = False
        """Whether a stream that is opened again starts with a reset."""
        self.refusals: dict[str, str] = {}
        """The reason of each refusal, by reservation."""
        self._stream: asyncio.Queue[bodies.Instruction | KubelendError | None] | None = None
        self._has_streamed = False

    def named(self, name: str) -> list[Call]:
        return [call for call in self.calls if call.name == name]

    def body(self, reservation: str) -> bodies.Reservation:
        return conversion.from_reservation(self.desk[ReservationId(reservation)])

    def archive(self, reservation: str) -> None:
        """Release it, and archive it."""
        self.desk.release(ReservationId(reservation))
        self.desk.ledger.apply(RetentionExpired(self.desk.now, ReservationId(reservation)))

    # -- the stream

    def stream(self, on_reset: Callable[[], None]) -> AsyncGenerator[bodies.Instruction, None]:
        return self._read(on_reset)

    def send(self, reservation: str) -> None:
        """Send the current state on the stream, if one is open."""
        self.send_body(self.body(reservation))

    def send_body(self, body: bodies.Reservation) -> None:
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

    async def find(self, reservation: str) -> bodies.Reservation:
        await self._called("find", reservation)
        return self.body(reservation)

    async def instructions(self) -> list[bodies.Reservation]:
        answer = [
            conversion.from_reservation(found)
            for found in self.desk.ledger.reservations.values()
            if ClusterId(self.cluster) in streams.clusters_of(found) and found.phase not in FINAL
        ]
        await self._called("instructions")  # the response is as old as the call
        return answer

    async def acknowledge(self, reservation: str) -> bodies.Reservation:
        await self._called("acknowledge", reservation)
        self.desk.acknowledge(ReservationId(reservation), self.cluster)
        self._respond("acknowledge")
        return self.body(reservation)

    async def refuse(self, reservation: str, reason: str) -> bodies.Reservation:
        await self._called("refuse", reservation)
        self.desk.refuse(ReservationId(reservation), self.cluster, reason)
        self.refusals.setdefault(reservation, reason)
        self._respond("refuse")
        return self.body(reservation)

    async def publish(self, advertisement: bodies.Advertisement) -> bodies.PublishResult:
        raise NotImplementedError

    async def request(self, request: bodies.ReservationRequest, key: str) -> bodies.Reservation:
        raise NotImplementedError

    async def activate(self, reservation: str) -> bodies.Reservation:
        await self._called("activate", reservation)
        self.desk.activate(ReservationId(reservation))
        return self.body(reservation)

    async def renew(self, reservation: str, duration: str = "") -> bodies.Reservation:
        raise NotImplementedError

    async def release(self, reservation: str) -> bodies.Reservation:
        raise NotImplementedError

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
        self.desk.now = virtual_time.now()

    def _respond(self, name: str) -> None:
        if name in self.lost_responses:
            raise BrokerUnreachable("the response was lost")

    def _record(self, name: str, reservation: str = "") -> None:
        at = asyncio.get_running_loop().time()
        self.calls.append(Call(round(at, 3), name, reservation))
