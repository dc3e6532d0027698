"""The listener: accepts TCP connections, enforces connection limits, and runs TLS handshakes.

When a limit is reached, a connection is closed: first the oldest unfinished handshake, because an honest
client completes it quickly, then the one that has been idle longest; never one with a request in progress.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Hashable, MutableMapping
from typing import NamedTuple, Protocol, TypeVar

GroupKey = TypeVar("GroupKey", bound=Hashable)
SlotGroup = TypeVar("SlotGroup", bound=MutableMapping["ConnectionSlot", None])


class ConnectionLimit(enum.StrEnum):
    """The limit that a connection reached. The values are API: labels of a metric, and in the log."""

    CONNECTIONS = "TooManyConnections"
    CALLER = "TooManyOfCaller"
    HANDSHAKES = "TooManyHandshakes"
    FILES = "OutOfFiles"


class ConnectionLimits(NamedTuple):
    """Connection limits of a listener; the defaults are for one with few clients."""

    connections: int = 256
    """Open connections, including unfinished handshakes."""
    per_caller: int = 64
    """Connections per caller; per address, where clients present no certificate."""
    handshakes_per_address: int = 128
    """Unfinished handshakes per address."""


class Connection(Protocol):
    """The connection of a slot: first a bare socket, then an HTTP connection."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is in progress."""

    @property
    def has_descriptor(self) -> bool:
        """Whether its file descriptor is still open."""

    def drop(self) -> None:
        """Aborts the connection."""


class ConnectionSlot:
    """The bookkeeping of one connection, from accept to close."""

    __slots__ = ("caller", "connection", "is_authenticated", "is_open", "remote")

    def __init__(self, remote: str, holder: Connection) -> None:
        self.remote = remote
        self.connection = holder
        self.caller: Hashable = None
        self.is_open = False
        self.is_authenticated = False


class ConnectionObserver(Protocol):
    """Observes the connections of a listener."""

    def opened(self) -> None:
        """A connection was accepted."""

    def closed(self) -> None:
        """A connection was closed."""

    def connection_rejected(self, limit: ConnectionLimit, remote: str, caller: Hashable) -> None:
        """A connection was closed, or could not be accepted, because of a limit."""

    def handshake_rejected(self, remote: str, reason: str) -> None:
        """A TLS handshake failed."""


class ConnectionTable:
    """Counts connections by state, address and caller; every operation takes constant time."""

    def __init__(self, limits: ConnectionLimits, observer: ConnectionObserver) -> None:
        self._limits = limits
        self._observer = observer
        self._open = 0
        # Ordered: the oldest handshake and the longest idle connection come first.
        self._handshakes: OrderedDict[ConnectionSlot, None] = OrderedDict()
        self._idle: OrderedDict[ConnectionSlot, None] = OrderedDict()
        self._by_remote: dict[str, OrderedDict[ConnectionSlot, None]] = {}
        self._by_caller: dict[Hashable, dict[ConnectionSlot, None]] = {}

    def add(self, slot: ConnectionSlot) -> bool:
        """Adds a new connection; False if it must be closed, because all others are in use."""
        same = self._by_remote.get(slot.remote, ())
        if len(same) >= self._limits.handshakes_per_address:
            self._reject(next(iter(same)), ConnectionLimit.HANDSHAKES)
        if self._open >= self._limits.connections and not self.close_one(
            ConnectionLimit.CONNECTIONS
        ):
            self._observer.connection_rejected(ConnectionLimit.CONNECTIONS, slot.remote, None)
            return False
        self._handshakes[slot] = None
        self._by_remote.setdefault(slot.remote, OrderedDict())[slot] = None
        self._open += 1
        slot.is_open = True
        self._observer.opened()
        return True

    def authenticated(self, slot: ConnectionSlot, caller: Hashable, connection: Connection) -> bool:
        """Marks the handshake as finished; False if the connection must be closed. No caller: no limit."""
        self._remove_handshake(slot)
        slot.caller, slot.connection, slot.is_authenticated = caller, connection, True
        if caller is not None and not self._close_one_of(caller):
            self._observer.connection_rejected(ConnectionLimit.CALLER, slot.remote, caller)
            self.remove(slot)
            return False
        self._idle[slot] = None
        if caller is not None:
            self._by_caller.setdefault(caller, {})[slot] = None
        return True

    def mark_busy(self, slot: ConnectionSlot) -> None:
        """Marks a connection as busy."""
        self._idle.pop(slot, None)

    def mark_idle(self, slot: ConnectionSlot) -> None:
        """Marks a connection as idle, unless it is closed."""
        if slot.is_open:
            self._idle[slot] = None
            self._idle.move_to_end(slot)

    def remove(self, slot: ConnectionSlot) -> None:
        """Removes a closed connection. Idempotent."""
        if not slot.is_open:
            return
        slot.is_open = False
        self._open -= 1
        self._remove_handshake(slot)
        self._idle.pop(slot, None)
        _remove_from_group(self._by_caller, slot.caller, slot)
        self._observer.closed()

    def close_one(self, limit: ConnectionLimit) -> ConnectionSlot | None:
        """Closes and returns one idle connection; None if there is none."""
        spare = next(iter(self._handshakes), None) or _first_idle(self._idle)
        if spare is not None:
            self._reject(spare, limit)
        return spare

    def close_handshakes(self) -> None:
        """Drops all unfinished handshakes, when the listener closes."""
        for place in list(self._handshakes):
            place.connection.drop()
            self.remove(place)

    def _close_one_of(self, caller: Hashable) -> bool:
        same = self._by_caller.get(caller, {})
        if len(same) < self._limits.per_caller:
            return True
        spare = _first_idle(same)
        if spare is not None:
            self._reject(spare, ConnectionLimit.CALLER)
        return spare is not None

    def _reject(self, place: ConnectionSlot, limit: ConnectionLimit) -> None:
        place.connection.drop()
        self._observer.connection_rejected(limit, place.remote, place.caller)
        self.remove(place)

    def _remove_handshake(self, place: ConnectionSlot) -> None:
        if place in self._handshakes:
            del self._handshakes[place]
            _remove_from_group(self._by_remote, place.remote, place)


def _first_idle(places: dict[ConnectionSlot, None]) -> ConnectionSlot | None:
    return next((place for place in places if place.connection.is_idle), None)


def _remove_from_group(
    groups: MutableMapping[GroupKey, SlotGroup], name: GroupKey, place: ConnectionSlot
) -> None:
    group = groups.get(name)
    if group is not None:
        group.pop(place, None)
        if not group:
            del groups[name]
