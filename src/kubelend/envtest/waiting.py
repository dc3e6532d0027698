"""Waits for processes and objects, with one factor for all time limits of development tools and tests.

`KUBELEND_PATIENCE=3` gives a slow machine three times as long. A wait ends as soon as its condition holds.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from kubelend.core.errors import Unavailable

FACTOR: Final = float(os.environ.get("KUBELEND_PATIENCE", "") or 1)

_POLL = 0.02

Found = TypeVar("Found")


def wait_until(condition: Callable[[], object], otherwise: str, seconds: float) -> None:
    """Blocks until the condition holds. `otherwise` states in the error what did not happen."""
    deadline = time.monotonic() + seconds * FACTOR
    while not condition():
        if time.monotonic() > deadline:
            raise _too_late(otherwise, seconds)
        time.sleep(_POLL)


async def until(
    find: Callable[[], Awaitable[Found | None]],
    otherwise: str,
    seconds: float,
    *,
    poll: float = _POLL,
) -> Found:
    """Waits until `find` returns something that is true, and returns it."""
    deadline = time.monotonic() + seconds * FACTOR
    while not (found := await find()):
        if time.monotonic() > deadline:
            raise _too_late(otherwise, seconds)
        await asyncio.sleep(poll)
    return found


async def within(seconds: float, work: Awaitable[Found], otherwise: str) -> Found:
    """Awaits `work` for at most this long."""
    try:
        return await asyncio.wait_for(work, seconds * FACTOR)
    except TimeoutError:
        raise _too_late(otherwise, seconds) from None


def _too_late(otherwise: str, seconds: float) -> Unavailable:
    return Unavailable(f"{otherwise} within {seconds * FACTOR:g} s")
