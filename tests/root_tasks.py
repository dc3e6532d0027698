"""Tasks that the composition root would run, for as long as a test needs them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from kubelend.kits.workqueue import ReconcileQueue


@contextlib.asynccontextmanager
async def working(queue: ReconcileQueue[str]) -> AsyncIterator[None]:
    """Run the queue; the task may not end by itself."""
    task = asyncio.create_task(queue.run())
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait([task])
