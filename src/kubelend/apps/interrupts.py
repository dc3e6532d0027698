"""Ctrl-C and kin, while other processes depend on us: nothing is left behind because of when it came."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType


@contextmanager
def signals_as_interrupt() -> Iterator[None]:
    """Python dies of these two on the spot, and would leave processes and directories behind."""
    with _signal_handlers(
        (signal.SIGTERM, signal.SIGHUP), lambda *_: signal.raise_signal(signal.SIGINT)
    ):
        yield


@contextmanager
def defer_signals() -> Iterator[None]:
    """What comes in between has its effect afterwards."""
    come: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with _signal_handlers(numbers, lambda number, _: come.append(number)):
        yield
    for number in come:
        signal.raise_signal(number)


@contextmanager
def _signal_handlers(
    numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    # Signals are the main thread's: others are not interrupted, and must not set handlers.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, previous in zip(numbers, before, strict=True):
            signal.signal(number, previous)
