"""Two ends of a TLS connection on loopback, to see who is let in and why not.

asyncio and uvloop close a refused handshake without a word, so a blocking server names the reason,
and an async one shows that it is the same in production.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from kubelend.core.errors import InvalidIdentity
from kubelend.pki import identity
from waiting import PATIENCE


@dataclass
class Handshake:
    """How both ends of one blocking connection saw it. Errors are texts, empty if none."""

    server_error: str = ""
    client_error: str = ""
    version: str | None = None
    protocol: str | None = None
    caller: str = ""
    session: ssl.SSLSession | None = None


def shake_hands(
    server: ssl.SSLContext,
    client: ssl.SSLContext,
    *,
    host: str = "localhost",
    session: ssl.SSLSession | None = None,
) -> Handshake:
    """One connection to 127.0.0.1 under the name `host`: a line each way, and an orderly end."""
    seen = Handshake(session=session)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_serve_one, args=(listener, server, seen))
        thread.start()
        try:
            _call(listener.getsockname()[1], client, host, seen)
        except (ssl.SSLError, ConnectionError) as error:
            seen.client_error = str(error)
        thread.join(timeout=PATIENCE)
    return seen


@contextlib.asynccontextmanager
async def serving(context: ssl.SSLContext) -> AsyncIterator[int]:
    """A server that answers each line with the caller's name; gives its port."""
    server = await asyncio.start_server(_answer, "127.0.0.1", 0, ssl=context)
    async with server:
        yield server.sockets[0].getsockname()[1]


class Connection:
    """A client's connection to such a server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def ask(self) -> str:
        """The name under which the server knows us; empty when it let us out instead of in."""
        try:
            self._writer.write(b"who am I?\n")
            return (await asyncio.wait_for(self._reader.readline(), PATIENCE)).decode().strip()
        except (ssl.SSLError, ConnectionError):
            return ""

    @property
    def serial(self) -> int:
        """Which certificate the server has shown."""
        shown = self._writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return x509.load_der_x509_certificate(shown).serial_number


@contextlib.asynccontextmanager
async def connected(port: int, context: ssl.SSLContext, host: str) -> AsyncIterator[Connection]:
    """A connection to `port`. No server name is sent when `host` is an address."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=context, server_hostname=host
    )
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            await writer.wait_closed()


async def name_of(port: int, context: ssl.SSLContext, host: str = "localhost") -> str:
    """The name under which the server knows a new connection; empty when it is refused."""
    try:
        async with connected(port, context, host) as connection:
            return await connection.ask()
    except (ssl.SSLError, ConnectionError):
        return ""


def serial_in(directory: Path) -> int:
    """Which certificate lies in a directory."""
    return x509.load_pem_x509_certificate((directory / "tls.crt").read_bytes()).serial_number


def _serve_one(listener: socket.socket, context: ssl.SSLContext, seen: Handshake) -> None:
    raw, _ = listener.accept()
    raw.settimeout(10)
    try:
        connection = _Connection(raw, context)
        connection.do(connection.tls.do_handshake)
        seen.caller = identity.caller_from_peercert(connection.tls.getpeercert() or {}).name
        connection.do(connection.tls.read, 100)
        connection.do(connection.tls.write, b"welcome\n")
        connection.do(connection.tls.unwrap)
    except (ssl.SSLError, ConnectionError, InvalidIdentity) as error:
        seen.server_error = str(error)
    finally:
        raw.close()


class _Connection:
    """A server's end, wrapped as event loops do it."""

    def __init__(self, raw: socket.socket, context: ssl.SSLContext) -> None:
        self._raw, self._incoming, self._outgoing = raw, ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)

    def do(self, step: Callable[..., object], *arguments: object) -> None:
        """Take a step as soon as enough has arrived for it; what it says, an alert too, is sent."""
        while True:
            try:
                step(*arguments)
                return
            except ssl.SSLWantReadError:
                pass
            finally:
                self._raw.sendall(self._outgoing.read())
            if received := self._raw.recv(2**16):
                self._incoming.write(received)
            else:
                self._incoming.write_eof()


def _call(port: int, context: ssl.SSLContext, host: str, seen: Handshake) -> None:
    """Resumes the session in `seen`, if there is one."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as raw,
        context.wrap_socket(raw, server_hostname=host, session=seen.session) as connection,
    ):
        connection.sendall(b"hello\n")
        connection.recv(100)
        seen.version = connection.version()
        seen.protocol = connection.selected_alpn_protocol()
        seen.session = connection.session
        connection.unwrap().close()


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ssl.SSLError, ConnectionError):
        while await reader.readline():
            caller = identity.caller_from_peercert(writer.get_extra_info("peercert"))
            writer.write(f"{caller.name}\n".encode())
            await writer.drain()
    writer.close()
