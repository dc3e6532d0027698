"""Agent sessions: at most one agent is active for each cluster.

Two agents with the same certificate would advertise different clusters by turns, and each would hold what
the other was asked for. The first agent that names itself (`route.AGENT`) gets the session; a second one is
rejected until the first is gone. Sessions are in memory only: after a restart of the broker the first agent
to connect gets the session. The API checks here for every request of an agent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Final

from kubelend.broker.feeds import Feed
from kubelend.broker.ports import Clock
from kubelend.core import instants
from kubelend.core.errors import IdentityInUse
from kubelend.core.models import ClusterId

LONGEST_NAME: Final = 64
"""Maximum length of an agent's instance name, which the agent chooses and the broker holds in memory."""

GRACE: Final = timedelta(milliseconds=500)
"""How long a session outlives its last stream: an agent reconnects when its certificate is rotated, and no
other agent may claim the session in between. Shorter than the start of an agent."""


_SPEAKS: Final = "stop it, or issue a separate certificate for this cluster"
_HAS_STOPPED: Final = "its stream has just ended; try again in a moment"


class Speakers:
    """The active agent of each cluster."""

    def __init__(self, clock: Clock, timeout: timedelta) -> None:
        self._clock = clock
        self._timeout = timeout
        self._speakers: dict[ClusterId, _Speaker] = {}

    def hear(self, cluster: ClusterId, instance: str) -> None:
        """Updates the last-seen time if this instance is the active agent; ignores others."""
        speaker = self._speakers.get(cluster)
        if speaker is not None and speaker.instance == instance[:LONGEST_NAME]:
            speaker.heard_at = self._clock()

    def speak(self, cluster: ClusterId, instance: str, origin: str) -> _Speaker:
        """Makes this instance the active agent; raises `IdentityInUse` while another one is."""
        now, instance = self._clock(), instance[:LONGEST_NAME]
        speaker = self._speakers.get(cluster)
        if speaker is None or speaker.instance != instance:
            if speaker is not None:
                self._take_from(speaker, cluster, now)
            speaker = self._speakers[cluster] = _Speaker(instance, now)
        speaker.heard_at, speaker.origin, speaker.left_at = now, origin, None
        return speaker

    @contextmanager
    def streaming(
        self, cluster: ClusterId, instance: str, origin: str, feed: Feed
    ) -> Iterator[None]:
        """Claims the session while a stream is open; it ends shortly after the last stream."""
        speaker = self.speak(cluster, instance, origin)
        speaker.feeds.add(feed)
        try:
            yield
        finally:
            speaker.feeds.discard(feed)
            speaker.left_at = None if speaker.feeds else self._clock()

    def _take_from(self, speaker: _Speaker, cluster: ClusterId, now: datetime) -> None:
        silence = max(now - speaker.heard_at, timedelta())
        if not speaker.is_gone(now) and silence < self._timeout:
            since = instants.time_of_day(speaker.since, now)
            ended = speaker.left_at is not None
            raise IdentityInUse(
                f"another agent is active for {cluster} since {since}"
                f" ({speaker.origin}, last seen {int(silence.total_seconds())} s ago)",
                hint=_HAS_STOPPED if ended else _SPEAKS,
            )
        # Its streams are half-open connections that were never closed.
        for feed in speaker.feeds:
            feed.close()


class _Speaker:
    """The session of one agent."""

    __slots__ = ("feeds", "heard_at", "instance", "left_at", "origin", "since")

    def __init__(self, instance: str, now: datetime) -> None:
        self.instance = instance
        self.since = self.heard_at = now
        self.origin = ""
        """Where its last request came from."""
        self.feeds: set[Feed] = set()
        """Its open streams."""
        self.left_at: datetime | None = None
        """When its last stream ended; None while one is open, or after a later request."""

    def is_gone(self, now: datetime) -> bool:
        """Whether the grace period has passed. A clock that was set back ends it, too."""
        return self.left_at is not None and abs(now - self.left_at) >= GRACE
