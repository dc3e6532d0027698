"""Tasks that the composition root would run, for as long as a test needs them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from kubelend.controllers.reconciler import ReconcileQueue


@contextlib.asynccontextmanager
async def working(looks: ReconcileQueue) -> AsyncIterator[None]:
    """What was noticed is looked at; the task may not end by itself."""
    task = asyncio.create_task(looks.run())
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait([task])
