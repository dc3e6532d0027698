"""How a process is told to stop: by Ctrl-C, or by whoever started it."""

from __future__ import annotations

import asyncio
import signal

import structlog

log = structlog.get_logger("kubelend.process")


async def wait_for_signal() -> None:
    """Until SIGINT or SIGTERM comes: a root task whose end stops the others."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
    log.info("stopping")
