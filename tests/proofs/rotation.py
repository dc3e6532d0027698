"""Certificates of a short life, renewed again and again under load, and their authority rotated: not one
request fails.

    make rotation ARGS='--minutes 10 --lifetime 60'

A real broker with an authority, and clusters that advertise, borrow, give back and listen all the while.
Each keeps its certificate fresh as an agent does, and so does the broker its own.
No call is tried a second time, so nothing that fails is hidden. `mtls/test_rotation.py` runs the same for
a few seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

import msgspec

import brokers
from certificates import Certificates
from kubelend.apps import join
from kubelend.core.errors import KubelendError
from kubelend.kits import backoff
from kubelend.pki import authority, files, identity, tokens, x509
from kubelend.pki.files import Credentials
from kubelend.transports import tls
from kubelend.transports.client import BrokerClient
from kubelend.wire import bodies

Answer = TypeVar("Answer")

PLENTY = bodies.Metrics(bodies.Quantities("1000", "1000Gi"))
LITTLE = bodies.ReservationRequest(bodies.Quantities("10m", "1Mi"), duration="1h")
REST = 0.01
"""Seconds between two calls of one worker: load, but not more than two cores can bear."""


class Plan(msgspec.Struct, frozen=True):
    """What is proven."""

    lifetime: timedelta
    duration: timedelta
    clusters: int = 4
    workers: int = 4
    """At a time, for each cluster."""
    renew_every: timedelta | None = None
    """None: when a certificate is due. Else by force, and a slow machine misses no renewal."""

    @property
    def tick(self) -> timedelta:
        return self.renew_every or self.lifetime / 60


class Report(msgspec.Struct):
    """What came of it."""

    calls: int = 0
    events: int = 0
    renewals: Counter[str] = msgspec.field(default_factory=Counter)
    steps: list[str] = []
    """Of the authority's rotation."""
    failures: list[str] = []


async def prove(plan: Plan, root: Path) -> Report:
    """Run it for the duration, and until the authority has been rotated."""
    certificates = Certificates(root / "certificates")
    certificates.authority.save(root / "ca")
    report = Report()
    server = certificates.write(
        "live", identity.server_profile(), at=_now(), lifetime=plan.lifetime
    )
    settings: dict[str, Any] = {
        "http_cert_path": str(server),
        "certificate_check_interval": "100ms",
        "ca_path": str(root / "ca"),
        "certificate_lifetime": f"{round(plan.lifetime.total_seconds())}s",
        "enrol_port": "0",
    }
    async with brokers.child(certificates, root, **settings) as broker:
        clusters = [
            _Cluster(f"cluster-{number}", certificates, broker.port, plan, report)
            for number in range(plan.clusters)
        ]
        for cluster in clusters:
            await cluster.offer()
        async with asyncio.TaskGroup() as group:
            enough = group.create_task(asyncio.sleep(plan.duration.total_seconds()))
            work = [_count_renewals("broker", server, plan, report)]
            work += [cluster.live() for cluster in clusters]
            running = [group.create_task(each) for each in work]
            holders = [server, *(cluster.directory for cluster in clusters)]
            await _rotate_authority(root / "ca", holders, clusters, report)
            await enough
            for task in running:
                task.cancel()
    return report


