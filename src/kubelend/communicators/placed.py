"""Tells the agent by its advertisements whether the broker listens to it or to another of its name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kubelend.agent.place import Place
from kubelend.agent.ports import BrokerCommunicator
from kubelend.communicators.wrapping import Answer, Wrapped
from kubelend.core.errors import IdentityInUse
from kubelend.wire import bodies


class Placed(Wrapped):
    """Advertisements come one after the other, so their answers cannot be out of order as others may."""

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
            # Whatever else it came to, also if somebody lost patience, nobody has refused.
            self._place.heard(problem)
