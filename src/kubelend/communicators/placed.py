"""Tells the `ActiveAgentGate` by each advertisement whether the broker accepts this agent as the
active one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kubelend.agent.place import ActiveAgentGate
from kubelend.agent.ports import BrokerCommunicator
from kubelend.communicators.wrapping import Middleware, Result
from kubelend.core.errors import IdentityInUse
from kubelend.wire import bodies


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