class _Cluster:
    """Lends and borrows, with a certificate that it keeps fresh."""

    def __init__(
        self, name: str, certificates: Certificates, port: int, plan: Plan, report: Report
    ) -> None:
        self._name = name
        self._plan = plan
        self._report = report
        self._url = f"https://localhost:{port}"
        profile = identity.client_profile(name)
        self.directory = certificates.write(name, profile, at=_now(), lifetime=plan.lifetime)
        self._client = BrokerClient(
            self._url, self.directory, backoff=backoff.NO_RETRIES, check_every=plan.tick
        )
        self._running: set[object] = set()
        """Calls that have begun and not ended."""
        self._events = 0

    async def offer(self) -> None:
        """Before the others ask: with one alone there is nobody to borrow from."""
        async with self._client:
            await self._client.publish(bodies.Advertisement(self._name, PLENTY))

    async def live(self) -> None:
        async with self._client, asyncio.TaskGroup() as group:
            group.create_task(self._renew())
            group.create_task(_count_renewals(self._name, self.directory, self._plan, self._report))
            group.create_task(self._listen())
            for _ in range(self._plan.workers):
                group.create_task(self._work())

    async def _renew(self) -> None:
        while True:
            with contextlib.suppress(KubelendError):  # as the agent does, it tries again
                await join.renew_with_client(
                    self._client,
                    self._url,
                    self.directory,
                    self._plan.lifetime / 10,
                    _now(),
                    force=self._plan.renew_every is not None,
                )
            await asyncio.sleep(self._plan.tick.total_seconds())

    async def use_new_certificate(self) -> None:
        """Until no call and no stream uses an earlier one: a drop does not wait for them."""
        await self._client.refresh()
        # A stream compares certificates after each chunk that it receives, which may have several events.
        earlier, events = set(self._running), self._events
        await _until(lambda: not earlier & self._running and self._events > events + 10)

    async def _work(self) -> None:
        while True:
            await self._call(self._client.publish(bodies.Advertisement(self._name, PLENTY)))
            made = await self._call(self._client.reserve(LITTLE))
            if made is not None:
                await self._call(self._client.release(made.id))

    async def _call(self, call: Awaitable[Answer]) -> Answer | None:
        answer: Answer | None = None
        running = object()
        self._running.add(running)
        try:
            answer = await call
            self._report.calls += 1
        except KubelendError as error:
            self._fail(error)
        self._running.remove(running)
        await asyncio.sleep(REST)
        return answer

    async def _listen(self) -> None:
        """Each event once, in order, across all certificates."""
        last = 0
        while True:
            try:
                async with contextlib.aclosing(self._client.stream(after=str(last))) as stream:
                    async for instruction in stream:
                        if instruction.revision <= last:
                            self._fail(f"event {instruction.revision} after {last}")
                        last = instruction.revision
                        self._events += 1
                        self._report.events += 1
            except KubelendError as error:
                self._fail(error)

    def _fail(self, problem: object) -> None:
        self._report.failures.append(f"{_now():%H:%M:%S.%f} {self._name}: {problem}")


async def _rotate_authority(
    ca: Path, holders: list[Path], clusters: list[_Cluster], report: Report
) -> None:
    """Each step when all use what the one before brings."""

    async def until_used(is_renewed: Callable[[Credentials], bool]) -> None:
        await _until(lambda: all(is_renewed(files.load_credentials(one)) for one in holders))
        for cluster in clusters:
            await cluster.use_new_certificate()

    old = authority.Authority.load(ca).certificate
    new = authority.start_rotation(ca, now=_now())
    report.steps.append("rotate")
    await until_used(lambda found: new in found.authorities)
    authority.finish_rotation(ca)
    report.steps.append("sign")
    await until_used(lambda found: x509.is_issued_by(found.certificate, new))
    authority.drop_authority(ca, tokens.ca_pin(old))
    report.steps.append("drop")


async def _until(is_done: Callable[[], bool]) -> None:
    while True:
        await asyncio.sleep(0.2)
        if is_done():
            return


async def _count_renewals(name: str, directory: Path, plan: Plan, report: Report) -> None:
    serial = tls.own_certificate(directory).serial_number
    while True:
        await asyncio.sleep(plan.tick.total_seconds())
        found = tls.own_certificate(directory).serial_number
        report.renewals[name] += found != serial
        serial = found


def _now() -> datetime:
    return datetime.now(UTC)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make rotation ARGS=...")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--lifetime", type=float, default=60.0, help="seconds")
    parser.add_argument("--clusters", type=int, default=4)
    options = parser.parse_args()
    plan = Plan(
        lifetime=timedelta(seconds=options.lifetime),
        duration=timedelta(minutes=options.minutes),
        clusters=options.clusters,
    )
    with tempfile.TemporaryDirectory(prefix="kubelend-rotation-") as root:
        report = asyncio.run(prove(plan, Path(root)))
    print(
        f"{options.minutes:g} minutes, certificates of {options.lifetime:g} seconds:"
        f" {report.calls} calls and {report.events} events of {plan.clusters} clusters,"
        f" {report.renewals.total()} renewals, {len(report.failures)} failures;"
        f" steps of the authority's rotation: {', '.join(report.steps)}"
    )
    for failure in report.failures[:20]:
        print(failure)
    sys.exit(bool(report.failures) or not report.renewals or "drop" not in report.steps)


if __name__ == "__main__":
    main()
