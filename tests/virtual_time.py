"""Hours in milliseconds: an event loop whose time jumps to the next timer when nothing else is to do.

    from virtual_time import in_virtual_time, now

    @in_virtual_time
    async def test_patience_lasts_an_hour():
        task = asyncio.create_task(thing.run(clock=now))
        await asyncio.sleep(3600)      # takes no time; all timers on the way went off in their order
        assert now() == make.T0 + make.HOUR
        await stopped(task)

`now` is a `Clock` that moves with the loop; it starts at `make.T0`. Work in threads is waited for, really;
sockets and processes are not: a test with them has real time. A loop that waits for what can never happen
fails instead of hanging, and so does a test that leaves a task behind. Fixtures must not be async.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

import make

Arguments = ParamSpec("Arguments")
Given = TypeVarTuple("Given")
Result = TypeVar("Result")

Decorator = Callable[[Callable[..., Coroutine[Any, Any, None]]], Callable[..., None]]

LONGEST_WAIT = 1.0
"""Real seconds, for threads that no timer of the loop speaks of."""


def in_virtual_time(
    test: Callable[Arguments, Coroutine[Any, Any, None]],
) -> Callable[Arguments, None]:
    """Makes an async test a plain one, which brings its own loop."""

    @functools.wraps(test)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(_guarded(test(*args, **kwargs)))

    return run


def rig_decorator(make_rig: Callable[..., Any]) -> Callable[..., Decorator]:
    """Gives a decorator as `in_virtual_time`, for tests with a parameter `rig`.

    Its parameters are those of `make_rig`, and the rig is `running()` while the test runs.
    """

    def with_settings(**settings: Any) -> Decorator:
        def decorate(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
            async def run(**given: Any) -> None:
                rig = make_rig(**settings)
                async with rig.running():
                    await test(rig=rig, **given)

            wrapped = in_virtual_time(functools.wraps(test)(run))
            signature = inspect.signature(test)
            others = [each for each in signature.parameters.values() if each.name != "rig"]
            wrapped.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
            return wrapped

        return decorate

    return with_settings


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """A task that has begun, and is stopped at the end; what it failed with before is raised."""
    task = asyncio.create_task(work)
    await settled()
    try:
        yield
    finally:
        await stopped(task)


def now() -> datetime:
    """The time by the loop that runs."""
    return make.T0 + timedelta(seconds=asyncio.get_running_loop().time())


async def stopped(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for their end; what they failed with before is raised."""
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome


async def passed(seconds: float) -> None:
    """Let time pass, and everything happen that is due by then."""
    await asyncio.sleep(seconds)
    await settled()


async def settled() -> None:
    """Let everything happen that needs no time to pass."""
    for _ in range(100):
        await asyncio.sleep(0)


async def _guarded(test: Coroutine[Any, Any, None]) -> None:
    await test
    leftovers = asyncio.all_tasks() - {asyncio.current_task()}
    assert not leftovers, f"tasks left pending: {leftovers}"


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time is a number that only it moves."""

    def __init__(self) -> None:
        self._now = 0.0
        self._threads = 0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self._now

    def pass_time(self, seconds: float) -> None:
        """Nothing is ready before these are over."""
        self._now += seconds

    @property
    def has_threads(self) -> bool:
        return self._threads > 0

    def run_in_executor(
        self,
        executor: Executor | None,
        func: Callable[[*Given], Result],
        *args: *Given,
    ) -> asyncio.Future[Result]:
        self._threads += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._thread_ended)
        return future

    def _thread_ended(self, _: asyncio.Future[Any]) -> None:
        self._threads -= 1


class _Jumping(selectors.DefaultSelector):
    """Lets time pass on its loop's clock instead of waiting."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or self._loop.has_threads:
            return self._really(timeout)
        ready = super().select(0)
        if not ready and timeout > 0:
            self._loop.pass_time(timeout)
        return ready

    def _really(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        """A thread may have to end, or nothing will ever be ready."""
        ready = super().select(LONGEST_WAIT if timeout is None else min(timeout, LONGEST_WAIT))
        if not ready and timeout is None and not self._loop.has_threads:
            raise RuntimeError("everything waits for what cannot happen: no timer is set")
        return ready
