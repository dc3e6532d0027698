"""The TCP listener: accepts connections, limits them, and runs their TLS handshakes.

The servers of asyncio and uvloop do not protect against hostile clients: there is no limit on connections nor
on handshakes, each of which costs 53 KB, and uvloop's server closes without an error when file descriptors
run out.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import socket
import ssl
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol

from kubelend.kits.ratelimit import rate_limit_key


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
    handshakes: int = 128
    """Unfinished handshakes."""


class Connection(Protocol):
    """The connection of a slot: first a handshake, then an HTTP connection."""

    @property
    def is_idle(self) -> bool:
        """Whether no request is in progress."""

    def drop(self) -> None:
        """Aborts the connection."""


class ConnectionSlot:
    """The bookkeeping of one connection, from accept to close."""

    __slots__ = ("accepted_at", "caller", "connection", "is_authenticated", "is_open", "remote")

    def __init__(self, remote: str, holder: Connection, accepted_at: float) -> None:
        self.remote = remote
        self.connection = holder
        self.accepted_at = accepted_at
        """Monotonic time in seconds."""
        self.caller: Hashable = None
        self.is_open = False
        self.is_authenticated = False


class ConnectionObserver:
    """Observes the connections of a listener; this one ignores them."""

    def opened(self) -> None:
        """A connection was accepted."""

    def closed(self) -> None:
        """A connection was closed."""

    def connection_rejected(self, limit: ConnectionLimit, remote: str, caller: Hashable) -> None:
        """A connection was closed, or could not be accepted, because of a limit."""

    def handshake_rejected(self, remote: str, reason: str) -> None:
        """A TLS handshake failed."""


SlotGroups = dict[Hashable, dict[ConnectionSlot, None]]
"""Ordered sets of slots: the oldest comes first."""


HANDSHAKE_GRACE_SECONDS = 1.0
"""Seconds after which a handshake gives way to one of an address with as many. Less, and a whole fleet that
reconnects at once would close each other's handshakes and never finish any."""

MAX_KNOWN_ADDRESSES = 2**14
"""Addresses of authenticated clients that are remembered, latest first."""


