"""Where connections come in: accepted, counted, and handed to TLS as soon as their client speaks.

The servers of asyncio and uvloop do that out of sight, and not well enough for hostile clients: one that
connects and says nothing costs the whole state of a TLS connection (53 KB here, where a bare socket costs 1),
nobody is asked whether there is room, and uvloop's server closes without a word when files run out.
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
"""Connections that the kernel keeps for us: a whole fleet may come back at once."""

AT_ONCE = 32
"""Connections accepted before others have their turn."""

PAUSE = 0.02
"""Seconds until the next try when the process or the system has no file left."""

_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

Serve = Callable[[Place], asyncio.Protocol]


class Security(NamedTuple):
    """How connections are secured, and how long that may take, in seconds."""

    context: ssl.SSLContext | None
    handshake: float
    """From the connection to the end of the handshake."""
    goodbye: float
    """For a client to take what is left, and to agree that the connection ends."""


async def open_listeners(host: str, port: int) -> list[socket.socket]:
    """A listening socket for each address of the host; all interfaces if it is empty."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    opened: list[socket.socket] = []
    for family, _, _, _, address in dict.fromkeys(found):
        try:
            opened.append(socket.create_server(address[:2], family=family, backlog=BACKLOG))
        except OSError as problem:
            # A machine without IPv6 has an address to listen on all the same.
            if problem.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) and len(found) > 1:
                continue
            _close(opened)
            raise
    if not opened:
        raise OSError(errno.EADDRNOTAVAIL, "no address of it is on this machine")
    return opened


class Acceptor:
    """Accepts on some sockets. `serve` makes the protocol of a connection."""

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
        """Accept nobody else, and let go of handshakes that are not finished."""
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
                # All others are over with this connection, or mean that there is none.
                if problem.errno not in _EXHAUSTED:
                    return
                if not self._free_a_file():
                    self._pause(listener)
                    return
            else:
                self._receive(connection, network(address[0]))

    def _free_a_file(self) -> bool:
        """Whether the next can be accepted now. What the loop closes is free a moment later."""
        spare = self._admission.make_room(Limit.FILES)
        if spare is None:
            self._watch.turned_away(Limit.FILES, "", None)
        return spare is not None and not spare.holder.has_file

    def _pause(self, listener: socket.socket) -> None:
        """The socket stays readable, so without a pause the loop would do nothing else."""
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
            arrival.connection.close()  # it went away, was too slow, or had to go
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
            # The loop owns it now, and sees its end as if the client had gone.
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
