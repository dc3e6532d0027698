"""A stretch of network to a broker that a test can cut, each way by itself, slow down and mend.

    async with tcp_cuts.network(broker.port) as line:
        ... https://localhost:{line.port} ...
        line.cut(up=False)          # questions arrive, answers do not
        line.mend()

What is said into a cut is lost without a word, as by a switch that drops packets: neither end notices
anything before its own patience is over. Connections that have lost something are broken when it is mended,
for nobody could go on with them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

HOST = "127.0.0.1"
CHUNK = 65536


class Line:
    """A listener on loopback whose connections end at another one."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self.up, self.down = _Way(), _Way()
        """Towards the broker, and back."""
        self._target = target
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def has_lost(self) -> bool:
        """Whether something was said into a cut that is still there."""
        return any(link.has_lost for link in self._links)

    def cut(self, *, up: bool = True, down: bool = True) -> None:
        """Lose all that is said from now on, upwards, downwards or both."""
        self.up.is_cut, self.down.is_cut = up, down

    def slow(self, *, up: float = 0.0, down: float = 0.0) -> None:
        """What is said from now on takes so many seconds."""
        self.up.delay, self.down.delay = up, down

    def mend(self) -> None:
        """Lose nothing more, and be quick."""
        self.cut(up=False, down=False)
        self.slow()
        for link in list(self._links):
            if link.has_lost:
                link.abort()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.CancelledError):
            # The broker is not there; or the test is over, and a server must not be told of that.
            return
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(HOST, self._target)
        link = _Link(writer, far_writer)
        self._links.add(link)
        try:
            await asyncio.gather(
                link.pump(reader, far_writer, self.up), link.pump(far_reader, writer, self.down)
            )
        finally:
            self._links.discard(link)
            link.abort()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


class _Way:
    """One direction."""

    def __init__(self) -> None:
        self.is_cut = False
        self.delay = 0.0


class _Link:
    """One connection and its other half."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self._ends = (near, far)
        self.has_lost = False

    async def pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: _Way
    ) -> None:
        """Hand on all that comes, in its order, until it ends."""
        loop, due = asyncio.get_running_loop(), 0.0
        with suppress(ConnectionError):
            while True:
                chunk = await reader.read(CHUNK)
                if way.is_cut:
                    self.has_lost = True
                    if not chunk:
                        return
                    continue
                due = max(due, loop.time() + way.delay)
                loop.call_at(due, self._hand_on, writer, chunk)
                if not chunk:
                    return

    def abort(self) -> None:
        for end in self._ends:
            end.transport.abort()

    def _hand_on(self, writer: asyncio.StreamWriter, chunk: bytes) -> None:
        if writer.transport.is_closing():
            return
        if chunk:
            writer.write(chunk)
        else:
            self.abort()


@asynccontextmanager
async def network(target: int) -> AsyncIterator[Line]:
    """A whole one, until told otherwise."""
    line = Line(target)
    server = await asyncio.start_server(line.accept, HOST, 0)
    line.port = server.sockets[0].getsockname()[1]
    try:
        yield line
    finally:
        server.close()
        await line.close()
