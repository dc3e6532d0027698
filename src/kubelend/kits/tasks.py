"""Guarded root tasks: a process lives as long as all of them do, and no failure goes unnoticed.

Composition roots (`kubelend.apps`) hand their loops and servers to `run_all` and wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import structlog

log = structlog.get_logger("kubelend.tasks")

Root = asyncio.Task[object]


async def run_all(tasks: Mapping[str, Coroutine[Any, Any, object]]) -> str:
    """Run all until the first ends; stop the others, and return its name or raise its failure.

    They are stopped one by one, the last first: a task may use those named before it until it has
    finished. Cancelling this stops all of them in the same way; cancelling it again stops them at once.
    """
    running = [asyncio.create_task(task, name=name) for name, task in tasks.items()]
    try:
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    finally:
        first = next((task for task in running if task.done()), None)
        await _stop(running)
        _report(running, first)
    return _outcome(running, first)


async def _stop(running: Sequence[Root]) -> None:
    interrupted: asyncio.CancelledError | None = None
    for task in reversed(running):
        if not task.done():
            task.cancel()
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as again:
                interrupted = again
                _cancel_all(running)
    if interrupted is not None:
        raise interrupted


def _cancel_all(running: Sequence[Root]) -> None:
    for task in running:
        task.cancel()


def _report(running: Sequence[Root], first: Root | None) -> None:
    for task in running:
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            log.error("root task failed", task=task.get_name(), exc_info=failure)
        elif task is first:
            log.warning("root task ended", task=task.get_name())


def _outcome(running: Sequence[Root], first: Root | None) -> str:
    """A failure counts more than an end, also when both came in the same turn of the loop."""
    for task in running:
        failure = None if task.cancelled() else task.exception()
        if failure is not None:
            raise failure
    return "" if first is None else first.get_name()
