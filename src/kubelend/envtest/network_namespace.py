"""A network namespace with nothing but a loopback interface, for servers that listen on all interfaces.

Some of Liqo's programs cannot be told to listen on the loopback address only. In a namespace of their own
nobody else can reach them. Everything in it shares 127.0.0.1; `expose` makes a port reachable from outside,
under the same number.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import queue
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from kubelend.core.errors import InvalidSettings

_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_INTERFACE_UP = 0x1
_CHUNK = 64 * 1024


def check_permitted() -> None:
    """Raises `InvalidSettings` if this process may not create a network namespace."""
    failures: queue.SimpleQueue[OSError | None] = queue.SimpleQueue()

    def attempt() -> None:
        try:
            _unshare()
        except OSError as error:
            failures.put(error)
        else:
            failures.put(None)

    # A namespace belongs to the thread: it goes with it.
    threading.Thread(target=attempt).start()
    if error := failures.get():
        raise InvalidSettings(
            f"cannot create a network namespace: {error.strerror}",
            hint="run as root, or without Liqo (LIQO=0)",
        )


class NetworkNamespace:
    """The namespace of the thread that has called `isolate`, and of the processes that it starts."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[tuple[int, queue.SimpleQueue[socket.socket]]] = (
            queue.SimpleQueue()
        )
        self._loop = asyncio.new_event_loop()

    def expose(self, port: int) -> None:
        """Forwards connections to this port of 127.0.0.1 outside to the same port inside."""
        answer: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._requests.put((port, answer))
        listener = answer.get()
        asyncio.run_coroutine_threadsafe(self._serve(listener, port), self._loop).result()

    async def _serve(self, listener: socket.socket, port: int) -> None:
        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(OSError):
                inside_reader, inside_writer = await asyncio.open_connection("127.0.0.1", port)
                await asyncio.gather(_copy(reader, inside_writer), _copy(inside_reader, writer))
            writer.close()

        await asyncio.start_server(forward, sock=listener)

    def _listen_outside(self) -> None:
        """Runs in a thread that stays outside, because a socket belongs to the namespace of its creation."""
        while True:
            port, answer = self._requests.get()
            answer.put(socket.create_server(("127.0.0.1", port)))


@contextmanager
def isolate() -> Iterator[NetworkNamespace]:
    """Moves the calling thread into a new namespace, with the processes that it starts from now on."""
    namespace = NetworkNamespace()
    threading.Thread(target=namespace._listen_outside, daemon=True).start()  # noqa: SLF001
    outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    _unshare()
    _set_loopback_up()
    # Started inside: its outgoing connections are those of the namespace.
    threading.Thread(target=namespace._loop.run_forever, daemon=True).start()  # noqa: SLF001
    try:
        yield namespace
    finally:
        namespace._loop.call_soon_threadsafe(namespace._loop.stop)  # noqa: SLF001
        _call("setns", outside, _CLONE_NEWNET)
        os.close(outside)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copies until the end of the stream, which it passes on."""
    with suppress(OSError):
        while chunk := await reader.read(_CHUNK):
            writer.write(chunk)
            await writer.drain()
    with suppress(OSError):
        writer.write_eof()


def _unshare() -> None:
    _call("unshare", _CLONE_NEWNET)


def _call(function: str, *arguments: int) -> None:
    """Calls a function of libc that Python has only from version 3.12 on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _set_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh14x", b"lo", _INTERFACE_UP)
        fcntl.ioctl(control, _SIOCSIFFLAGS, request)
