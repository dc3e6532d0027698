"""A broker at the other end of the agent's port that really decides: the orders of a desk, without a wire.

    broker = DeskBroker("me", make.desk(me="cpu=4,memory=8Gi", other="cpu=4,memory=8Gi"))
    found = broker.desk.reserve("cpu=3,memory=1Gi")
    broker.tell(found)                      # on the stream, if one is open
    broker.trouble = errors.BrokerUnreachable("gone")

Time is that of `virtual_time`; `calls` has what it was asked, and when.
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


class DeskBroker:
    """Calls are answered at once, unless there is trouble or they are to take their time."""

    def __init__(self, cluster: str, desk: make.Desk) -> None:
        self.cluster = cluster
        self.desk = desk
        self.calls: list[Call] = []
        self.trouble: KubelendError | None = None
        """Of everything but the stream."""
        self.stream_trouble: KubelendError | None = None
        """Instead of a stream."""
        self.seconds: dict[str, float] = {}
        """How long a call takes, by its name; 0 if it is not there."""
        self.refused: dict[str, KubelendError] = {}
        """What single calls end with, by their names."""
        self.lost: set[str] = set()
        """The calls that are heard, but whose answers are not."""
        self.forgets = False
        """Whether streams that are opened again begin anew."""
        self.reasons: dict[str, str] = {}
        """What was refused, and why."""
        self._stream: asyncio.Queue[bodies.Instruction | KubelendError | None] | None = None
        self._has_streamed = False

    def named(self, name: str) -> list[Call]:
        return [call for call in self.calls if call.name == name]

    def body(self, reservation: str) -> bodies.Reservation:
        return conversion.from_reservation(self.desk[ReservationId(reservation)])

    def forget(self, reservation: str) -> None:
        """End it, and long ago."""
        self.desk.release(ReservationId(reservation))
        self.desk.ledger.apply(RetentionExpired(self.desk.now, ReservationId(reservation)))

    # -- the stream

    def stream(self, on_reset: Callable[[], None]) -> AsyncGenerator[bodies.Instruction, None]:
        return self._poured(on_reset)

    def tell(self, reservation: str) -> None:
        """Say on the stream how a reservation is now; nothing if no stream is open."""
        self.say(self.body(reservation))

    def say(self, body: bodies.Reservation) -> None:
        if self._stream is not None:
            self._stream.put_nowait(bodies.Instruction(body.revision, "", "", "", body))

    def cut(self, error: KubelendError | None) -> None:
        """End the stream that is open; None: without an error."""
        assert self._stream is not None
        self._stream.put_nowait(error)

    async def _poured(self, on_reset: Callable[[], None]) -> AsyncGenerator[bodies.Instruction]:
        self._note("stream")
        if self.stream_trouble is not None:
            raise self.stream_trouble
        self._stream = asyncio.Queue()
        try:
            if self.forgets or not self._has_streamed:
                self._has_streamed = True
                on_reset()
            while isinstance(said := await self._stream.get(), bodies.Instruction):
                yield said
            if said is not None:
                raise said
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
        await self._called("instructions")  # what it says is as old as the call
        return answer

    async def acknowledge(self, reservation: str) -> bodies.Reservation:
        await self._called("acknowledge", reservation)
        self.desk.acknowledge(ReservationId(reservation), self.cluster)
        self._answered("acknowledge")
        return self.body(reservation)

    async def refuse(self, reservation: str, reason: str) -> bodies.Reservation:
        await self._called("refuse", reservation)
        self.desk.refuse(ReservationId(reservation), self.cluster, reason)
        self.reasons.setdefault(reservation, reason)
        self._answered("refuse")
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
        self._note(name, reservation)
        trouble = self.trouble or self.refused.get(name)
        await asyncio.sleep(self.seconds.get(name, 0))
        if trouble is not None:
            raise trouble
        self.desk.now = virtual_time.now()

    def _answered(self, name: str) -> None:
        if name in self.lost:
            raise BrokerUnreachable("the answer was lost")

    def _note(self, name: str, reservation: str = "") -> None:
        at = asyncio.get_running_loop().time()
        self.calls.append(Call(round(at, 3), name, reservation))
