"""Middleware around a communicator: metrics and the agent session."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, TypeVar

from kubelend.agent.ports import BrokerCommunicator
from kubelend.core.errors import IdentityInUse, KubelendError
from kubelend.wire import bodies

if TYPE_CHECKING:
    # Its module loads structlog, which loads rich.
    from kubelend.agent.health import ActiveAgentGate

Result = TypeVar("Result")


class Middleware:
    """Passes every call on to another communicator."""

    def __init__(self, inner: BrokerCommunicator) -> None:
        self._inner = inner

    async def wrap_call(self, _: str, call: Callable[[], Awaitable[Result]], /) -> Result:
        """Make one call; the name is that of its method."""
        return await call()

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

    async def acknowledge(
        self, reservation: str, held: bodies.HoldReport | None = None
    ) -> bodies.Reservation:
        return await self.wrap_call(
            "acknowledge", lambda: self._inner.acknowledge(reservation, held)
        )

    async def refuse(self, reservation: str, reason: str) -> bodies.Reservation:
        return await self.wrap_call("refuse", lambda: self._inner.refuse(reservation, reason))

    async def ping(self) -> None:
        await self.wrap_call("ping", self._inner.ping)

    async def close(self) -> None:
        await self._inner.close()


CallObserver = Callable[[str, str, float], None]
"""Called with the call's name, `OK` or the error code, and the seconds."""

OK = "OK"


class MetricsMiddleware(Middleware):
    """A call that its caller cancels has no result and is not observed; a stream is when it ends."""

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
    """Observes advertisements: sent one after the other, their results cannot be reordered."""

    def __init__(self, inner: BrokerCommunicator, gate: ActiveAgentGate) -> None:
        super().__init__(inner)
        self._gate = gate

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
