"""Agent sessions: at most one agent is active for each cluster.

Two agents with the same certificate would advertise different clusters alternately, and each would hold
resources that the other was requested to hold. The first agent that names itself (`route.AGENT_HEADER`)
gets the session; a second one is rejected until the first is gone. Sessions are in memory only: after a
restart of the broker the first agent to connect gets the session. The API checks here for every request
of an agent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Final

from kubelend.broker.ports import Clock
from kubelend.broker.streams import Subscription
from kubelend.core import durations
from kubelend.core.errors import IdentityInUse
from kubelend.core.models import ClusterId

MAX_INSTANCE_LENGTH: Final = 64
"""Maximum length of an agent's instance name, which the agent chooses and the broker holds in memory."""

RECONNECT_GRACE: Final = timedelta(milliseconds=500)
"""How long a session outlives its last stream: an agent reconnects when its certificate is rotated, and no
other agent may claim the session in between. Shorter than the start of an agent."""


_HINT_ACTIVE: Final = "stop it, or issue a separate certificate for this cluster"
_HINT_DISCONNECTED: Final = "its stream has just ended; try again in a moment"


class AgentSessions:
    """The active agent of each cluster."""

    def __init__(self, clock: Clock, timeout: timedelta) -> None:
        self._clock = clock
        self._timeout = timeout
        self._sessions: dict[ClusterId, _AgentSession] = {}

    def touch(self, cluster: ClusterId, instance: str) -> None:
        """Updates the last-seen time if this instance is the active agent; ignores others."""
        session = self._sessions.get(cluster)
        if session is not None and session.instance == instance[:MAX_INSTANCE_LENGTH]:
            session.last_seen = self._clock()

    def claim(self, cluster: ClusterId, instance: str, origin: str) -> _AgentSession:
        """Makes this instance the active agent; raises `IdentityInUse` while another one is."""
        now, instance = self._clock(), instance[:MAX_INSTANCE_LENGTH]
        session = self._sessions.get(cluster)
        if session is None or session.instance != instance:
            if session is not None:
                self._take_over(session, cluster, now)
            session = self._sessions[cluster] = _AgentSession(instance, now)
        session.last_seen, session.origin, session.disconnected_at = now, origin, None
        return session

    @contextmanager
    def hold_open(
        self, cluster: ClusterId, instance: str, origin: str, subscription: Subscription
    ) -> Iterator[None]:
        """Claims the session while a stream is open; it ends shortly after the last stream."""
        session = self.claim(cluster, instance, origin)
        session.subscriptions.add(subscription)
        try:
            yield
        finally:
            session.subscriptions.discard(subscription)
            session.disconnected_at = None if session.subscriptions else self._clock()

    def _take_over(self, session: _AgentSession, cluster: ClusterId, now: datetime) -> None:
        idle = max(now - session.last_seen, timedelta())
        if not session.is_gone(now) and idle < self._timeout:
            since = durations.format_time(session.since, now)
            ended = session.disconnected_at is not None
            raise IdentityInUse(
                f"another agent is active for {cluster} since {since}"
                f" ({session.origin}, last seen {int(idle.total_seconds())} s ago)",
                hint=_HINT_DISCONNECTED if ended else _HINT_ACTIVE,
            )
        # Its streams are half-open connections that were never closed.
        for subscription in session.subscriptions:
            subscription.close()


class _AgentSession:
    """The session of one agent."""

    __slots__ = ("disconnected_at", "instance", "last_seen", "origin", "since", "subscriptions")

    def __init__(self, instance: str, now: datetime) -> None:
        self.instance = instance
        self.since = self.last_seen = now
        self.origin = ""
        """Where its last request came from."""
        self.subscriptions: set[Subscription] = set()
        """Its open streams."""
        self.disconnected_at: datetime | None = None
        """When its last stream ended; None while one is open, or after a later request."""

    def is_gone(self, now: datetime) -> bool:
        """Whether the grace period has passed. A clock that was set back ends it, too."""
        return (
            self.disconnected_at is not None and abs(now - self.disconnected_at) >= RECONNECT_GRACE
        )
