"""Writes the local Advertisement object: what the cluster advertises, and whether the broker accepted
it.

The publisher submits the object and continues: a slow or broken object store must not delay
advertisements.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Final

from msgspec.structs import replace

from kubelend.agent import editing
from kubelend.agent.ports import LocalObjects
from kubelend.agent.standing import ComponentHealth
from kubelend.core import durations
from kubelend.core.errors import Conflict, KubelendError
from kubelend.wire.objects import Advertisement

WRITER_COMPONENT: Final = "advertisement"
"""The component under which write errors are reported; the publisher's own is for errors of the
broker."""

WRITE_TIMEOUT: Final = timedelta(seconds=10)


class AdvertisementWriter:
    """Writes the latest submitted object; older ones that were not written in time are skipped."""

    def __init__(self, objects: LocalObjects, health: ComponentHealth) -> None:
        self._objects = objects
        self._health = health
        self._latest: Advertisement | None = None
        self._submitted = asyncio.Event()

    def submit(self, wanted: Advertisement) -> None:
        self._latest = wanted
        self._submitted.set()

    async def run(self) -> None:
        """Write submitted objects. Runs until cancelled; a failure is reported and the next object
        tried.
        """
        while True:
            await self._submitted.wait()
            self._submitted.clear()
            if self._latest is not None:
                self._health.report(WRITER_COMPONENT, await self._write_error(self._latest))

    async def _write_error(self, wanted: Advertisement) -> str:
        try:
            async with asyncio.timeout(WRITE_TIMEOUT.total_seconds()):
                await self._write(wanted)
        except TimeoutError:
            return f"Advertisement {wanted.key}: not written within {durations.format_duration_short(WRITE_TIMEOUT)}"
        except KubelendError as problem:
            return str(problem)
        return ""

    async def _write(
        self, wanted: Advertisement, attempts: int = editing.CONFLICT_ATTEMPTS
    ) -> None:
        kept = await editing.apply_object(self._objects, wanted)
        try:
            await self._objects.set_status(replace(kept, status=wanted.status))
        except Conflict:
            # Modified concurrently: retry on the newer version.
            if attempts <= 1:
                raise
            await self._write(wanted, attempts - 1)
