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

from kubelend.kits.networks import network
from kubelend.transports.admission import Admission, Limit, Place, Watch

BACKLOG = 1024
"""Listen backlog: a whole fleet may reconnect at once."""

AT_ONCE = 32
"""Connections accepted per event loop iteration."""

PAUSE = 0.02
"""Seconds until the next attempt when file descriptors are exhausted."""

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

Serve = Callable[[Place], asyncio.Protocol]


class Security(NamedTuple):
    """TLS context and timeouts in seconds."""

    context: ssl.SSLContext | None
    handshake: float
    """From accept to the end of the handshake."""
    goodbye: float
    """For a client to read the remaining data and close the TLS connection."""


async def open_listeners(host: str, port: int) -> list[socket.socket]:
    """Opens a listening socket for each address of the host; all interfaces if empty."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    opened: list[socket.socket] = []
    for family, _, _, _, address in dict.fromkeys(found):
        try:
            opened.append(socket.create_server(address[:2], family=family, backlog=BACKLOG))
        except OSError as problem:
            # A machine without IPv6 can still listen on IPv4.
            if problem.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) and len(found) > 1:
                continue
            _close(opened)
            raise
    if not opened:
        raise OSError(errno.EADDRNOTAVAIL, "not an address of this machine")
    return opened


class Acceptor:
    """Accepts connections on sockets. `serve` creates the protocol of a connection."""

    def __init__(
        self,
        listeners: list[socket.socket],
        serve: Serve,
        admission: Admission,
        watch: Watch,
        security: Security,
    ) -> None:
        self._listeners = listeners
        self._serve = serve
        self._admission = admission
        self._watch = watch
        self._security = security
        self._loop = asyncio.get_running_loop()
        self._shaking: set[asyncio.Task[None]] = set()
        for listener in listeners:
            listener.setblocking(False)
            self._loop.add_reader(listener, self._accept, listener)

    async def close(self) -> None:
        """Stops accepting, and drops unfinished handshakes."""
        for listener in self._listeners:
            self._loop.remove_reader(listener)
        _close(self._listeners)
        self._admission.close_arrivals()
        if self._shaking:
            await asyncio.wait(self._shaking)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, address = listener.accept()
            except OSError as problem:
                # Other errors concern this connection alone, or there is none to accept.
                if problem.errno not in _EXHAUSTED:
                    return
                if not self._free_a_file():
                    self._pause(listener)
                    return
            else:
                self._receive(connection, network(address[0]))

    def _free_a_file(self) -> bool:
        """Closes an idle connection; returns whether its descriptor is free already."""
        spare = self._admission.make_room(Limit.FILES)
        if spare is None:
            self._watch.turned_away(Limit.FILES, "", None)
        return spare is not None and not spare.holder.has_file

    def _pause(self, listener: socket.socket) -> None:
        """Stops reading for a moment: the socket stays readable, and the loop would spin."""
        self._loop.remove_reader(listener)
        self._loop.call_later(PAUSE, self._resume, listener)

    def _resume(self, listener: socket.socket) -> None:
        if listener.fileno() >= 0:
            self._loop.add_reader(listener, self._accept, listener)

    def _receive(self, connection: socket.socket, remote: str) -> None:
        connection.setblocking(False)
        arrival = _Arrival(connection, self._loop)
        place = Place(remote, arrival)
        if not self._admission.arrive(place):
            connection.close()
            return
        arrival.deadline = self._loop.call_later(self._security.handshake, self._let_go, place)
        if self._security.context is None:
            self._begin(place, arrival)
        else:
            self._loop.add_reader(connection, self._spoke, place, arrival)

    def _spoke(self, place: Place, arrival: _Arrival) -> None:
        self._loop.remove_reader(arrival.connection)
        self._begin(place, arrival)

    def _let_go(self, place: Place) -> None:
        if not place.has_entered:
            place.holder.drop()
            self._admission.leave(place)

    def _begin(self, place: Place, arrival: _Arrival) -> None:
        arrival.has_begun = True
        task = self._loop.create_task(self._shake_hands(place, arrival))
        self._shaking.add(task)
        task.add_done_callback(self._shaking.discard)

    async def _shake_hands(self, place: Place, arrival: _Arrival) -> None:
        context, handshake, goodbye = self._security
        try:
            await self._loop.connect_accepted_socket(
                partial(self._serve, place),
                arrival.connection,
                ssl=context,
                ssl_handshake_timeout=handshake if context else None,
                ssl_shutdown_timeout=goodbye if context else None,
            )
        except ssl.SSLError as problem:
            self._watch.handshake_refused(place.remote, problem.reason or str(problem))
        except OSError:
            arrival.connection.close()  # disconnected, timed out, or dropped
        finally:
            arrival.forget_deadline()
            if not place.has_entered:
                self._admission.leave(place)


class _Arrival:
    """A connection whose handshake has not finished."""

    __slots__ = ("_loop", "connection", "deadline", "has_begun")

    is_resting = True

    def __init__(self, connection: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        self.connection = connection
        self.has_begun = False
        self.deadline: asyncio.TimerHandle | None = None
        self._loop = loop

    @property
    def has_file(self) -> bool:
        return self.connection.fileno() >= 0

    def drop(self) -> None:
        self.forget_deadline()
        if self.has_begun:
            # The event loop owns the socket now, and handles this like a disconnect.
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
        else:
            self._loop.remove_reader(self.connection)
            self.connection.close()

    def forget_deadline(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None


def _close(sockets: Iterable[socket.socket]) -> None:
    for opened in sockets:
        opened.close()
