"""Observes result and duration of each broker call, for the agent's metrics."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager

from kubelend.agent.ports import BrokerCommunicator
from kubelend.communicators.wrapping import Answer, Wrapped
from kubelend.core.errors import KubelendError
from kubelend.wire import bodies

Report = Callable[[str, str, float], None]
"""Called with the call's name, `OK` or the error code, and the seconds."""

OK = "OK"


class Measured(Wrapped):
    """A call cancelled by its caller has no result and is not observed. A stream is observed when it
    ends.
    """

    def __init__(
        self,
        inner: BrokerCommunicator,
        report: Report,
        *,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(inner)
        self._report = report
        self._timer = timer

    async def around(self, name: str, call: Callable[[], Awaitable[Answer]], /) -> Answer:
        with self._measured(name):
            return await call()

    async def stream(
        self, on_reset: Callable[[], None]
    ) -> AsyncGenerator[bodies.Instruction, None]:
        with self._measured("stream"):
            async with aclosing(self._inner.stream(on_reset)) as instructions:
                async for instruction in instructions:
                    yield instruction

    @contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        began = self._timer()
        try:
            yield
        except KubelendError as error:
            self._report(name, error.code, self._timer() - began)
            raise
        self._report(name, OK, self._timer() - began)
