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
from kubelend.broker.speakers import AgentSessions
from kubelend.core.errors import KubelendError
from kubelend.core.models import ClusterId

log = structlog.get_logger("kubelend.cluster_namespaces")

SESSION_CHECK_SECONDS = 15.0
"""Seconds between two checks whether the agent is still there."""


class AgentStream:
    """Use `start`; ends by `stop` or when the broker closes its subscription, and then calls `on_end`."""

    def __init__(
        self,
        broker: Broker,
        cluster: ClusterId,
        agent: str,
        timeout: timedelta,
        on_end: Callable[[AgentStream], None],
    ) -> None:
        """Also ends after `timeout` without a request: no connection shows that the process died."""
        self.name = f"{agent or 'somebody'}/{uuid.uuid4().hex[:12]}"
        self.agent = agent
        self._broker = broker
        self._cluster = cluster
        self._timeout = timeout
        self._last_request_at = broker.clock()
        self._on_end = on_end
        self._task: asyncio.Task[None] | None = None

    async def start(self, sessions: AgentSessions | None, origin: str) -> None:
        """`IdentityInUse` while another agent is active, `NotReady` while the broker is not."""
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        work = self._run(sessions, origin, begun)
        self._task = asyncio.create_task(work, name=f"session {self.name}")
        await begun

    def touch(self, agent: str) -> None:
        """Note a request, if it is from the agent of this session."""
        if agent == self.agent:
            self._last_request_at = self._broker.clock()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(
        self, sessions: AgentSessions | None, origin: str, started: asyncio.Future[None]
    ) -> None:
        try:
            async with self._broker.stream(self._cluster, None) as opening:
                feed = opening.subscription
                with (
                    sessions.hold_open(self._cluster, self.agent, origin, feed)
                    if sessions is not None and self.agent
                    else nullcontext()
                ):
                    started.set_result(None)
                    while not feed.closed and not self._is_expired():
                        await feed.read(SESSION_CHECK_SECONDS)
        except KubelendError as error:
            if not started.done():
                started.set_exception(error)
                return
        finally:
            if not started.done():
                started.cancel()
        self._on_end(self)

    def _is_expired(self) -> bool:
        if self._broker.clock() - self._last_request_at < self._timeout:
            return False
        log.info(
            "Agent session expired",
            session=self.name,
            cluster=self._cluster,
            reason="no request received",
        )
        return True
