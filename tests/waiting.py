"""How long tests wait for other tasks and processes, and how.

    await until(lambda: broker.service.unready is None)      polls in the event loop
    wait_until(lambda: path.exists())                        blocks
    async with asyncio.timeout(PATIENCE): ...                what is awaited rather than polled

A wait ends as soon as its condition holds: `PATIENCE` only says when a test gives up. `KUBELEND_PATIENCE=3`
gives a slow machine three times as long, for these waits and for the time limit of each test.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

import kubelend.envtest.waiting

FACTOR = kubelend.envtest.waiting.FACTOR

PATIENCE = 30.0 * FACTOR
"""In seconds."""

_POLL = 0.005


def _nothing() -> object:
    return ""


def _never(_: Exception) -> bool:
    return False


async def until(
    condition: Callable[[], Any | Awaitable[Any]],
    patience: float = PATIENCE,
    *,
    poll: float = _POLL,
    explain: Callable[[], object] = _nothing,
    retry: Callable[[Exception], bool] = _never,
) -> None:
    """Wait until the condition holds. The failure says what `explain` gives.

    `retry` tells for which errors of the condition it is asked again.
    """
    try:
        async with asyncio.timeout(patience):
            while not await _holds(condition, retry):  # noqa: ASYNC110  no event tells of it
                await asyncio.sleep(poll)
    except TimeoutError as error:
        raise AssertionError(f"it did not happen within {patience:g} s: {explain()}") from error


async def until_resolved(problem: Callable[[], Awaitable[str]], patience: float = PATIENCE) -> None:
    """Wait until there is no problem left; the failure says what the last one was."""
    last = ""

    async def is_resolved() -> bool:
        nonlocal last
        last = await problem()
        return not last

    await until(is_resolved, patience, explain=lambda: last)


def wait_until(
    condition: Callable[[], Any],
    patience: float = PATIENCE,
    *,
    poll: float = 4 * _POLL,
    explain: Callable[[], object] = _nothing,
) -> None:
    """The same as `until`, outside of an event loop."""
    end = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < end, f"it did not happen within {patience:g} s: {explain()}"
        time.sleep(poll)


async def _holds(condition: Callable[[], Any], retry: Callable[[Exception], bool]) -> bool:
    try:
        found = condition()
        return bool(await found if inspect.isawaitable(found) else found)
    except Exception as error:
        if not retry(error):
            raise
    return False
