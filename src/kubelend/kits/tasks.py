"""Root tasks of a process, signals, and bounded concurrency.

Composition roots (`kubelend.apps`) pass their loops and servers to `run_all`: the first task that ends
stops the process, so no failure goes unnoticed.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, TypeVar

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


MAX_CONCURRENCY: Final = 16

Item = TypeVar("Item")
Result = TypeVar("Result")


async def gather_limited(
    work: Callable[[Item], Awaitable[Result]], items: Sequence[Item], limit: int = MAX_CONCURRENCY
) -> list[Result]:
    """Call `work` for all items, `limit` at a time; return the results in the order of the items.

    After the first failure no further call is started. Calls in progress are awaited: cancelling one would
    leave a half-open connection.
    """
    results: dict[int, Result] = {}
    left = list(enumerate(items))[::-1]

    async def work_off() -> None:
        try:
            while left:
                number, item = left.pop()
                results[number] = await work(item)
        except BaseException:
            left.clear()
            raise

    workers = [work_off() for _ in range(min(limit, len(items)))]
    for outcome in await asyncio.gather(*workers, return_exceptions=True):
        if outcome is not None:
            raise outcome
    return [results[number] for number in range(len(items))]


async def wait_for_signal() -> None:
    """Wait for SIGINT or SIGTERM: a root task whose end stops the others."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
    log.info("Stopping")


@contextmanager
def signals_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM and SIGHUP as SIGINT. By default they would end the process without any cleanup."""
    with _signal_handlers(
        (signal.SIGTERM, signal.SIGHUP), lambda *_: signal.raise_signal(signal.SIGINT)
    ):
        yield


@contextmanager
def defer_signals() -> Iterator[None]:
    """Defer SIGINT, SIGTERM and SIGHUP until the block has finished."""
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with _signal_handlers(numbers, lambda number, _: received.append(number)):
        yield
    for number in received:
        signal.raise_signal(number)


@contextmanager
def _signal_handlers(
    numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    # Only the main thread receives signals and may set handlers.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, previous in zip(numbers, before, strict=True):
            signal.signal(number, previous)
