"""The session of an agent with the transport `kubernetes`, as a stream of its cluster.

The objects of a cluster namespace are kept current in any case. A session means that an agent watches them:
it is the active agent of its cluster (ADR 0015), and learns when the broker cannot serve it any longer.
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

log = structlog.get_logger("kubelend.cluster_namespaces")

LOOK_UP_EVERY = 15.0
"""Seconds between two checks whether the agent is still there."""


class Session:
    """Use `start`; ends by `stop` or when the broker closes its subscription, and then calls `on_end`."""

    def __init__(
        self,
        broker: Broker,
        cluster: ClusterId,
        agent: str,
        silence: timedelta,
        on_end: Callable[[Session], None],
    ) -> None:
        """Also ends after `timeout` without a request: no connection shows that the process died."""
        self.name = f"{agent or 'somebody'}/{uuid.uuid4().hex[:12]}"
        self.agent = agent
        self._broker = broker
        self._cluster = cluster
        self._silence = silence
        self._heard_at = broker.clock()
        self._on_end = on_end
        self._task: asyncio.Task[None] | None = None

    async def begin(self, speakers: Speakers | None, origin: str) -> None:
        """`IdentityInUse` while another agent is active, `NotReady` while the broker is not."""
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        work = self._run(speakers, origin, begun)
        self._task = asyncio.create_task(work, name=f"session {self.name}")
        await begun

    def hear(self, agent: str) -> None:
        """Note a request, if it is from the agent of this session."""
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
        log.info(
            "Agent session expired",
            session=self.name,
            cluster=self._cluster,
            reason="no request received",
        )
        return True
