"""The object in which people see what their cluster advertises, and whether the broker knows it.

The publisher hands over what is to be seen and goes on: neither a slow nor a broken store of local objects
may keep the broker from hearing of this cluster.
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
"""The name under which problems are reported: that of the publisher is for those with the broker."""

PATIENCE: Final = timedelta(seconds=10)


class Display:
    """Shows the newest; what was not written in time is not written at all."""

    def __init__(self, objects: LocalObjects, standing: Standing) -> None:
        self._objects = objects
        self._standing = standing
        self._newest: Advertisement | None = None
        self._news = asyncio.Event()

    def show(self, wanted: Advertisement) -> None:
        self._newest = wanted
        self._news.set()

    async def run(self) -> None:
        """Write what is to be shown, for ever. What fails is reported, and the next is tried."""
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
            return f"{wanted.key} could not be written within {durations.short(PATIENCE)}"
        except KubelendError as problem:
            return str(problem)
        return ""

    async def _write(self, wanted: Advertisement, tries: int = editing.TRIES) -> None:
        kept = await editing.put(self._objects, wanted)
        try:
            await self._objects.set_status(replace(kept, status=wanted.status))
        except Conflict:
            # Somebody was faster: what is shown is made of what there is then.
            if tries <= 1:
                raise
            await self._write(wanted, tries - 1)
