"""Runs load generators on uvloop, so that the broker and not the client is the bottleneck."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

ResultT = TypeVar("ResultT")


def run_on_uvloop(main: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Runs a coroutine, with objects of earlier benchmarks excluded from garbage collection."""
    gc.collect()
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
