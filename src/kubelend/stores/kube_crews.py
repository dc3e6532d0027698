"""Many calls to an API server at once, but not too many: it serves others too."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

MAX_CONCURRENCY: Final = 16

Item = TypeVar("Item")
Result = TypeVar("Result")


async def gather_limited(
    work: Callable[[Item], Awaitable[Result]], items: Sequence[Item]
) -> list[Result]:
    """The results in the order of the items. After the first that fails none is begun any more.

    Those that are under way are waited for: to cut a call off leaves a connection half made.
    """
    results: dict[int, Result] = {}
    left = list(enumerate(items))[::-1]

    async def one_after_another() -> None:
        try:
            while left:
                number, item = left.pop()
                results[number] = await work(item)
        except BaseException:
            left.clear()
            raise

    crew = [one_after_another() for _ in range(min(MAX_CONCURRENCY, len(items)))]
    for outcome in await asyncio.gather(*crew, return_exceptions=True):
        if outcome is not None:
            raise outcome
    return [results[number] for number in range(len(items))]
