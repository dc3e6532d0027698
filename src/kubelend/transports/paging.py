"""Long lists as the broker gives them, a page at a time: followed to the end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar


class Page(Protocol):
    """The body of any list."""

    @property
    def next(self) -> str:
        """Where the next page begins; empty at the end."""


SomePage = TypeVar("SomePage", bound=Page)
SomePage_co = TypeVar("SomePage_co", bound=Page, covariant=True)
Item = TypeVar("Item")


class Ask(Protocol[SomePage_co]):
    """A question whose answer is one page."""

    def __call__(self, *, after: str) -> Awaitable[SomePage_co]: ...


async def all_pages(ask: Ask[SomePage], items: Callable[[SomePage], list[Item]]) -> list[Item]:
    """What is on all pages, in their order."""
    found: list[Item] = []
    after = ""
    while True:
        page = await ask(after=after)
        found += items(page)
        if not (after := page.next):
            return found
