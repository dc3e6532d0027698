"""Which agent speaks for each cluster: one at a time, so that two with one identity are told apart.

Two agents with one certificate would advertise two clusters by turns, and each would hold what the other
was asked for. So the first one that names itself (`route.AGENT`) speaks, and a second one is refused until
the first is gone. All of it is in memory, one entry for each cluster: after a restart of the broker
whoever comes first speaks. The API asks here for every call of an agent.
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
"""Characters of an agent's name that are looked at: it is the agent's to choose, and kept in memory."""

GRACE: Final = timedelta(milliseconds=500)
"""For how long the place is kept for an agent whose stream has ended: it closes it, and opens another,
whenever its certificate is exchanged, and nobody is to come between. Shorter than a start takes."""


_SPEAKS: Final = "stop it, or give this cluster a certificate of its own"
_HAS_STOPPED: Final = "its stream has just ended, and its place is kept for a moment"


class Speakers:
    """Who speaks for whom, and until when nobody else may."""

    def __init__(self, clock: Clock, timeout: timedelta) -> None:
        self._clock = clock
        self._timeout = timeout
        self._speakers: dict[ClusterId, _Speaker] = {}

    def hear(self, cluster: ClusterId, instance: str) -> None:
        """Note a sign of life of whoever speaks. Anybody else may ask, too, and is not noted."""
        speaker = self._speakers.get(cluster)
        if speaker is not None and speaker.instance == instance[:LONGEST_NAME]:
            speaker.heard_at = self._clock()

    def speak(self, cluster: ClusterId, instance: str, origin: str) -> _Speaker:
        """Have this agent speak for its cluster; `IdentityInUse` while another one does."""
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
        """The same for as long as a stream is open; soon after the last one the agent is taken to be gone."""
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
                f"another agent speaks for {cluster} since {since}"
                f" ({speaker.origin}, last heard {int(silence.total_seconds())} s ago)",
                hint=_HAS_STOPPED if ended else _SPEAKS,
            )
        # Its streams look open only because nobody was there to close them.
        for feed in speaker.feeds:
            feed.close()


class _Speaker:
    """The agent that speaks for one cluster."""

    __slots__ = ("feeds", "heard_at", "instance", "left_at", "origin", "since")

    def __init__(self, instance: str, now: datetime) -> None:
        self.instance = instance
        self.since = self.heard_at = now
        self.origin = ""
        """Whence it called last."""
        self.feeds: set[Feed] = set()
        """Its open streams."""
        self.left_at: datetime | None = None
        """When its last stream ended; None while one is open, or if it has spoken since."""

    def is_gone(self, now: datetime) -> bool:
        """Whether it had the time to come back, and did not. A clock that was set back ends it, too."""
        return self.left_at is not None and abs(now - self.left_at) >= GRACE
