"""Tells the `ActiveAgentGate` by each advertisement whether the broker accepts this agent as the
active one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kubelend.agent.place import Place
from kubelend.agent.ports import BrokerCommunicator
from kubelend.communicators.wrapping import Answer, Wrapped
from kubelend.core.errors import IdentityInUse
from kubelend.wire import bodies


class Placed(Wrapped):
    """Advertisements are sent one after the other, so their results cannot be reordered as those of
    other calls.
    """

    def __init__(self, inner: BrokerCommunicator, place: Place) -> None:
        super().__init__(inner)
        self._place = place

    async def around(self, _: str, call: Callable[[], Awaitable[Answer]], /) -> Answer:
        return await call()

    async def publish(self, advertisement: bodies.Advertisement) -> bodies.Published:
        problem: IdentityInUse | None = None
        try:
            return await self._inner.publish(advertisement)
        except IdentityInUse as refusal:
            problem = refusal
            raise
        finally:
            # Any other result, a timeout included, means that no other agent is active.
            self._place.heard(problem)
