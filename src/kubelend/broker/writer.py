"""The single writer of the ledger: every change and every read goes through it.

A change is decided, applied and handed to the store without an `await` in between; it is answered when it
is durable. Every answer, also to a read, waits until what it shows is durable. When the store fails, the
broker becomes unready, drops its state and loads it again from the store.

Of several brokers on one store one is the leader. The others are followers: they replicate what the leader
has committed, answer reads from it, and reject changes with `NotLeader`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import structlog

from kubelend.broker import change_log
from kubelend.broker.commits import GroupCommit
from kubelend.broker.feeds import Feeds
from kubelend.broker.leadership import ALONE, NOBODY
from kubelend.broker.metrics import Metrics
from kubelend.broker.ports import Clock, Leadership, OpenStore, Replica, Store
from kubelend.core import commands, revocation, silence
from kubelend.core.commands import Command
from kubelend.core.errors import KubelendError, NotLeader, NotReady, StoreFailed
from kubelend.core.events import Change
from kubelend.core.journal import THE_BROKER, Actor, Entry
from kubelend.core.ledger import Ledger
from kubelend.core.models import Cluster, Reservation
from kubelend.core.records import News, Records
from kubelend.core.registry import Registry
from kubelend.core.silence import Vigil

Answer = TypeVar("Answer")
View = TypeVar("View")

Listener = Callable[[Sequence[Change] | None], None]
"""Receives committed changes; None when anything may have changed, because the store was loaded again."""

ACTOR: ContextVar[Actor] = ContextVar("actor", default=THE_BROKER)
"""On whose behalf this task changes the ledger; set per request, written to the audit log."""

SWEEP_EVERY = timedelta(minutes=1)
"""Interval between collections of expired tokens and members: each one visits all of them."""

PAUSE = 0.05
"""Seconds between two batches of a large failover, in which requests are served."""

log = structlog.get_logger("kubelend.broker")


class Writer:
    """Owns the ledger and its store. Use `run` as a root task; call the rest once `unready` is None."""

    def __init__(
        self,
        open_store: OpenStore,
        clock: Clock,
        metrics: Metrics,
        retention: timedelta,
        lost_after: timedelta,
        leadership: Leadership = ALONE,
        replica: Replica = NOBODY,
    ) -> None:
        self.feeds = Feeds()
        self.clock = clock
        self.leadership = leadership
        self.listeners: list[Listener] = []
        self.unready: str | None = "starting: loading state from the store"
        """Why no request can be answered now, or None."""
        self._metrics = metrics
        self.retention = retention
        """How long a finished reservation stays in memory before it is archived."""
        self._lost_after = lost_after
        self._commits = GroupCommit(open_store, self._landed, self._store_failed)
        self._replica = replica
        self._ledger = Ledger()
        self._is_loaded = False
        self._is_leading = False
        self._term = 0
        """The leadership term in which the state was loaded; it is invalid in any other term."""
        self._wake = asyncio.Event()
        self._swept_at = datetime.min.replace(tzinfo=UTC)
        self._vigil = Vigil(lost_after, self._ledger, clock())

    @property
    def registry(self) -> Registry:
        """Members and revocations; raises `NotReady` until the store is loaded."""
        if not self._is_loaded:
            raise NotReady(f"the broker is {self.unready}", hint="try again in a moment")
        return self._ledger.registry

    @property
    def silent_because(self) -> str | None:
        """Why no request is answered now, or None.

        A broker whose lease has ended stops answering even before `run` has noticed, because its successor
        may have decided differently.
        """
        if self.unready is None and self._is_leading and not self._has_the_seat:
            return "no longer the leader"
        return self.unready

    # -- lifecycle

    async def run(self, patience: float = 1.0) -> None:
        """Leads while this broker holds the lease, and follows the leader otherwise. Runs until cancelled."""
        while True:
            if not self.leadership.leads:
                await self._follow(patience)
            await self._lead(patience)
            # If another broker has written, it may be the leader: reopening the store now would fence it off.
            await self.leadership.look()

    async def load(self) -> None:
        """Loads the state from the store and starts accepting changes."""
        term = self.leadership.term
        records = await self._commits.load()
        self._restore(records)
        # Silence counts from now on: no advertisement could arrive before.
        self._vigil = Vigil(self._lost_after, self._ledger, self.clock())
        self._is_leading, self._term = True, term
        log.info(
            "Ledger loaded",
            clusters=len(records.clusters),
            reservations=len(records.reservations),
            revision=records.revision,
        )

    async def expire(self) -> None:
        """Expires reservations, archives finished ones, and fails over from unreachable providers."""
        ledger, now = self.present()
        self._run(ledger, commands.expire(ledger, self.retention, now), now)
        for lost in self._run(ledger, silence.leave(ledger, self._vigil, now), now):
            log.warning(
                "Provider unreachable, failing over its reservations",
                cluster=lost.id,
                last_seen=lost.received_at.isoformat(),
            )
        if now >= self._swept_at + SWEEP_EVERY:
            self._swept_at = now
            self._run(ledger, revocation.sweep(ledger, now), now)
        await self._commits.settled()

    async def close(self) -> None:
        """Rejects new requests, finishes pending commits, and closes the store."""
        self.unready = "stopping"
        self.feeds.close_all()
        self._wake.set()
        await self._commits.close()

    # -- for every use case

    async def change(
        self,
        command: Callable[[Ledger, datetime], Command[Answer]],
        view: Callable[[Ledger, Answer], View],
    ) -> View:
        """Decides, applies and submits without an `await` in between; returns the view once it is durable."""
        self.check_leading()
        ledger, now = self.present()
        try:
            seen = view(ledger, self._run(ledger, command(ledger, now), now, ACTOR.get()))
        except KubelendError:  # a rejection, too, reveals state that may not be durable yet
            await self._commits.settled()
            raise
        await self._commits.settled()
        return seen

    async def read(self, question: Callable[[Ledger], View]) -> View:
        ledger, _ = self.present()
        try:
            return question(ledger)
        finally:
            await self._commits.settled()

    def present(self) -> tuple[Ledger, datetime]:
        """Returns the current ledger, after expiring what is due, and the time."""
        if (why := self.silent_because) is not None:
            raise NotReady(f"the broker is {why}", hint="try again in a moment")
        ledger, now = self._ledger, self.clock()
        due = ledger.next_deadline()
        if due is not None and due <= now and self._is_leading:
            self._run(ledger, commands.expire(ledger, self.retention, now), now)
        return ledger, now

    async def ask(self, question: Callable[[Store], Answer]) -> Answer:
        """Queries the store for what is not in memory; all of it is durable."""
        if self.unready is None and not self._is_leading:
            return await self._replica.ask(question)
        return await self._commits.ask(question)

    def tell(self, entry: Entry) -> None:
        """Appends a rejection, which changes nothing, to the audit log; does not wait for the commit."""
        if self.unready is None and self._is_leading:
            self.keep([entry])

    def keep(self, changes: Sequence[Change]) -> None:
        """Submits changes that are not part of the ledger."""
        self._commits.submit(changes, self._ledger.revision)

    async def rewrite(self, record: Cluster | Reservation) -> None:
        """Has the store write a record again from the ledger, because its stored copy was modified."""
        self.check_leading()
        ledger, _ = self.present()
        if record is _newest(ledger, record):
            self.keep([record])
        await self._commits.settled()

    async def settled(self) -> None:
        """Waits until everything decided so far is durable."""
        await self._commits.settled()

    async def confirm(self) -> None:
        """Raises if another broker has written to the store: then the state in memory may be stale.

        For callers that write what follows from the ledger somewhere else, where no commit would fence them.
        They read the object first, check here, and write only if it is unchanged, so that a write of another
        broker is never overwritten.
        """
        self.check_leading()
        self.present()
        await self._commits.ask(lambda store: store.check())

    def check_leading(self) -> None:
        """Raises `NotLeader` on a follower. Call it before a lookup that precedes a change: a follower may
        not have replicated the record yet.
        """
        if self.unready is None and not self.may_decide:
            leader = self.leadership.leader
            raise NotLeader(
                "not the leader",
                hint=f"send the request to {leader}, the current leader"
                if leader
                else "try again in a moment",
            )

    @property
    def may_decide(self) -> bool:
        """Whether this broker is ready and the leader."""
        return self.unready is None and self._is_leading and self._has_the_seat

    @property
    def _has_the_seat(self) -> bool:
        return self.leadership.leads and self.leadership.term == self._term

    def _run(
        self, ledger: Ledger, command: Command[Answer], now: datetime, actor: Actor = THE_BROKER
    ) -> Answer:
        before = ledger.revision
        try:
            answer, changes = commands.run(ledger, command, now, actor)
        except Exception as problem:
            if ledger.revision != before:
                self._failed_halfway(problem)
            raise
        if changes:
            self._commits.submit(changes, ledger.revision)
        return answer

    def _failed_halfway(self, problem: Exception) -> None:
        """Reloads, because a command raised after its first event: the ledger is ahead of the store."""
        log.error(
            "Command failed after applying events; reloading state from the store",
            exc_info=problem,
        )
        self._commits.fail(
            StoreFailed("a command failed after applying events; state is being reloaded")
        )

    # -- callbacks of the group commit

    def _landed(self, changes: Sequence[Change], seconds: float) -> None:
        self._metrics.committed(changes, seconds)
        self.feeds.publish(changes)
        change_log.log_changes(changes)
        self._tell(changes)

    def _tell(self, changes: Sequence[Change] | None) -> None:
        for hear in self.listeners:
            hear(changes)

    def _store_failed(self, problem: Exception) -> None:
        self._forget(f"without its store: {problem}")
        self._metrics.store_up(up=False)
        self._wake.set()
        log.error("Store failed, will reload", error=str(problem))

    def _forget(self, why: str) -> None:
        """Drops the state in memory, which may be stale."""
        self.unready = why
        self._is_loaded = self._is_leading = False
        self._ledger = Ledger()
        self._metrics.watch(self._ledger)
        self.feeds.close_all()

    def _restore(self, records: Records) -> None:
        self._ledger = Ledger.restore(records)
        self._metrics.watch(self._ledger)
        self._is_loaded = True
        self.unready = None
        self._tell(None)

    # -- as a follower

    async def _follow(self, patience: float) -> None:
        """Replicates until this broker becomes the leader; raises if replication fails unexpectedly."""
        following = asyncio.create_task(self._keep_up(patience), name="following")
        winning = asyncio.create_task(self.leadership.won(), name="winning")
        try:
            done, _ = await asyncio.wait((following, winning), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            following.cancel()
            winning.cancel()
            await asyncio.gather(following, winning, return_exceptions=True)
        log.info("Became leader")

    async def _keep_up(self, patience: float) -> None:
        """Replicates what the leader has committed. Runs until cancelled."""
        while True:
            try:
                async for news in self._replica.follow():
                    self._take_in(news)
            except KubelendError as problem:
                self._complain("Replication failed, will retry", problem)
            await asyncio.sleep(patience)

    def _take_in(self, news: Records | News) -> None:
        if isinstance(news, Records):
            self._restore(news)
            log.info("Following leader", leader=self.leadership.leader, revision=news.revision)
        else:
            self._ledger.adopt(news.changes, news.revision)
            self.feeds.publish(news.changes)
            self._tell(news.changes)

    # -- as the leader

    async def _lead(self, patience: float) -> None:
        """Loads, then expires what is due; returns when the store has failed or leadership is lost."""
        await self._load(patience)
        while self.may_decide:
            await self._sleep_until_due(patience)
            if self.may_decide:
                await self._expire_quietly(patience)
        if self.unready is None:
            log.warning("Lost leadership", leader=self.leadership.leader)
            self._forget("changing from leader to follower")
            await self._commits.stand_down(NotLeader("no longer the leader"))

    async def _load(self, patience: float) -> None:
        while self.leadership.leads:
            try:
                await self.load()
            except KubelendError as problem:
                self._complain("Loading the store failed, will retry", problem)
                await asyncio.sleep(patience)
            else:
                self._metrics.store_up(up=True)
                return

    def _complain(self, what: str, problem: Exception) -> None:
        """Logs an error once for each reason."""
        if self.unready != (reason := f"without its store: {problem}"):
            log.error(what, error=str(problem))
            self._forget(reason)

    async def _sleep_until_due(self, patience: float) -> None:
        due = self._ledger.next_deadline()
        wait = patience if due is None else (due - self.clock()).total_seconds()
        wait = min(wait, PAUSE) if self._vigil.is_busy else wait
        try:
            async with asyncio.timeout(min(max(wait, 0.001), patience)):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

    async def _expire_quietly(self, patience: float) -> None:
        """Expires what is due. A store failure has been logged; the caller's loop reloads the store."""
        try:
            await self.expire()
        except KubelendError as problem:
            log.warning("Expiry failed, will retry", error=str(problem))
        except Exception:
            if self.unready is None:
                raise  # the state was not dropped, so reloading would not help
            await asyncio.sleep(patience)  # a persistent bug must not cause reloads without a pause


def _newest(ledger: Ledger, record: Cluster | Reservation) -> Cluster | Reservation | None:
    if isinstance(record, Cluster):
        return ledger.clusters.get(record.id)
    return ledger.reservations.get(record.id)
