"""Open streams: who wants to hear of which reservations, and what they have not read yet.

A feed holds the newest state of each reservation that changed, not every step on the way: a slow reader
catches up with the present and costs no more than the reservations it has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from kubelend.broker import instructions
from kubelend.core.events import Change
from kubelend.core.members import Member, Standing
from kubelend.core.models import ClusterId, Reservation, ReservationId
from kubelend.core.roles import Role


class Feed:
    """One open stream of one cluster."""

    def __init__(self, cluster: ClusterId, since: int, via: str = "") -> None:
        self.cluster = cluster
        self.via = via
        """The proxy through which its reader came, if any."""
        self.since = since
        """The revision up to which its reader is told everything when the stream opens."""
        self.closed = False
        self._unread: dict[ReservationId, Reservation] = {}
        self._news = asyncio.Event()

    def put(self, reservation: Reservation) -> None:
        if reservation.revision > self.since:
            self._unread[reservation.id] = reservation
            self._news.set()

    def wake(self) -> None:
        """Let the reader look around, though there is nothing new."""
        self._news.set()

    def close(self) -> None:
        """Let the reader finish: the stream ends, and its client resumes elsewhere or later."""
        self.closed = True
        self._news.set()

    async def read(self, timeout: float) -> list[Reservation]:
        """What has changed, in the order of revisions; empty after `timeout` seconds of silence."""
        try:
            async with asyncio.timeout(timeout):
                await self._news.wait()
        except TimeoutError:
            return []
        self._news.clear()
        unread, self._unread = self._unread, {}
        return sorted(unread.values(), key=lambda reservation: reservation.revision)


class Feeds:
    """All open streams, by cluster."""

    def __init__(self) -> None:
        self._feeds: dict[ClusterId, set[Feed]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._feeds.values()))

    def count(self, cluster: ClusterId) -> int:
        return len(self._feeds.get(cluster, ()))

    def open(self, cluster: ClusterId, since: int, via: str = "") -> Feed:
        feed = Feed(cluster, since, via)
        self._feeds.setdefault(cluster, set()).add(feed)
        return feed

    def close(self, feed: Feed) -> None:
        feed.close()
        feeds = self._feeds.get(feed.cluster, set())
        feeds.discard(feed)
        if not feeds:
            self._feeds.pop(feed.cluster, None)

    def close_all(self) -> None:
        for feed in self._all():
            self.close(feed)

    def wake_all(self) -> None:
        """Have every reader ask again whether it may go on."""
        for feed in self._all():
            feed.wake()

    def publish(self, changes: Iterable[Change]) -> None:
        """Hand durable changes to whoever they concern; who was revoked hears no more."""
        if not self._feeds:
            return
        for change in changes:
            if isinstance(change, Reservation):
                for cluster in instructions.concerned(change):
                    for feed in self._feeds.get(cluster, ()):
                        feed.put(change)
            elif isinstance(change, Member) and change.standing is Standing.REVOKED:
                self._close_of(change)

    def _close_of(self, revoked: Member) -> None:
        if revoked.role is Role.CLUSTER:
            for feed in list(self._feeds.get(ClusterId(revoked.name), ())):
                self.close(feed)
        elif revoked.role is Role.PROXY:
            for feed in [feed for feed in self._all() if feed.via == revoked.name]:
                self.close(feed)

    def _all(self) -> list[Feed]:
        return [feed for feeds in self._feeds.values() for feed in feeds]
