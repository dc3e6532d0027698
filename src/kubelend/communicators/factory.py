"""Creates a communicator by the name of its transport (`--broker-transport`), with the options of all
transports.

Another transport is a module here with a function `connect(options)`, one line in `TRANSPORTS`, and a
line in the contract test; docs/transports.md shows how. A module is imported only when it is chosen, so
that an agent loads the libraries of one transport. The middleware around each adds metrics and the agent
session.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from kubelend.agent.ports import BrokerCommunicator, BrokerConnection
from kubelend.core.errors import BrokerUnreachable, IdentityInUse, InvalidSettings, KubelendError
from kubelend.wire import bodies

if TYPE_CHECKING:
    # Its module loads structlog, which loads rich.
    from kubelend.agent.health import ActiveAgentGate


ReloadErrorHandler = Callable[[InvalidSettings], None]

IDLE_TIMEOUT = timedelta(seconds=40)
"""A stream without any data for this long is dead: two keepalives are missing."""


class CommunicatorOptions(msgspec.Struct, frozen=True):
    """Each transport reads what it needs, and reports what is missing."""

    url: str = ""
    """Address of the broker (`--broker-url`)."""
    certificates: Path | None = None
    """Directory with tls.crt, tls.key and ca.crt: this cluster's certificate and the trusted CA."""
    timeout: timedelta = timedelta(seconds=30)
    """Of one attempt of a call."""
    idle_timeout: timedelta = IDLE_TIMEOUT
    instance: str = ""
    """Identifies the agent process: of several with one cluster ID the broker accepts one."""
    kubeconfig: str = ""
    """Of the cluster with the broker's objects; empty for the default of the environment."""
    namespace: str = ""
    """This cluster's namespace there; empty for the kubeconfig's own."""
    on_reload_error: ReloadErrorHandler = lambda _: None
    """Called with the error when changed certificates cannot be loaded."""
    on_handshake: Callable[[str], None] = lambda _: None
    """Called with a reservation whose other side has sent a handshake, while the stream is open."""


Connect = Callable[[CommunicatorOptions], Awaitable[BrokerConnection]]

TRANSPORTS = {
    "http": "kubelend.communicators.http",
    "kubernetes": "kubelend.communicators.kubernetes",
}


async def open_communicator(name: str, options: CommunicatorOptions) -> BrokerConnection | None:
    """A communicator, to be closed by the caller; None for an empty name: an agent without a broker."""
    if not name:
        return None
    if name not in TRANSPORTS:
        known = " or ".join(TRANSPORTS)
        raise InvalidSettings(
            f"--broker-transport: unknown transport {name[:40]!r}",
            hint=f"use {known}, or leave it empty",
        )
    connect: Connect = importlib.import_module(TRANSPORTS[name]).connect
    return await connect(options)


def closed_error() -> BrokerUnreachable:
    """For calls after `close`, or during it.

    Retryable, because the broker has rejected nothing: a stopping agent must not mark requests as
    Failed.
    """
    return BrokerUnreachable("the connection to the broker was closed on this side")


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
