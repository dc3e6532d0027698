"""A running broker: in this process with a clock to move, or as a process of its own to signal and kill.

    async with brokers.running(certificates, retention=make.MINUTE) as broker:
        await broker.cluster("a").advertise()
        broker.clock.pass_time(make.HOUR)

Both are the broker as it is shipped (`kubelend.apps.broker`), over real sockets with real TLS.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client import parser

from callers import Caller
from certificates import Certificates
from clocks import Clock
from kubelend.apps import broker as app
from kubelend.apps.certificates import CertificateManager
from kubelend.apps.flags import Address
from kubelend.apps.settings import BrokerSettings
from kubelend.broker.metrics import BrokerMetrics
from kubelend.broker.ports import SINGLE_REPLICA, Leadership, OpenStore, Store
from kubelend.broker.service import Broker, BrokerRules
from kubelend.core.errors import StoreFailed
from kubelend.core.ledger import Ledger
from kubelend.kits import tasks
from kubelend.stores import factory
from kubelend.stores.memory import MemoryStore
from waiting import PATIENCE, until

ANY_PORT = Address("127.0.0.1", 0)


class Callers:
    """Whoever a test has call the broker; each is made once, and closed at the end."""

    def __init__(self, port: int, certificates: Certificates) -> None:
        self.port = port
        self.certificates = certificates
        self._known: dict[Path, Caller] = {}

    def cluster(self, name: str) -> Caller:
        return self.holder(self.certificates.cluster(name), name)

    def admin(self, name: str = "alice") -> Caller:
        return self.holder(self.certificates.admin(name), name)

    def viewer(self, name: str = "victor") -> Caller:
        return self.holder(self.certificates.viewer(name), name)

    def holder(self, directory: Path, name: str = "") -> Caller:
        """Whoever has the certificate in this directory."""
        if directory not in self._known:
            self._known[directory] = Caller(self.port, directory, name)
        return self._known[directory]

    async def hang_up(self) -> None:
        for caller in self._known.values():
            await caller.hang_up()


class Running(Callers):
    """A broker in this process."""

    def __init__(self, process: app.BrokerApp, clock: Clock, certificates: Certificates) -> None:
        super().__init__(process.ports["api"], certificates)
        self.process = process
        self.service = process.broker
        self.clock = clock

    @property
    def trust(self) -> CertificateManager:
        """Of a broker that serves the REST interface, as all do that are made here."""
        assert self.process.certificates is not None
        return self.process.certificates

    async def expire(self) -> None:
        """End what is over now, instead of within the second."""
        await self.service.expire()

    def metric(self, name: str, /, **labels: str) -> float:
        """The present value of one series; 0 if there is none."""
        text = self.process.metrics.render(self.process.metrics.snapshot(self.clock()))
        return series(text.decode(), name, **labels)


def series(text: str, name: str, /, **labels: str) -> float:
    """The value of one series in what `/metrics` says; 0 if there is none."""
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            if (sample.name, sample.labels) == (name, labels):
                return sample.value
    return 0.0


@asynccontextmanager
async def running(certificates: Certificates, **parameters: Any) -> AsyncIterator[Running]:
    """A broker that is ready; the parameters are those of `listening`."""
    async with listening(certificates, **parameters) as broker:
        await until(lambda: broker.service.unready is None)
        yield broker


@asynccontextmanager
async def listening(
    certificates: Certificates,
    *,
    open_store: OpenStore | None = None,
    clock: Clock | None = None,
    **settings: Any,
) -> AsyncIterator[Running]:
    """A broker, perhaps before it is ready, in memory by default; `settings` are BrokerSettings."""
    clock = clock or Clock()
    values = LOOPBACK | {"http_cert_path": certificates.server(), "rate_limit": 0} | settings
    started = app.open_broker(
        BrokerSettings(**values), open_store=open_store or reopening(MemoryStore()), now=clock
    )
    async with AsyncExitStack() as stack:
        process = await stack.enter_async_context(started)
        stack.push_async_callback(_stop, asyncio.create_task(tasks.run_all(process.root_tasks())))
        broker = Running(process, clock, certificates)
        stack.push_async_callback(broker.hang_up)
        yield broker


LOOPBACK: dict[str, Any] = {
    "http_host": "127.0.0.1",
    "http_port": 0,
    "health_probe_bind_address": ANY_PORT,
    "metrics_bind_address": ANY_PORT,
    "store": "memory:",
}


def reopening(store: Store) -> OpenStore:
    """Gives the same store whenever it is opened anew."""
    return lambda: store


def failure(why: str) -> StoreFailed:
    """What a store raises that cannot go on."""
    return StoreFailed(why)


# -- as a process


class Child(Callers):
    """A broker in a process of its own."""

    def __init__(
        self, process: subprocess.Popen[bytes], log: Path, certificates: Certificates
    ) -> None:
        super().__init__(0, certificates)
        self.process = process
        self.ports: dict[str, int] = {}
        self._log = log

    def log(self) -> list[dict[str, Any]]:
        """Its log so far, a value for each line; what Python says of its end is left out."""
        whole, _, _ = self._log.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.log() if line["event"] == event]

    async def probe(self, path: str, listener: str = "probes") -> tuple[int, str]:
        """Status and text of what answers without TLS."""
        url = f"http://127.0.0.1:{self.ports[listener]}{path}"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return response.status, await response.text()

    async def is_ready(self) -> bool:
        return (await self.probe("/readyz"))[0] == 200

    async def wait_until_ready(self) -> None:
        await until(self.is_ready)

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal it, wait for its end, and give its exit status."""
        self.process.send_signal(number)
        return await asyncio.to_thread(self.process.wait, PATIENCE)

    async def wait_until_listening(self) -> None:
        # The REST interface is the last to listen.
        await until(lambda: self.process.poll() is not None or "api" in self._listeners())
        assert self.process.poll() is None, self._log.read_text()
        self.ports = self._listeners()
        self.port = self.ports["api"]

    def _listeners(self) -> dict[str, int]:
        return {line["component"]: line["port"] for line in self.logged("Listening")}


