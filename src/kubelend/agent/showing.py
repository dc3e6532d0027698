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
from kubelend.agent.standing import Standing
from kubelend.core import durations
from kubelend.core.errors import Conflict, KubelendError
from kubelend.wire.objects import Advertisement

PART: Final = "advertisement"
"""The component under which write errors are reported; the publisher's own is for errors of the
broker."""

PATIENCE: Final = timedelta(seconds=10)


class Display:
    """Writes the latest submitted object; older ones that were not written in time are skipped."""

    def __init__(self, objects: LocalObjects, standing: Standing) -> None:
        self._objects = objects
        self._standing = standing
        self._newest: Advertisement | None = None
        self._news = asyncio.Event()

    def show(self, wanted: Advertisement) -> None:
        self._newest = wanted
        self._news.set()

    async def run(self) -> None:
        """Write submitted objects. Runs until cancelled; a failure is reported and the next object
        tried.
        """
        while True:
            await self._news.wait()
            self._news.clear()
            if self._newest is not None:
                self._standing.report(PART, await self._problem_of(self._newest))

    async def _problem_of(self, wanted: Advertisement) -> str:
        try:
            async with asyncio.timeout(PATIENCE.total_seconds()):
                await self._write(wanted)
        except TimeoutError:
            return f"Advertisement {wanted.key}: not written within {durations.short(PATIENCE)}"
        except KubelendError as problem:
            return str(problem)
        return ""

    async def _write(self, wanted: Advertisement, tries: int = editing.TRIES) -> None:
        kept = await editing.put(self._objects, wanted)
        try:
            await self._objects.set_status(replace(kept, status=wanted.status))
        except Conflict:
            # Modified concurrently: retry on the newer version.
            if tries <= 1:
                raise
            await self._write(wanted, tries - 1)
