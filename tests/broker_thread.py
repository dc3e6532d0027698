"""A real broker over TLS in a thread of this process: for commands that run in process against it.

with broker_thread.running(certificates.server(), tmp_path) as broker:
    main.run(["get", "clusters", "--broker-url", broker.url, ...])
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import structlog

import logging_state
from brokers import LOOPBACK
from kubelend.apps import broker
from kubelend.apps.settings import BrokerSettings
from kubelend.kits import tasks
from waiting import PATIENCE, until


class Running(NamedTuple):
    """A broker that answers."""

    url: str
    store: Path
    ports: dict[str, int]


@contextlib.contextmanager
def running(certificates: Path, directory: Path, **settings: Any) -> Iterator[Running]:
    """Start it on a free port of loopback, with its store in `directory`; `settings` are BrokerSettings."""
    store = directory / "kubelend.db"
    values = LOOPBACK | {"http_cert_path": certificates, "store": str(store)} | settings
    ready: Future[dict[str, int]] = Future()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            try:
                runner.run(_serve(BrokerSettings(**values), ready, stop))
            except BaseException as error:
                if not ready.done():
                    ready.set_exception(error)
                raise

    thread = threading.Thread(target=run, name="broker", daemon=True)
    with logging_state.put_back():
        # Its log would stand in the output of the commands.
        structlog.configure(processors=[_drop])
        thread.start()
        try:
            ports = ready.result(PATIENCE)
            yield Running(f"https://localhost:{ports['api']}", store, ports)
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join(PATIENCE)
            assert not thread.is_alive()


async def _serve(
    settings: BrokerSettings, ready: Future[dict[str, int]], stop: asyncio.Event
) -> None:
    async with broker.open_broker(settings) as process:
        roots = asyncio.create_task(tasks.run_all(process.root_tasks()))
        await until(lambda: process.broker.unready is None)
        ready.set_result(process.ports)
        await stop.wait()
        roots.cancel()
        await asyncio.wait([roots])


def _drop(*_: object) -> dict[str, Any]:
    raise structlog.DropEvent