class ConnectionTable:
    """Counts connections by state, address and caller.

    Every operation takes constant time, but for a handshake at the limit, which looks at every address that
    has one: at most as many as there are handshakes.
    """

    def __init__(self, limits: ConnectionLimits, observer: ConnectionObserver) -> None:
        self._limits = limits
        self._observer = observer
        self._open = 0
        # The oldest handshake and the longest idle connection come first.
        self._handshakes: dict[ConnectionSlot, None] = {}
        self._idle: OrderedDict[ConnectionSlot, None] = OrderedDict()
        self._by_remote: SlotGroups = {}
        """Unfinished handshakes."""
        self._known: OrderedDict[str, None] = OrderedDict()
        """Addresses of authenticated clients; the latest comes last."""
        self._by_caller: SlotGroups = {}

    def add(self, slot: ConnectionSlot) -> bool:
        """Adds a new connection; False if it must be closed, because all others are in use."""
        if not self._close_one_to_admit(slot):
            self._observer.connection_rejected(ConnectionLimit.HANDSHAKES, slot.remote, None)
            return False
        if self._open >= self._limits.connections and not self.close_one(
            ConnectionLimit.CONNECTIONS
        ):
            self._observer.connection_rejected(ConnectionLimit.CONNECTIONS, slot.remote, None)
            return False
        self._handshakes[slot] = None
        self._by_remote.setdefault(slot.remote, {})[slot] = None
        self._open += 1
        slot.is_open = True
        self._observer.opened()
        return True

    def authenticated(self, slot: ConnectionSlot, caller: Hashable, connection: Connection) -> bool:
        """Marks the handshake as finished; False if the connection must be closed. No caller: no limit."""
        self._remove_handshake(slot)
        slot.caller, slot.connection, slot.is_authenticated = caller, connection, True
        if caller != slot.remote:  # by a certificate
            self._remember(slot.remote)
        if caller is not None and not self._close_one_of(caller):
            self._observer.connection_rejected(ConnectionLimit.CALLER, slot.remote, caller)
            self.remove(slot)
            return False
        self._idle[slot] = None
        if caller is not None:
            self._by_caller.setdefault(caller, {})[slot] = None
        return True

    def mark_busy(self, slot: ConnectionSlot) -> None:
        self._idle.pop(slot, None)

    def mark_idle(self, slot: ConnectionSlot) -> None:
        """Marks a connection as idle, unless it is closed."""
        if slot.is_open:
            self._idle[slot] = None
            self._idle.move_to_end(slot)

    def remove(self, slot: ConnectionSlot) -> None:
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
        for slot in list(self._handshakes):
            slot.connection.drop()
            self.remove(slot)

    def _close_one_to_admit(self, new: ConnectionSlot) -> bool:
        """Closes a handshake if there are too many; False if there is none that has to give way.

        Addresses of known clients come first, then those with fewer handshakes, then the newer handshake.
        """
        if len(self._handshakes) < self._limits.handshakes:
            return True
        crowded = max(self._by_remote, key=self._rank)
        oldest = next(iter(self._by_remote[crowded]))
        if self._rank(crowded) <= self._rank(new.remote, 1) and (
            new.accepted_at - oldest.accepted_at < HANDSHAKE_GRACE_SECONDS
        ):
            return False
        self._reject(oldest, ConnectionLimit.HANDSHAKES)
        return True

    def _rank(self, remote: Hashable, more: int = 0) -> tuple[bool, int]:
        """The higher, the sooner a handshake of this address gives way."""
        return remote not in self._known, len(self._by_remote.get(remote, ())) + more

    def _remember(self, remote: str) -> None:
        self._known[remote] = None
        self._known.move_to_end(remote)
        if len(self._known) > MAX_KNOWN_ADDRESSES:
            self._known.popitem(last=False)

    def _close_one_of(self, caller: Hashable) -> bool:
        same = self._by_caller.get(caller, {})
        if len(same) < self._limits.per_caller:
            return True
        spare = _first_idle(same)
        if spare is not None:
            self._reject(spare, ConnectionLimit.CALLER)
        return spare is not None

    def _reject(self, slot: ConnectionSlot, limit: ConnectionLimit) -> None:
        slot.connection.drop()
        self._observer.connection_rejected(limit, slot.remote, slot.caller)
        self.remove(slot)

    def _remove_handshake(self, slot: ConnectionSlot) -> None:
        if slot in self._handshakes:
            del self._handshakes[slot]
            _remove_from_group(self._by_remote, slot.remote, slot)


def _first_idle(slots: dict[ConnectionSlot, None]) -> ConnectionSlot | None:
    return next((slot for slot in slots if slot.connection.is_idle), None)


def _remove_from_group(groups: SlotGroups, name: Hashable, slot: ConnectionSlot) -> None:
    group = groups.get(name)
    if group is not None:
        group.pop(slot, None)
        if not group:
            del groups[name]


LISTEN_BACKLOG = 1024
"""Listen backlog: a whole fleet may reconnect at once."""

RECEIVE_BUFFER = 2**15
"""Receive buffer of a connection. uvloop reads all that it holds at once, and the parser keeps it: with the
system's default, a client that sends more than it is answered costs 0.8 MB instead of 0.2."""

ACCEPTS_PER_ITERATION = 32
"""Connections accepted per event loop iteration."""

ACCEPT_RETRY_SECONDS = 0.02
"""Seconds until the next attempt when file descriptors are exhausted."""

_DESCRIPTOR_ERRORS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

ProtocolFactory = Callable[[ConnectionSlot], asyncio.Protocol]


