"""Root tasks of a process, signals, and bounded concurrency.

Composition roots (`kubelend.apps`) pass their loops and servers to `run_all`: the first task that ends
stops the process, so no failure goes unnoticed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import structlog

log = structlog.get_logger("kubelend.tasks")

RootTaskHandle = asyncio.Task[object]


async def run_all(tasks: Mapping[str, Coroutine[Any, Any, object]]) -> str:
    """Run all tasks until the first ends, then stop the others. Return the first one's name, or raise its
    error.

    Tasks are stopped in reverse order, one by one, so that each may use those before it until it has
    finished. Cancelling this does the same; cancelling it again cancels all tasks at once.
    """
    running = [_start_root(name, task) for name, task in tasks.items()]
    try:
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        first = _first_ended(running)
    finally:
        await _stop_all(running)
    failure = _error_of(first)
    if failure is not None:
        raise failure
    return first.get_name()


def _start_root(name: str, task: Coroutine[Any, Any, object]) -> RootTaskHandle:
    root = asyncio.create_task(task, name=name)
    root.add_done_callback(_log_end)
    return root


def _log_end(root: RootTaskHandle) -> None:
    failure = _error_of(root)
    if failure is not None:
        log.error("Root task failed", task=root.get_name(), exc_info=failure)
    elif not root.cancelling():
        log.debug("Root task ended", task=root.get_name())


def _error_of(root: RootTaskHandle) -> BaseException | None:
    return None if root.cancelled() else root.exception()


def _first_ended(running: Sequence[RootTaskHandle]) -> RootTaskHandle:
    """Prefer a failed task over a finished one if both ended in the same loop iteration."""
    done = [root for root in running if root.done()]
    return next((root for root in done if _error_of(root) is not None), done[0])


async def _stop_all(running: Sequence[RootTaskHandle]) -> None:
    interrupted: asyncio.CancelledError | None = None
    for root in reversed(running):
        root.cancel()
        while not root.done():
            try:
                await asyncio.wait([root])
            except asyncio.CancelledError as again:
                interrupted = again
                for other in running:
                    other.cancel()
    if interrupted is not None:
        raise interrupted
