"""Observes result and duration of each broker call, for the agent's metrics."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager

from kubelend.agent.ports import BrokerCommunicator
from kubelend.communicators.wrapping import Middleware, Result
from kubelend.core.errors import KubelendError
from kubelend.wire import bodies

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
