"""Middleware around a communicator: metrics, the agent session, and the delay of a simulated network."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

from kubelend.agent.ports import BrokerCommunicator
from kubelend.core.errors import IdentityInUse, KubelendError
from kubelend.wire import bodies

if TYPE_CHECKING:
    # Its module loads structlog, which loads rich.
    from kubelend.agent.health import ActiveAgentGate

Result = TypeVar("Result")


class Middleware(ABC):
    """Passes every call on to another communicator."""

    def __init__(self, inner: BrokerCommunicator) -> None:
        self._inner = inner

    @abstractmethod
    async def wrap_call(self, name: str, call: Callable[[], Awaitable[Result]], /) -> Result:
        """Make one call; `name` is that of its method."""

    async def publish(self, advertisement: bodies.Advertisement) -> bodies.PublishResult:
        return await self.wrap_call("publish", lambda: self._inner.publish(advertisement))

    async def request(self, request: bodies.ReservationRequest, key: str) -> bodies.Reservation:
        return await self.wrap_call("request", lambda: self._inner.request(request, key))

    async def activate(self, reservation: str) -> bodies.Reservation:
        return await self.wrap_call("activate", lambda: self._inner.activate(reservation))

    async def renew(self, reservation: str, duration: str = "") -> bodies.Reservation:
        return await self.wrap_call("renew", lambda: self._inner.renew(reservation, duration))

    async def release(self, reservation: str) -> bodies.Reservation:
        return await self.wrap_call("release", lambda: self._inner.release(reservation))

    async def find(self, reservation: str) -> bodies.Reservation:
        return await self.wrap_call("find", lambda: self._inner.find(reservation))

    async def instructions(self) -> list[bodies.Reservation]:
        return await self.wrap_call("instructions", self._inner.instructions)

    def stream(self, on_reset: Callable[[], None]) -> AsyncGenerator[bodies.Instruction, None]:
        return self._inner.stream(on_reset)

    async def acknowledge(self, reservation: str) -> bodies.Reservation:
        return await self.wrap_call("acknowledge", lambda: self._inner.acknowledge(reservation))

    async def refuse(self, reservation: str, reason: str) -> bodies.Reservation:
        return await self.wrap_call("refuse", lambda: self._inner.refuse(reservation, reason))

    async def ping(self) -> None:
        await self.wrap_call("ping", self._inner.ping)

    async def close(self) -> None:
        await self._inner.close()


RESET = None


class DelayMiddleware(Middleware):
    """Waits before each call, and yields each instruction the same time after it was sent."""

    def __init__(self, inner: BrokerCommunicator, delay: timedelta) -> None:
        super().__init__(inner)
        self._seconds = delay.total_seconds()
        self._in_transit: deque[tuple[float, bodies.Instruction | None]] = deque()
        """Each with its arrival time. What one stream has not yielded comes with the next."""
        self._arrived = asyncio.Event()

    async def wrap_call(self, _: str, call: Callable[[], Awaitable[Result]], /) -> Result:
        await asyncio.sleep(self._seconds)
        return await call()

    async def stream(
        self, on_reset: Callable[[], None]
    ) -> AsyncGenerator[bodies.Instruction, None]:
        sending = asyncio.create_task(self._read_ahead())
        sending.add_done_callback(lambda _: self._arrived.set())
        try:
            while await self._wait_for_item(sending):
                arrives_at, instruction = self._in_transit[0]
                await asyncio.sleep(arrives_at - asyncio.get_running_loop().time())
                self._in_transit.popleft()
                if instruction is RESET:
                    on_reset()
                else:
                    yield instruction
            await sending  # raises the error by which it ended
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _read_ahead(self) -> None:
        """Reads ahead, so that instructions sent at the same time arrive at the same time."""
        async with aclosing(self._inner.stream(lambda: self._enqueue(RESET))) as instructions:
            async for instruction in instructions:
                self._enqueue(instruction)

    def _enqueue(self, item: bodies.Instruction | None) -> None:
        self._in_transit.append((asyncio.get_running_loop().time() + self._seconds, item))
        self._arrived.set()

    async def _wait_for_item(self, sending: asyncio.Task[None]) -> bool:
        while not self._in_transit and not sending.done():
            self._arrived.clear()
            await self._arrived.wait()
        return bool(self._in_transit)


CallObserver = Callable[[str, str, float], None]
"""Called with the call's name, `OK` or the error code, and the seconds."""

OK = "OK"


class MetricsMiddleware(Middleware):
    """A call cancelled by its caller has no result and is not observed. A stream is observed when it
    ends.
    """

    def __init__(
        self,
        inner: BrokerCommunicator,
        observer: CallObserver,
        *,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(inner)
        self._observer = observer
        self._timer = timer

    async def wrap_call(self, name: str, call: Callable[[], Awaitable[Result]], /) -> Result:
        with self._observed(name):
            return await call()

    async def stream(
        self, on_reset: Callable[[], None]
    ) -> AsyncGenerator[bodies.Instruction, None]:
        with self._observed("stream"):
            async with aclosing(self._inner.stream(on_reset)) as instructions:
                async for instruction in instructions:
                    yield instruction

    @contextmanager
    def _observed(self, name: str) -> Iterator[None]:
        began = self._timer()
        try:
            yield
        except KubelendError as error:
            self._observer(name, error.code, self._timer() - began)
            raise
        self._observer(name, OK, self._timer() - began)


class SessionMiddleware(Middleware):
    """Advertisements are sent one after the other, so their results cannot be reordered as those of
    other calls.
    """

    def __init__(self, inner: BrokerCommunicator, gate: ActiveAgentGate) -> None:
        super().__init__(inner)
        self._gate = gate

    async def wrap_call(self, _: str, call: Callable[[], Awaitable[Result]], /) -> Result:
        return await call()

    async def publish(self, advertisement: bodies.Advertisement) -> bodies.PublishResult:
        problem: IdentityInUse | None = None
        try:
            return await self._inner.publish(advertisement)
        except IdentityInUse as refusal:
            problem = refusal
            raise
        finally:
            # Any other result, a timeout included, means that no other agent is active.
            self._gate.on_advertised(problem)
