"""Writes Kubernetes Events in the background; nothing relies on them, and a failed write drops one."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from datetime import datetime
from typing import Final

import structlog

from kubelend.core.errors import KubelendError
from kubelend.kube.client import Client
from kubelend.wire.events import EventRecord, event_body

MAX_QUEUED_EVENTS: Final = 1000
DELAY_SECONDS: Final = 1.0
"""After which an Event is written: what it tells of, such as a status, is written first."""

log = structlog.get_logger("kubelend.events")


class EventRecorder:
    """Use `run` as a task; `emit` never blocks."""

    def __init__(self, client: Client, clock: Callable[[], datetime], component: str) -> None:
        """`component` is the program that reports the Events."""
        self._client = client
        self._clock = clock
        self._component = component
        self._queue = asyncio.Queue[tuple[EventRecord, datetime, float]](MAX_QUEUED_EVENTS)

    def emit(self, event: EventRecord) -> None:
        due = asyncio.get_running_loop().time() + DELAY_SECONDS
        try:
            self._queue.put_nowait((event, self._clock(), due))
        except asyncio.QueueFull:
            log.warning(
                "Event dropped", event_reason=event.reason, error="too many Events are queued"
            )

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            event, at, due = await self._queue.get()
            await asyncio.sleep(due - asyncio.get_running_loop().time())
            made = event_body(event, at, secrets.token_hex(8), self._component)
            namespace = event.involved_object.metadata.namespace
            try:
                await self._client.raw("POST", f"/api/v1/namespaces/{namespace}/events", made)
            except KubelendError as error:
                log.warning("Event dropped", event_reason=event.reason, error=str(error))
