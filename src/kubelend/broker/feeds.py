"""Instruction streams: open subscriptions by cluster, and the instructions that follow from a reservation.

A subscription holds the latest state of each reservation that changed, not every step: a slow reader
catches up with the current state and costs no more memory than its reservations.
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
        """The proxy of the connection, if any."""
        self.since = since
        """The revision that the initial state of the stream includes."""
        self.closed = False
        self._unread: dict[ReservationId, Reservation] = {}
        self._news = asyncio.Event()

    def put(self, reservation: Reservation) -> None:
        if reservation.revision > self.since:
            self._unread[reservation.id] = reservation
            self._news.set()

    def wake(self) -> None:
        """Wakes the reader without a change, so that it checks whether it may go on."""
        self._news.set()

    def close(self) -> None:
        """Ends the stream; its client reconnects and resumes."""
        self.closed = True
        self._news.set()

    async def read(self, timeout: float) -> list[Reservation]:
        """Returns changes in the order of revisions; empty after `timeout` seconds without one."""
        try:
            async with asyncio.timeout(timeout):
                await self._news.wait()
        except TimeoutError:
            return []
        self._news.clear()
        unread, self._unread = self._unread, {}
        return sorted(unread.values(), key=lambda reservation: reservation.revision)


class Feeds:
    """All open subscriptions, by cluster."""

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
        """Has every reader check again whether it is authorized."""
        for feed in self._all():
            feed.wake()

    def publish(self, changes: Iterable[Change]) -> None:
        """Sends durable changes to the subscriptions concerned, and closes those of revoked members."""
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
