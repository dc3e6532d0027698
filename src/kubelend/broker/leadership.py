"""Leadership and replication of a store that only one broker can use."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from kubelend.broker.ports import Answer, Store
from kubelend.core.errors import StoreFailed
from kubelend.core.records import News, Records


class Alone:
    """Always the leader: no second broker can open the store."""

    leads = True
    term = 0
    leader = ""

    async def won(self) -> None:
        """Returns at once."""

    async def look(self) -> None:
        """Does nothing: there is no other broker."""


class Nobody:
    """Replication for a broker that is always the leader: there is nothing to follow."""

    async def follow(self) -> AsyncGenerator[Records | News, None]:
        for changes in _NOTHING:
            yield changes
        raise StoreFailed(_NOBODY)

    async def ask(self, question: Callable[[Store], Answer]) -> Answer:  # noqa: ARG002
        raise StoreFailed(_NOBODY)


ALONE = Alone()
NOBODY = Nobody()

_NOTHING: tuple[Records, ...] = ()
_NOBODY = "no other broker can use this store"
