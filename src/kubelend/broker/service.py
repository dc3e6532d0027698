"""The broker's use cases, and the single writer of its ledger.

Every change is decided, assumed and handed to the store in one stretch without `await`; it is answered
when it is durable. Every answer, also to a question, waits until what it shows is durable. When the store
fails, the broker is unready, drops its memory and reads it anew: it never guesses.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from typing import TypeVar

import msgspec
import structlog

from kubelend.broker import naming, views
from kubelend.broker.commits import GroupCommit
from kubelend.broker.feeds import Feeds
from kubelend.broker.metrics import Metrics, Outcome
from kubelend.broker.ports import Clock, OpenStore
from kubelend.core import commands, explanations
from kubelend.core.commands import Command
from kubelend.core.decision import NoFit
from kubelend.core.errors import KubelendError, NotFound, NotReady, no_reservation
from kubelend.core.events import Change
from kubelend.core.filters import Question
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import Phase, Reason
from kubelend.core.models import (
    Advertisement,
    ClusterId,
    Request,
    Reservation,
    ReservationId,
)

Answer = TypeVar("Answer")
View = TypeVar("View")

log = structlog.get_logger("kubelend.broker")


class Rules(msgspec.Struct, frozen=True):
    """The limits of time and number that hold for everyone."""

    stale_after: timedelta = timedelta(minutes=10)
    """An advertisement older than this is not believed."""
    retention: timedelta = timedelta(hours=1)
    """How long a finished reservation stays at hand before it is archived."""
    max_waiting: int = 1000
    """How many requests may wait for capacity at a time."""


class Broker:
    """Use `run` as a root task; everything else may be called once `unready` is None."""

    def __init__(self, open_store: OpenStore, clock: Clock, rules: Rules, metrics: Metrics) -> None:
        self.feeds = Feeds()
        self.clock = clock
        self.unready: str | None = "starting: the store is being read"
        """Why no call can be answered now, or None."""
        self._rules = rules
        self._metrics = metrics
        self._commits = GroupCommit(open_store, self._landed, self._store_failed)
        self._ledger = Ledger()
        self._wake = asyncio.Event()

    # -- life

    async def run(self, patience: float = 1.0) -> None:
        """Load, then end what is due; after a failure of the store load again. Never returns."""
        while True:
            await self._load(patience)
            while self.unready is None:
                await self._sleep_until_due(patience)
                if self.unready is None:
                    await self._expire_quietly()

    async def load(self) -> None:
        """Take the state from the store, and be ready."""
        records = await self._commits.load()
        self._ledger = Ledger.restore(records)
        self._metrics.watch(self._ledger)
        self.unready = None
        log.info(
            "ready",
            clusters=len(records.clusters),
            reservations=len(records.reservations),
            revision=records.revision,
        )

    async def expire(self) -> None:
        """End what is over, and archive what ended long ago."""
        ledger, now = self._present()
        self._run(ledger, commands.expire(ledger, self._rules.retention, now), now)
        await self._commits.settled()

    async def close(self) -> None:
        """Refuse what is new, finish what has begun, and let go of the store."""
        self.unready = "stopping"
        self.feeds.close_all()
        self._wake.set()
        await self._commits.close()

    # -- providers

    async def advertise(
        self, advertisement: Advertisement
    ) -> tuple[views.ClusterView, list[Reservation]]:
        """Take in what a cluster offers; answer what it has to hold."""
        stale_after = self._rules.stale_after
        return await self._change(
            lambda ledger, now: commands.advertise(ledger, advertisement, stale_after, now),
            lambda ledger, cluster: (
                views.of_cluster(ledger, cluster),
                views.holds(ledger, cluster.id),
            ),
        )

    async def holds(self, provider: ClusterId) -> list[Reservation]:
        """The reservations that a provider has to set aside and whose requester has not started."""
        return await self._read(lambda ledger: views.holds(ledger, provider))

    async def acknowledge(self, found: ReservationId, provider: ClusterId) -> Reservation:
        return await self._change_one(
            found, lambda ledger, now: commands.acknowledge(ledger, found, provider, now)
        )

    async def refuse(self, found: ReservationId, provider: ClusterId, why: str) -> Reservation:
        return await self._change_one(
            found, lambda ledger, now: commands.refuse(ledger, found, provider, why, now)
        )

    # -- requesters

    async def reserve(self, request: Request) -> Reservation:
        """Lock an amount on the best cluster, or queue the request if it would wait."""
        new_id = naming.new_reservation_id(request.requester)
        limit = self._rules.max_waiting
        began = time.perf_counter()

        def view(ledger: Ledger, answer: ReservationId | NoFit) -> Reservation | NoFit:
            seen = answer if isinstance(answer, NoFit) else ledger.reservation(answer)
            self._metrics.decided(_outcome(seen), time.perf_counter() - began)
            return seen

        answer = await self._change(
            lambda ledger, now: commands.reserve(ledger, request, new_id, limit, now), view
        )
        if isinstance(answer, NoFit):
            self._metrics.refused_for_capacity(answer.explanation)
            raise explanations.no_capacity(answer.explanation)
        return answer

    async def activate(self, found: ReservationId) -> Reservation:
        return await self._change_one(
            found, lambda ledger, now: commands.activate(ledger, found, now)
        )

    async def renew(self, found: ReservationId, duration: timedelta | None) -> Reservation:
        def command(ledger: Ledger, now: datetime) -> Command[None]:
            longer = duration or ledger.reservation(found).request.duration
            return commands.renew(ledger, found, longer, now)

        return await self._change_one(found, command)

    async def release(self, found: ReservationId, reason: Reason) -> Reservation:
        try:
            return await self._change_one(
                found, lambda ledger, now: commands.release(ledger, found, reason, now)
            )
        except NotFound:  # or it ended so long ago that it is in the archive
            return await self.reservation(found)

    async def explain(self, request: Request, limit: int) -> explanations.Explanation:
        """Where a request would go now; nothing changes."""
        ledger, now = self._present()
        explanation = explanations.explain(Question(request, now), ledger.fleet, limit)
        await self._commits.settled()
        return explanation

    async def explain_reservation(self, found: Reservation, limit: int) -> explanations.Explanation:
        """Where a request like this reservation's would fit now, beside what it holds already."""
        ledger, now = self._present()
        question = Question(found.request, now, found.ticket, found.left)
        explanation = explanations.explain(question, ledger.fleet, limit)
        await self._commits.settled()
        return explanation

    # -- administrators

    async def cordon(self, cluster: ClusterId, why: str) -> views.ClusterView:
        return await self._change(
            lambda ledger, now: commands.cordon(ledger, cluster, why, now), views.of_cluster
        )

    async def uncordon(self, cluster: ClusterId) -> views.ClusterView:
        return await self._change(
            lambda ledger, now: commands.uncordon(ledger, cluster, now), views.of_cluster
        )

    async def drain(
        self, cluster: ClusterId, why: str
    ) -> tuple[views.ClusterView, list[Reservation]]:
        return await self._change(
            lambda ledger, now: commands.drain(ledger, cluster, why, now),
            lambda ledger, drained: (
                views.of_cluster(ledger, ledger.cluster(cluster)),
                [ledger.reservation(found) for found in drained],
            ),
        )

    async def remove(self, cluster: ClusterId) -> None:
        await self._change(
            lambda ledger, now: commands.remove(ledger, cluster, now), lambda _, answer: answer
        )

    # -- questions

    async def cluster(self, cluster: ClusterId) -> views.ClusterView:
        return await self._read(lambda ledger: views.of_cluster(ledger, ledger.cluster(cluster)))

    async def clusters(self, after: str, limit: int) -> list[views.ClusterView]:
        """A page of clusters in the order of their IDs."""

        def page(ledger: Ledger) -> list[views.ClusterView]:
            ids = ledger.fleet.page(after, limit)
            return [views.of_cluster(ledger, ledger.cluster(cluster)) for cluster in ids]

        return await self._read(page)

    async def reservation(self, found: ReservationId) -> Reservation:
        """One reservation, also one that has been archived."""
        here = await self._read(lambda ledger: ledger.reservations.get(found))
        archived = here or await self._commits.archived(found)
        if archived is None:
            raise no_reservation(found)
        return archived

    async def reservations(
        self, wanted: Callable[[Reservation], bool], cluster: ClusterId | None, page: views.Page
    ) -> list[Reservation]:
        """A page of those at hand that are wanted, oldest first; of one cluster, or of all."""

        return await self._read(lambda ledger: views.page_of(ledger, wanted, cluster, page))

    @asynccontextmanager
    async def stream(self, cluster: ClusterId, after: int | None) -> AsyncIterator[views.Opening]:
        """A feed of what changes from now on, with what the cluster has to know first."""
        ledger, _ = self._present()
        feed = self.feeds.open(cluster, ledger.revision)
        self._metrics.stream_opened()
        try:
            opening = views.opening(ledger, feed, after)
            await self._commits.settled()
            yield opening
        finally:
            self._metrics.stream_closed()
            self.feeds.close(feed)

    # -- the road

    async def _change(
        self,
        command: Callable[[Ledger, datetime], Command[Answer]],
        view: Callable[[Ledger, Answer], View],
    ) -> View:
        """Decide, assume and record in one stretch; answer what was true then, once it is durable."""
        ledger, now = self._present()
        try:
            seen = view(ledger, self._run(ledger, command(ledger, now), now))
        except KubelendError:  # a refusal, too, tells of what it is built on
            await self._commits.settled()
            raise
        await self._commits.settled()
        return seen

    async def _change_one(
        self, found: ReservationId, command: Callable[[Ledger, datetime], Command[None]]
    ) -> Reservation:
        return await self._change(command, lambda ledger, _: ledger.reservation(found))

    async def _read(self, question: Callable[[Ledger], View]) -> View:
        ledger, _ = self._present()
        try:
            return question(ledger)
        finally:
            await self._commits.settled()

    def _present(self) -> tuple[Ledger, datetime]:
        """The ledger as of now, with what is over ended."""
        if self.unready is not None:
            raise NotReady(f"the broker is {self.unready}", hint="try again in a moment")
        ledger, now = self._ledger, self.clock()
        due = ledger.next_deadline()
        if due is not None and due <= now:
            self._run(ledger, commands.expire(ledger, self._rules.retention, now), now)
        return ledger, now

    def _run(self, ledger: Ledger, command: Command[Answer], now: datetime) -> Answer:
        answer, changes = commands.run(ledger, command, now)
        if changes:
            self._commits.submit(changes, ledger.revision)
        return answer

    # -- what the store reports

    def _landed(self, changes: Sequence[Change], seconds: float) -> None:
        self._metrics.committed(changes, seconds)
        self.feeds.publish(changes)

    def _store_failed(self, problem: Exception) -> None:
        self.unready = f"without its store: {problem}"
        self._ledger = Ledger()
        self._metrics.watch(self._ledger)
        self._metrics.store_up(up=False)
        self.feeds.close_all()
        self._wake.set()
        log.error("store failed", problem=str(problem))

    # -- the root task

    async def _load(self, patience: float) -> None:
        while True:
            try:
                await self.load()
            except KubelendError as problem:
                if self.unready != (reason := f"without its store: {problem}"):
                    log.error("cannot load", problem=str(problem))
                self.unready = reason
                await asyncio.sleep(patience)
            else:
                self._metrics.store_up(up=True)
                return

    async def _sleep_until_due(self, patience: float) -> None:
        due = self._ledger.next_deadline()
        wait = patience if due is None else (due - self.clock()).total_seconds()
        try:
            async with asyncio.timeout(min(max(wait, 0.001), patience)):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

    async def _expire_quietly(self) -> None:
        """A store that fails here has been reported; the loop around goes on to reload it."""
        try:
            await self.expire()
        except KubelendError as problem:
            log.warning("expiry put off", problem=str(problem))


def _outcome(answer: Reservation | NoFit) -> Outcome:
    if isinstance(answer, NoFit):
        return "refused"
    return "queued" if answer.phase is Phase.PENDING else "placed"
