"""An agent that listens to its mailbox, as the broker's other parts see it: one of its cluster's streams.

The mailbox itself is always kept up to date, whoever looks at it. A session says that an agent does: it
speaks for its cluster (ADR 0015), and hears of it when the broker cannot go on telling it what happens.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta

import structlog

from kubelend.broker.service import Broker
from kubelend.broker.speakers import Speakers
from kubelend.core.errors import KubelendError
from kubelend.core.models import ClusterId

log = structlog.get_logger("kubelend.mailboxes")

LOOK_UP_EVERY = 15.0
"""Seconds between two looks at whether anybody still listens."""


class Session:
    """Use `begin`; it ends by `end`, or when the broker closes its feed, and calls `on_end` then."""

    def __init__(
        self,
        broker: Broker,
        cluster: ClusterId,
        agent: str,
        silence: timedelta,
        on_end: Callable[[Session], None],
    ) -> None:
        """It ends, too, after as much `silence`: nobody sees a process die that has no connection."""
        self.name = f"{agent or 'somebody'}/{uuid.uuid4().hex[:12]}"
        self.agent = agent
        self._broker = broker
        self._cluster = cluster
        self._silence = silence
        self._heard_at = broker.clock()
        self._on_end = on_end
        self._task: asyncio.Task[None] | None = None

    async def begin(self, speakers: Speakers | None, origin: str) -> None:
        """`IdentityInUse` while another agent speaks, `NotReady` while the broker is not."""
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        work = self._run(speakers, origin, begun)
        self._task = asyncio.create_task(work, name=f"session {self.name}")
        await begun

    def hear(self, agent: str) -> None:
        """Note a sign of life, if it is of the agent that listens."""
        if agent == self.agent:
            self._heard_at = self._broker.clock()

    async def end(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(
        self, speakers: Speakers | None, origin: str, begun: asyncio.Future[None]
    ) -> None:
        try:
            async with self._broker.stream(self._cluster, None) as opening:
                feed = opening.feed
                with (
                    speakers.streaming(self._cluster, self.agent, origin, feed)
                    if speakers is not None and self.agent
                    else nullcontext()
                ):
                    begun.set_result(None)
                    while not feed.closed and not self._is_forsaken():
                        await feed.read(LOOK_UP_EVERY)
        except KubelendError as error:
            if not begun.done():
                begun.set_exception(error)
                return
        finally:
            if not begun.done():
                begun.cancel()
        self._on_end(self)

    def _is_forsaken(self) -> bool:
        if self._broker.clock() - self._heard_at < self._silence:
            return False
        log.info("session ended", session=self.name, cluster=self._cluster, why="nothing was heard")
        return True
