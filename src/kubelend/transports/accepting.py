"""The TCP listener: accepts connections, limits them, and starts TLS when a client sends its first bytes.

The servers of asyncio and uvloop do not protect against hostile clients: a client that connects and sends
nothing costs the state of a TLS connection (53 KB, against 1 KB of a bare socket), there is no limit on
connections, and uvloop's server closes without an error when file descriptors run out.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from kubelend.kits.networks import rate_limit_key
from kubelend.transports.admission import (
    ConnectionLimit,
    ConnectionObserver,
    ConnectionSlot,
    ConnectionTable,
)

LISTEN_BACKLOG = 1024
"""Listen backlog: a whole fleet may reconnect at once."""

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
        except OSError as problem:
            # A machine without IPv6 can still listen on IPv4.
            if problem.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) and len(found) > 1:
                continue
            _close_sockets(opened)
            raise
    if not opened:
        raise OSError(errno.EADDRNOTAVAIL, "not an address of this machine")
    return opened


class Acceptor:
    """Accepts connections on sockets. `serve` creates the protocol of a connection."""

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
        for listener in listeners:
            listener.setblocking(False)
            self._loop.add_reader(listener, self._accept, listener)

    async def close(self) -> None:
        """Stops accepting, and drops unfinished handshakes."""
        for listener in self._listeners:
            self._loop.remove_reader(listener)
        _close_sockets(self._listeners)
        self._connections.close_handshakes()
        if self._handshakes:
            await asyncio.wait(self._handshakes)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_ITERATION):
            try:
                connection, address = listener.accept()
            except OSError as problem:
                # Other errors concern this connection alone, or there is none to accept.
                if problem.errno not in _DESCRIPTOR_ERRORS:
                    return
                if not self._free_descriptor():
                    self._pause(listener)
                    return
            else:
                self._on_accepted(connection, rate_limit_key(address[0]))

    def _free_descriptor(self) -> bool:
        """Closes an idle connection; returns whether its descriptor is free already."""
        spare = self._connections.close_one(ConnectionLimit.FILES)
        if spare is None:
            self._observer.connection_rejected(ConnectionLimit.FILES, "", None)
        return spare is not None and not spare.connection.has_descriptor

    def _pause(self, listener: socket.socket) -> None:
        """Stops reading for a moment: the socket stays readable, and the loop would spin."""
        self._loop.remove_reader(listener)
        self._loop.call_later(ACCEPT_RETRY_SECONDS, self._resume, listener)

    def _resume(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self._loop.add_reader(listener, self._accept, listener)

    def _on_accepted(self, connection: socket.socket, remote: str) -> None:
        connection.setblocking(False)
        arrival = PendingHandshake(connection, self._loop)
        place = ConnectionSlot(remote, arrival)
        if not self._connections.add(place):
            connection.close()
            return
        arrival.deadline = self._loop.call_later(
            self._tls.handshake_timeout, self._on_handshake_timeout, place
        )
        if self._tls.context is None:
            self._start_handshake(place, arrival)
        else:
            self._loop.add_reader(connection, self._on_first_bytes, place, arrival)

    def _on_first_bytes(self, place: ConnectionSlot, arrival: PendingHandshake) -> None:
        self._loop.remove_reader(arrival.connection)
        self._start_handshake(place, arrival)

    def _on_handshake_timeout(self, place: ConnectionSlot) -> None:
        if not place.is_authenticated:
            place.connection.drop()
            self._connections.remove(place)

    def _start_handshake(self, place: ConnectionSlot, arrival: PendingHandshake) -> None:
        arrival.has_started = True
        task = self._loop.create_task(self._run_handshake(place, arrival))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _run_handshake(self, place: ConnectionSlot, arrival: PendingHandshake) -> None:
        context, handshake, goodbye = self._tls
        try:
            await self._loop.connect_accepted_socket(
                partial(self._make_protocol, place),
                arrival.connection,
                ssl=context,
                ssl_handshake_timeout=handshake if context else None,
                ssl_shutdown_timeout=goodbye if context else None,
            )
        except ssl.SSLError as problem:
            self._observer.handshake_rejected(place.remote, problem.reason or str(problem))
        except OSError:
            arrival.connection.close()  # disconnected, timed out, or dropped
        finally:
            arrival.cancel_deadline()
            if not place.is_authenticated:
                self._connections.remove(place)


class PendingHandshake:
    """A connection whose handshake has not finished."""

    __slots__ = ("_loop", "connection", "deadline", "has_started")

    is_idle = True

    def __init__(self, connection: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self.connection = connection
        self.has_started = False
        self.deadline: asyncio.TimerHandle | None = None
        self._loop = loop

    @property
    def has_descriptor(self) -> bool:
        return self.connection.fileno() >= 0

    def drop(self) -> None:
        self.cancel_deadline()
        if self.has_started:
            # The event loop owns the socket now, and handles this like a disconnect.
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
        else:
            self._loop.remove_reader(self.connection)
            self.connection.close()

    def cancel_deadline(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None


def _close_sockets(sockets: Iterable[socket.socket]) -> None:
    for opened in sockets:
        opened.close()
