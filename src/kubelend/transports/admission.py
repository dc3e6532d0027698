"""The listener: accepts TCP connections, enforces connection limits, and runs TLS handshakes.

When a limit is reached, a connection is closed: first the oldest unfinished handshake, because an honest
client completes it quickly, then the one that has been idle longest; never one with a request in progress.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Hashable, MutableMapping
from typing import NamedTuple, Protocol, TypeVar

Name = TypeVar("Name", bound=Hashable)
Group = TypeVar("Group", bound=MutableMapping["Place", None])


class Limit(enum.StrEnum):
    """The limit that a connection reached. The values are API: labels of a metric, and in the log."""

    CONNECTIONS = "TooManyConnections"
    CALLER = "TooManyOfCaller"
    HANDSHAKES = "TooManyHandshakes"
    FILES = "OutOfFiles"


class Room(NamedTuple):
    """Connection limits of a listener; the defaults are for one with few clients."""

    connections: int = 256
    """Open connections, including unfinished handshakes."""
    caller: int = 64
    """Connections per caller; per address, where clients present no certificate."""
    handshakes: int = 128
    """Unfinished handshakes per address."""


class Holder(Protocol):
    """The connection of a slot: first a bare socket, then an HTTP connection."""

    @property
    def is_resting(self) -> bool:
        """Whether no request is in progress."""

    @property
    def has_file(self) -> bool:
        """Whether its file descriptor is still open."""

    def drop(self) -> None:
        """Aborts the connection."""


class Place:
    """The bookkeeping of one connection, from accept to close."""

    __slots__ = ("caller", "has_entered", "holder", "is_open", "remote")

    def __init__(self, remote: str, holder: Holder) -> None:
        self.remote = remote
        self.holder = holder
        self.caller: Hashable = None
        self.is_open = False
        self.has_entered = False


class Watch(Protocol):
    """Observes the connections of a listener."""

    def opened(self) -> None:
        """A connection was accepted."""

    def closed(self) -> None:
        """A connection was closed."""

    def turned_away(self, limit: Limit, remote: str, caller: Hashable) -> None:
        """A connection was closed, or could not be accepted, because of a limit."""

    def handshake_refused(self, remote: str, reason: str) -> None:
        """A TLS handshake failed."""


class Admission:
    """Counts connections by state, address and caller; every operation takes constant time."""

    def __init__(self, room: Room, watch: Watch) -> None:
        self._room = room
        self._watch = watch
        self._open = 0
        # Ordered: the oldest handshake and the longest idle connection come first.
        self._arrivals: OrderedDict[Place, None] = OrderedDict()
        self._resting: OrderedDict[Place, None] = OrderedDict()
        self._by_remote: dict[str, OrderedDict[Place, None]] = {}
        self._by_caller: dict[Hashable, dict[Place, None]] = {}

    def arrive(self, place: Place) -> bool:
        """Adds a new connection; False if it must be closed, because all others are in use."""
        same = self._by_remote.get(place.remote, ())
        if len(same) >= self._room.handshakes:
            self._close(next(iter(same)), Limit.HANDSHAKES)
        if self._open >= self._room.connections and not self.make_room(Limit.CONNECTIONS):
            self._watch.turned_away(Limit.CONNECTIONS, place.remote, None)
            return False
        self._arrivals[place] = None
        self._by_remote.setdefault(place.remote, OrderedDict())[place] = None
        self._open += 1
        place.is_open = True
        self._watch.opened()
        return True

    def enter(self, place: Place, caller: Hashable, holder: Holder) -> bool:
        """Marks the handshake as finished; False if the connection must be closed. No caller: no limit."""
        self._forget_arrival(place)
        place.caller, place.holder, place.has_entered = caller, holder, True
        if caller is not None and not self._make_room_of(caller):
            self._watch.turned_away(Limit.CALLER, place.remote, caller)
            self.leave(place)
            return False
        self._resting[place] = None
        if caller is not None:
            self._by_caller.setdefault(caller, {})[place] = None
        return True

    def work(self, place: Place) -> None:
        """Marks a connection as busy."""
        self._resting.pop(place, None)

    def rest(self, place: Place) -> None:
        """Marks a connection as idle, unless it is closed."""
        if place.is_open:
            self._resting[place] = None
            self._resting.move_to_end(place)

    def leave(self, place: Place) -> None:
        """Removes a closed connection. Idempotent."""
        if not place.is_open:
            return
        place.is_open = False
        self._open -= 1
        self._forget_arrival(place)
        self._resting.pop(place, None)
        _take_out(self._by_caller, place.caller, place)
        self._watch.closed()

    def make_room(self, limit: Limit) -> Place | None:
        """Closes and returns one idle connection; None if there is none."""
        spare = next(iter(self._arrivals), None) or _first_resting(self._resting)
        if spare is not None:
            self._close(spare, limit)
        return spare

    def close_arrivals(self) -> None:
        """Drops all unfinished handshakes, when the listener closes."""
        for place in list(self._arrivals):
            place.holder.drop()
            self.leave(place)

    def _make_room_of(self, caller: Hashable) -> bool:
        same = self._by_caller.get(caller, {})
        if len(same) < self._room.caller:
            return True
        spare = _first_resting(same)
        if spare is not None:
            self._close(spare, Limit.CALLER)
        return spare is not None

    def _close(self, place: Place, limit: Limit) -> None:
        place.holder.drop()
        self._watch.turned_away(limit, place.remote, place.caller)
        self.leave(place)

    def _forget_arrival(self, place: Place) -> None:
        if place in self._arrivals:
            del self._arrivals[place]
            _take_out(self._by_remote, place.remote, place)


def _first_resting(places: dict[Place, None]) -> Place | None:
    return next((place for place in places if place.holder.is_resting), None)


def _take_out(groups: MutableMapping[Name, Group], name: Name, place: Place) -> None:
    group = groups.get(name)
    if group is not None:
        group.pop(place, None)
        if not group:
            del groups[name]
