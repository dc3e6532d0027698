"""Instruction streams: open subscriptions by cluster, and the instructions that follow from a reservation.

A subscription holds the latest state of each reservation that changed, not every step: a slow reader
catches up with the current state and costs no more memory than its reservations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from enum import StrEnum

import msgspec

from kubelend.core.events import Change
from kubelend.core.lifecycle import Phase, Role
from kubelend.core.members import Member, MembershipStatus
from kubelend.core.models import ClusterId, Reservation, ReservationId


class Subscription:
    """One open stream of one cluster."""

    def __init__(self, cluster: ClusterId, since: int, via: str = "") -> None:
        self.cluster = cluster
        self.via = via
        """The proxy of the connection, if any."""
        self.since = since
        """The revision that the initial state of the stream includes."""
        self.closed = False
        self._unread: dict[ReservationId, Reservation] = {}
        self._handshakes: dict[ReservationId, None] = {}
        self._changed = asyncio.Event()

    def publish(self, reservation: Reservation) -> None:
        if reservation.revision > self.since:
            self._unread[reservation.id] = reservation
            self._changed.set()

    def notify_handshake(self, reservation: ReservationId) -> None:
        """The other side of the reservation has sent a handshake."""
        self._handshakes[reservation] = None
        self._changed.set()

    def take_handshakes(self) -> list[ReservationId]:
        """Returns the reservations with a new handshake since the last call."""
        taken, self._handshakes = list(self._handshakes), {}
        return taken

    def wake(self) -> None:
        """Wakes the reader without a change, so that it checks whether it may go on."""
        self._changed.set()

    def close(self) -> None:
        """Ends the stream; its client reconnects and resumes."""
        self.closed = True
        self._changed.set()

    async def read(self, timeout: float) -> list[Reservation]:
        """Returns changes in the order of revisions; empty after `timeout` seconds without one."""
        try:
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        except TimeoutError:
            return []
        self._changed.clear()
        unread, self._unread = self._unread, {}
        return sorted(unread.values(), key=lambda reservation: reservation.revision)


class StreamHub:
    """All open subscriptions, by cluster."""

    def __init__(self) -> None:
        self._by_cluster: dict[ClusterId, set[Subscription]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_cluster.values()))

    def count(self, cluster: ClusterId) -> int:
        return len(self._by_cluster.get(cluster, ()))

    def open(self, cluster: ClusterId, since: int, via: str = "") -> Subscription:
        feed = Subscription(cluster, since, via)
        self._by_cluster.setdefault(cluster, set()).add(feed)
        return feed

    def close(self, subscription: Subscription) -> None:
        subscription.close()
        feeds = self._by_cluster.get(subscription.cluster, set())
        feeds.discard(subscription)
        if not feeds:
            self._by_cluster.pop(subscription.cluster, None)

    def close_all(self) -> None:
        for feed in self._all():
            self.close(feed)

    def wake_all(self) -> None:
        """Has every reader check again whether it is authorized."""
        for feed in self._all():
            feed.wake()

    def publish(self, changes: Iterable[Change]) -> None:
        """Sends durable changes to the subscriptions concerned, and closes those of revoked members."""
        if not self._by_cluster:
            return
        for change in changes:
            if isinstance(change, Reservation):
                for cluster in clusters_of(change):
                    for feed in self._by_cluster.get(cluster, ()):
                        feed.publish(change)
            elif isinstance(change, Member) and change.status is MembershipStatus.REVOKED:
                self._close_revoked(change)

    def notify_handshake(self, cluster: ClusterId, reservation: ReservationId) -> None:
        for feed in self._by_cluster.get(cluster, ()):
            feed.notify_handshake(reservation)

    def _close_revoked(self, revoked: Member) -> None:
        if revoked.role is Role.CLUSTER:
            for feed in list(self._by_cluster.get(ClusterId(revoked.name), ())):
                self.close(feed)
        elif revoked.role is Role.PROXY:
            for feed in [feed for feed in self._all() if feed.via == revoked.name]:
                self.close(feed)

    def _all(self) -> list[Subscription]:
        return [feed for feeds in self._by_cluster.values() for feed in feeds]


class Side(StrEnum):
    """The side of a reservation that a cluster is on."""

    REQUESTER = "requester"
    PROVIDER = "provider"


class InstructionAction(StrEnum):
    """What the cluster has to do. The values are API."""

    WAIT = "Wait"  # requester: not placed yet
    USE = "Use"  # requester: use this cluster
    STOP = "Stop"  # requester: the reservation is finished
    HOLD = "Hold"  # provider: hold these resources
    WITHDRAW = "Withdraw"  # provider: release the held resources


class Instruction(msgspec.Struct, frozen=True):
    """The instruction to one side of a reservation."""

    side: Side
    action: InstructionAction
    message: str
    reservation: Reservation


def instructions_for(cluster: ClusterId, reservation: Reservation) -> Iterator[Instruction]:
    """Yields the instructions of a reservation for a cluster; none if it is not concerned."""
    if cluster == reservation.requester:
        yield _requester_instruction(reservation)
    if cluster == reservation.target or cluster in reservation.left:
        yield _provider_instruction(cluster, reservation)


def clusters_of(reservation: Reservation) -> set[ClusterId]:
    """Returns the clusters that receive changes of this reservation."""
    clusters = {reservation.requester, *reservation.left}
    return clusters if reservation.target is None else clusters | {reservation.target}


def _requester_instruction(reservation: Reservation) -> Instruction:
    amounts = reservation.request.resources.describe()
    if reservation.is_live:
        message = f"Use {reservation.target} for {amounts}"
        return Instruction(Side.REQUESTER, InstructionAction.USE, message, reservation)
    action = (
        InstructionAction.WAIT if reservation.phase is Phase.PENDING else InstructionAction.STOP
    )
    return Instruction(Side.REQUESTER, action, reservation.message, reservation)


def _provider_instruction(cluster: ClusterId, reservation: Reservation) -> Instruction:
    amounts = reservation.request.resources.describe()
    if reservation.is_live and reservation.target == cluster:
        message = f"Hold {amounts} for requester {reservation.requester}"
        return Instruction(Side.PROVIDER, InstructionAction.HOLD, message, reservation)
    message = f"Release {amounts} held for requester {reservation.requester}"
    return Instruction(Side.PROVIDER, InstructionAction.WITHDRAW, message, reservation)
