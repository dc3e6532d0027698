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

from kubelend.broker.feeds import Feed
from kubelend.broker.ports import Clock
from kubelend.core import instants
from kubelend.core.errors import IdentityInUse
from kubelend.core.models import ClusterId

LONGEST_NAME = 64
"""Characters of an agent's name that are looked at: it is the agent's to choose, and kept in memory."""


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
        speaker.heard_at, speaker.origin, speaker.has_left = now, origin, False
        return speaker

    @contextmanager
    def streaming(
        self, cluster: ClusterId, instance: str, origin: str, feed: Feed
    ) -> Iterator[None]:
        """The same for as long as a stream is open; with the last one the agent is taken to be gone."""
        speaker = self.speak(cluster, instance, origin)
        speaker.feeds.add(feed)
        try:
            yield
        finally:
            speaker.feeds.discard(feed)
            speaker.has_left = not speaker.feeds

    def _take_from(self, speaker: _Speaker, cluster: ClusterId, now: datetime) -> None:
        silence = max(now - speaker.heard_at, timedelta())
        if not speaker.has_left and silence < self._timeout:
            since = instants.time_of_day(speaker.since, now)
            raise IdentityInUse(
                f"another agent speaks for {cluster} since {since}"
                f" ({speaker.origin}, last heard {int(silence.total_seconds())} s ago)",
                hint="stop it, or give this cluster a certificate of its own",
            )
        # Its streams look open only because nobody was there to close them.
        for feed in speaker.feeds:
            feed.close()


class _Speaker:
    """The agent that speaks for one cluster."""

    __slots__ = ("feeds", "has_left", "heard_at", "instance", "origin", "since")

    def __init__(self, instance: str, now: datetime) -> None:
        self.instance = instance
        self.since = self.heard_at = now
        self.origin = ""
        """Whence it called last."""
        self.feeds: set[Feed] = set()
        """Its open streams."""
        self.has_left = False
        """Whether its last stream has ended, and nothing was heard of it since."""
