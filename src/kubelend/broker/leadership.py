"""Who decides, where one broker alone uses a store: it does, for as long as it runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable

from kubelend.broker.ports import Answer, Store
from kubelend.core.errors import StoreFailed
from kubelend.core.records import News, Records


class Alone:
    """Of a store that no second broker can open."""

    leads = True
    term = 0
    leader = ""

    async def won(self) -> None:
        """It has been from the beginning."""

    async def look(self) -> None:
        """There is nobody else."""


class Nobody:
    """There is no other broker to follow: for one that always leads."""

    async def follow(self) -> AsyncGenerator[Records | News, None]:
        for news in _NOTHING:
            yield news
        raise StoreFailed(_NOBODY)

    async def ask(self, question: Callable[[Store], Answer]) -> Answer:  # noqa: ARG002
        raise StoreFailed(_NOBODY)


ALONE = Alone()
NOBODY = Nobody()

_NOTHING: tuple[Records, ...] = ()
_NOBODY = "no other broker can use this store"
