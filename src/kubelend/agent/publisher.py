"""The publisher: advertises this cluster to the broker, periodically and after significant changes.

It always sends the current measurement and queues nothing, so after an outage the broker receives the
current state. Reservations in the response go to the `ReservationCache`. `AdvertisementWriter` writes the
Advertisement object; `LocalPublisher` runs without a broker.

The collector applies changes of the cluster's nodes and pods to the inventory, one at a time. The cost of a
change does not depend on the size of the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Final

from msgspec.structs import replace

from kubelend.agent import advertisement, controller
from kubelend.agent import health as agent_health
from kubelend.agent.advertisement import AdvertisementConfig
from kubelend.agent.health import ComponentHealth
from kubelend.agent.ports import (
    BrokerCommunicator,
    Clock,
    ClusterChange,
    ClusterSource,
    LocalObjects,
    NodeDeleted,
    PodDeleted,
    Snapshot,
)
from kubelend.agent.reservation_cache import ReservationCache, with_timeout
from kubelend.core import durations
from kubelend.core.errors import (
    IdentityInUse,
    KubelendError,
)
from kubelend.core.inventory import Inventory, Totals
from kubelend.core.pod_requests import Node, Pod
from kubelend.kits import tasks
from kubelend.kits.backoff import Backoff
from kubelend.wire import bodies
from kubelend.wire.objects import Advertisement, AdvertisementStatus, with_status

PUBLISHER_COMPONENT: Final = "publisher"

COALESCE_INTERVAL: Final = timedelta(milliseconds=200)
"""Changes come in bursts, and a comparison costs more than a change: wait for the rest of the burst."""

FIRST_RETRY_DELAY: Final = timedelta(seconds=1)
MIN_PUBLISH_TIMEOUT: Final = timedelta(seconds=10)
"""Minimum timeout of a publish call, if the interval is shorter. Independent of the communicator's
retries: after this time there is a newer measurement to send."""


class Publisher:
    """Use `run` as a root task, and call `notify_changed` whenever the inventory may have changed."""

    def __init__(  # noqa: PLR0913 - explicit dependencies
        self,
        *,
        settings: AdvertisementConfig,
        inventory: Inventory,
        communicator: BrokerCommunicator,
        reservations: ReservationCache,
        objects: LocalObjects,
        health: ComponentHealth,
        clock: Clock,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.published_at: datetime | None = None
        """When the broker last accepted an advertisement."""
        self._settings = settings
        self._inventory = inventory
        self._communicator = communicator
        self._reservations = reservations
        self._health = health
        self._clock = clock
        self._chance = chance
        self._writer = AdvertisementWriter(settings, objects, health, clock)
        self._changed = asyncio.Event()
        self._last_error: KubelendError | None = None
        self._retry_delays = self._new_retry_delays()

    def notify_changed(self) -> None:
        """Check whether the change is significant enough to advertise now."""
        self._changed.set()

    async def run(self, measured: asyncio.Event) -> None:
        """Advertise from the first measurement on. Runs until cancelled."""
        await measured.wait()
        await tasks.run_all(
            {"publish": self._publish_loop(), "write advertisement": self._writer.run()}
        )

    async def _publish_loop(self) -> None:
        while True:
            totals = self._inventory.totals()
            try:
                answer = await self._send(totals)
            except KubelendError as error:
                status = AdvertisementStatus(phase="Error", message=str(error))
                self._writer.submit(totals, status)
                await asyncio.sleep(self._retry_delay(error))
            else:
                self._on_published(totals, answer)
                await self._wait_for_change_or_due(totals)

    async def _send(self, totals: Totals) -> bodies.PublishResult:
        body = advertisement.advertisement_body(self._settings, totals, self._clock())
        timeout = max(self._settings.interval, MIN_PUBLISH_TIMEOUT)
        sent_at = self._reservations.sequence()
        answer = await with_timeout(self._communicator.publish(body), timeout)
        self._reservations.put_instructions(answer.provider_instructions, sent_at, "advertisement")
        return answer

    def _on_published(self, totals: Totals, answer: bodies.PublishResult) -> None:
        self.published_at = self._clock()
        self._last_error, self._retry_delays = None, self._new_retry_delays()
        self._health.report(PUBLISHER_COMPONENT)
        available = answer.advertisement.resources.available
        self._writer.submit(totals, AdvertisementStatus("Active", published=True), available)

    async def _wait_for_change_or_due(self, published: Totals) -> None:
        """Wait for the due time or a significant change; changes during damping are checked after it."""
        try:
            async with asyncio.timeout(self._settings.until_due(self._clock())):
                await asyncio.sleep(self._settings.damping.total_seconds())
                while not advertisement.is_significant_change(published, self._inventory.totals()):
                    self._changed.clear()
                    await self._changed.wait()
                    await asyncio.sleep(COALESCE_INTERVAL.total_seconds())
        except TimeoutError:
            return

    def _retry_delay(self, problem: KubelendError) -> float:
        """Seconds until the next attempt. Permanent errors wait for the next due time."""
        if not problem.retryable:
            self._last_error, self._retry_delays = problem, self._new_retry_delays()
            self._health.report(PUBLISHER_COMPONENT, str(problem))
            return self._settings.until_due(self._clock())
        # Retries may word the same failure differently; only another error class is logged again.
        if type(problem) is not type(self._last_error):
            self._last_error = problem
            self._health.report(PUBLISHER_COMPONENT, str(problem))
        interval = self._settings.interval.total_seconds()
        pause = max(next(self._retry_delays), min(problem.retry_after, interval))
        if isinstance(problem, IdentityInUse):
            return min(pause, agent_health.TAKEOVER_RETRY_INTERVAL.total_seconds())
        return pause

    def _new_retry_delays(self) -> Iterator[float]:
        backoff = Backoff(sys.maxsize, FIRST_RETRY_DELAY, longest=self._settings.interval)
        return backoff.delays(self._chance)


WRITER_COMPONENT: Final = "advertisement"
"""The component under which write errors are reported; the publisher's own is for errors of the broker."""

