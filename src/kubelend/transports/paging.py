"""Pagination of lists."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar


class ListPage(Protocol):
    """The body of a list."""

    @property
    def next(self) -> str:
        """The continue token; empty on the last page."""


SomePage = TypeVar("SomePage", bound=ListPage)
SomePage_co = TypeVar("SomePage_co", bound=ListPage, covariant=True)
Item = TypeVar("Item")


class ListCall(Protocol[SomePage_co]):
    """A call that returns one page."""

    def __call__(self, *, after: str) -> Awaitable[SomePage_co]: ...


async def all_pages(
    call: ListCall[SomePage], items: Callable[[SomePage], list[Item]]
) -> list[Item]:
    """Returns the items of all pages in order."""
    found: list[Item] = []
    after = ""
    while True:
        page = await call(after=after)
        found += items(page)
        if not (after := page.next):
            return found