class TlsSettings(NamedTuple):
    """TLS context and timeouts in seconds."""

    context: ssl.SSLContext | None
    handshake_timeout: float
    """From accept to the end of the handshake."""
    shutdown_timeout: float
    """For a client to read the remaining data and close the TLS connection."""


async def open_listeners(host: str, port: int) -> list[socket.socket]:
    """Opens a listening socket for each address of the host; all interfaces if empty."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    opened: list[socket.socket] = []
    for family, _, _, _, address in dict.fromkeys(found):
        try:
            opened.append(socket.create_server(address[:2], family=family, backlog=LISTEN_BACKLOG))
            # Inherited by its connections.
            opened[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        except OSError as error:
            # A machine without IPv6 can still listen on IPv4.
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) and len(found) > 1:
                continue
            _close_sockets(opened)
            raise
    if not opened:
        raise OSError(errno.EADDRNOTAVAIL, "not an address of this machine")
    return opened


class Acceptor:
    """Accepts connections on sockets. `make_protocol` creates the protocol of a connection."""

    def __init__(
        self,
        listeners: list[socket.socket],
        make_protocol: ProtocolFactory,
        connections: ConnectionTable,
        observer: ConnectionObserver,
        tls: TlsSettings,
    ) -> None:
        self._listeners = listeners
        self._make_protocol = make_protocol
        self._connections = connections
        self._observer = observer
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting = [self._loop.create_task(self._accept(each)) for each in listeners]

    async def close(self) -> None:
        """Stops accepting, and drops unfinished handshakes."""
        for task in self._accepting:
            task.cancel()
        await asyncio.wait(self._accepting)
        _close_sockets(self._listeners)
        self._connections.close_handshakes()
        if self._handshakes:
            await asyncio.wait(self._handshakes)

    async def _accept(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        while True:
            for _ in range(ACCEPTS_PER_ITERATION):
                try:
                    connection, address = await self._loop.sock_accept(listener)
                except OSError as error:
                    # Other errors concern this connection alone.
                    if error.errno in _DESCRIPTOR_ERRORS:
                        await self._free_descriptor()
                else:
                    self._on_accepted(connection, rate_limit_key(address[0]))
            await asyncio.sleep(0)  # others' turn: what is waiting is accepted at once

    async def _free_descriptor(self) -> None:
        """Closes an idle connection, and waits: the socket stays readable, and the loop would spin."""
        if self._connections.close_one(ConnectionLimit.FILES) is None:
            self._observer.connection_rejected(ConnectionLimit.FILES, "", None)
        await asyncio.sleep(ACCEPT_RETRY_SECONDS)

    def _on_accepted(self, connection: socket.socket, remote: str) -> None:
        slot = ConnectionSlot(remote, PendingHandshake(connection), self._loop.time())
        if not self._connections.add(slot):
            connection.close()
            return
        task = self._loop.create_task(self._run_handshake(slot, connection))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _run_handshake(self, slot: ConnectionSlot, connection: socket.socket) -> None:
        context, handshake_timeout, shutdown_timeout = self._tls
        try:
            await self._loop.connect_accepted_socket(
                partial(self._make_protocol, slot),
                connection,
                ssl=context,
                ssl_handshake_timeout=handshake_timeout if context else None,
                ssl_shutdown_timeout=shutdown_timeout if context else None,
            )
        except ssl.SSLError as error:
            self._observer.handshake_rejected(slot.remote, error.reason or str(error))
        except OSError:
            connection.close()  # disconnected, timed out, or dropped
        finally:
            if not slot.is_authenticated:
                self._connections.remove(slot)


class PendingHandshake(NamedTuple):
    """A connection whose handshake has not finished."""

    connection: socket.socket
    is_idle: bool = True

    def drop(self) -> None:
        # The event loop owns the socket, and handles this like a disconnect.
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


def _close_sockets(sockets: Iterable[socket.socket]) -> None:
    for opened in sockets:
        opened.close()