WRITE_TIMEOUT: Final = timedelta(seconds=10)


class AdvertisementWriter:
    """Writes the latest submitted state; older ones that were not written in time are skipped."""

    def __init__(
        self,
        settings: AdvertisementConfig,
        objects: LocalObjects,
        health: ComponentHealth,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._objects = objects
        self._health = health
        self._clock = clock
        self._latest: Advertisement | None = None
        self._submitted = asyncio.Event()

    def submit(
        self,
        totals: Totals,
        status: AdvertisementStatus,
        available: bodies.Amounts | None = None,
    ) -> None:
        """`available` is what the broker has computed."""
        now = self._clock()
        wanted = advertisement.advertisement_object(self._settings, totals, now, available)
        self._latest = with_status(wanted, status, now)
        self._submitted.set()

    async def run(self) -> None:
        """Write submitted objects until cancelled; a failure is reported and the next object tried."""
        while True:
            await self._submitted.wait()
            self._submitted.clear()
            if self._latest is not None:
                self._health.report(WRITER_COMPONENT, await self._write_error(self._latest))

    async def _write_error(self, wanted: Advertisement) -> str:
        async def write() -> None:
            stored = await controller.apply_object(self._objects, wanted)
            await self._objects.set_status(replace(stored, status=wanted.status))

        try:
            async with asyncio.timeout(WRITE_TIMEOUT.total_seconds()):
                await controller.retry_on_conflict(write)
        except TimeoutError:
            timeout = durations.format_duration_short(WRITE_TIMEOUT)
            return f"Advertisement {wanted.key}: not written within {timeout}"
        except KubelendError as error:
            return str(error)
        return ""


NO_BROKER_STATUS: Final = AdvertisementStatus(phase="Active", message="no broker configured")


class LocalPublisher:
    """Writes advertisements only to the local object, without a broker. Use `run` as a root task."""

    def __init__(
        self,
        settings: AdvertisementConfig,
        inventory: Inventory,
        objects: LocalObjects,
        health: ComponentHealth,
        clock: Clock,
    ) -> None:
        self._settings = settings
        self._inventory = inventory
        self._writer = AdvertisementWriter(settings, objects, health, clock)
        self._clock = clock

    async def run(self, measured: asyncio.Event) -> None:
        """Write the object once per interval from the first measurement on. Runs until cancelled."""
        await measured.wait()
        await tasks.run_all(
            {"measure": self._write_loop(), "write advertisement": self._writer.run()}
        )

    async def _write_loop(self) -> None:
        while True:
            self._writer.submit(self._inventory.totals(), NO_BROKER_STATUS)
            await asyncio.sleep(self._settings.until_due(self._clock()))


COMPONENT: Final = "collector"

SOURCE_CHECK_INTERVAL: Final = timedelta(seconds=1)
"""How often the source's `problem` is polled."""

REOPEN_BACKOFF: Final = Backoff(sys.maxsize, timedelta(seconds=1), timedelta(seconds=30))


class Collector:
    """Use `run` as a root task; `measured` is set after the first snapshot."""

    def __init__(
        self,
        source: ClusterSource,
        inventory: Inventory,
        health: ComponentHealth,
        on_change: Callable[[], None],
    ) -> None:
        self.measured = asyncio.Event()
        self._source = source
        self._inventory = inventory
        self._health = health
        self._on_change = on_change
        self._stream_error = ""
        """Why the stream of changes ended; empty after the next snapshot."""

    async def run(self) -> None:
        """Apply changes and report health. Runs until cancelled."""
        await tasks.run_all({"collect": self._collect(), "check source": self._check_source()})

    async def _collect(self) -> None:
        """Reopens a source that ends; it starts with a snapshot, so nothing is missed."""
        loop = asyncio.get_running_loop()
        pauses = REOPEN_BACKOFF.delays()
        while True:
            opened = loop.time()
            self._stream_error = await self._apply_changes()
            self._set_health()
            if loop.time() - opened > REOPEN_BACKOFF.longest.total_seconds():
                pauses = REOPEN_BACKOFF.delays()
            await asyncio.sleep(next(pauses))

    async def _apply_changes(self) -> str:
        """Apply changes until the stream ends; returns why."""
        try:
            async with contextlib.aclosing(self._source.changes()) as changes:
                async for change in changes:
                    self._apply(change)
        except KubelendError as error:
            return str(error)
        return "the stream of cluster changes ended unexpectedly"

    def _apply(self, change: ClusterChange) -> None:
        match change:
            case Snapshot(nodes, pods):
                self._inventory.reset(nodes, pods)
                self._stream_error = ""
                self.measured.set()
                self._set_health()
            case Node():
                self._inventory.put_node(change)
            case NodeDeleted(name):
                self._inventory.delete_node(name)
            case Pod():
                self._inventory.put_pod(change)
            case PodDeleted(id):
                self._inventory.delete_pod(id)
        self._on_change()

    async def _check_source(self) -> None:
        while True:
            self._set_health()
            await asyncio.sleep(SOURCE_CHECK_INTERVAL.total_seconds())

    def _set_health(self) -> None:
        problem = self._source.problem or self._stream_error
        # Before the first snapshot the component is starting, not healthy.
        if problem or self.measured.is_set():
            self._health.report(COMPONENT, problem)