@asynccontextmanager
async def child(
    certificates: Certificates, directory: Path, *, ready: bool = True, **settings: str
) -> AsyncIterator[Child]:
    """A process with its store and log in `directory`; `settings` are texts, as flags have them.

    `read_batch_seconds` is no flag: with 0 no advertisement waits for others to be read with it.
    """
    values = {
        "http_cert_path": str(certificates.server()),
        "store": str(directory / "kubelend.db"),
        "http_host": "127.0.0.1",
        "http_port": "0",
        "health_probe_bind_address": "127.0.0.1:0",
        "metrics_bind_address": "127.0.0.1:0",
        "rate_limit": "0",
    }
    log = directory / "log"
    with _process(values | settings, log) as process:
        broker = Child(process, log, certificates)
        await broker.wait_until_listening()
        if ready:
            await broker.wait_until_ready()
        try:
            yield broker
        finally:
            await broker.hang_up()


def audited(path: Path) -> Ledger:
    """The ledger in a store that no broker uses now; all its invariants hold, and its audit log agrees."""
    ledger, violations, _ = factory.audit_store(str(path))
    assert violations == []
    return ledger


_PROGRAM = """
import json, sys
from kubelend.apps import broker, flags, settings
values = json.loads(sys.argv[1])
broker.READ_BATCH_SECONDS = float(values.pop("read_batch_seconds", broker.READ_BATCH_SECONDS))
broker.run_broker(flags.parse_settings(settings.BrokerSettings, values))
"""


@contextmanager
def _process(values: dict[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", _PROGRAM, json.dumps(values)]
    with log.open("wb") as stderr, subprocess.Popen(command, stderr=stderr) as process:
        try:
            yield process
        finally:
            process.kill()


@asynccontextmanager
async def loaded(
    *,
    store: Store | None = None,
    clock: Clock | None = None,
    rules: BrokerRules | None = None,
    leadership: Leadership = SINGLE_REPLICA,
) -> AsyncIterator[Broker]:
    """The use cases alone, in memory by default; no task of theirs runs."""
    open_store = reopening(store or MemoryStore())
    broker = Broker(
        open_store, clock or Clock(), rules or BrokerRules(), BrokerMetrics(), leadership
    )
    await broker.load()
    try:
        yield broker
    finally:
        await broker.close()


async def _stop(roots: asyncio.Task[str]) -> None:
    """Roots run until they are cancelled; one that ended by itself has failed."""
    assert not roots.done() or roots.exception() is None
    roots.cancel()
    await asyncio.wait([roots])
