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
from kubelend.broker.group_commit import GroupCommit
from kubelend.broker.metrics import BrokerMetrics
from kubelend.broker.ports import (
    NO_REPLICA,
    SINGLE_REPLICA,
    Clock,
    Leadership,
    OpenStore,
    Replica,
    Store,
)
from kubelend.broker.streams import StreamHub
from kubelend.core import commands, enrolment, failover
from kubelend.core.audit_log import BROKER_ACTOR, Actor, AuditEntry
from kubelend.core.commands import Command
from kubelend.core.errors import KubelendError, NotLeader, NotReady, StoreFailed
from kubelend.core.events import Change, CommittedChanges, WorkingSet
from kubelend.core.failover import ProviderMonitor
from kubelend.core.indexes import MemberIndex
from kubelend.core.ledger import Ledger
from kubelend.core.models import Cluster, Reservation

Result = TypeVar("Result")
View = TypeVar("View")

ChangeListener = Callable[[Sequence[Change] | None], None]
"""Receives committed changes; None when anything may have changed, because the store was loaded again."""

CURRENT_ACTOR: ContextVar[Actor] = ContextVar("actor", default=BROKER_ACTOR)
"""On whose behalf this task changes the ledger; set per request, written to the audit log."""

COLLECT_INTERVAL = timedelta(minutes=1)
"""Interval between collections of expired tokens and members: each one visits all of them."""

FAILOVER_PAUSE = 0.05
"""Seconds between two batches of a large failover, in which requests are served."""

log = structlog.get_logger("kubelend.broker")


class LedgerWriter:
    """Owns the ledger and its store. Use `run` as a root task; call the rest once `unready` is None."""

    def __init__(
        self,
        open_store: OpenStore,
        clock: Clock,
        metrics: BrokerMetrics,
        retention: timedelta,
        lost_after: timedelta,
        leadership: Leadership = SINGLE_REPLICA,
        replica: Replica = NO_REPLICA,
    ) -> None:
        self.streams = StreamHub()
        self.clock = clock
        self.leadership = leadership
        self.listeners: list[ChangeListener] = []
        self.unready: str | None = "starting: loading state from the store"
        """Why no request can be answered now, or None."""
        self._metrics = metrics
        metrics.watch_leadership(leadership)
        self.retention = retention
        """How long a finished reservation stays in memory before it is archived."""
        self._lost_after = lost_after
        self._commits = GroupCommit(open_store, self._on_commit, self._on_store_failed)
        metrics.watch_store(lambda: self._commits.lag)
        self._replica = replica
        self._ledger = Ledger()
        self._is_loaded = False
        self._is_leading = False
        self._term = 0
        """The leadership term in which the state was loaded; it is invalid in any other term."""
        self._wake = asyncio.Event()
        self._collected_at = datetime.min.replace(tzinfo=UTC)
        self.leading_since = clock()
        self._provider_monitor = ProviderMonitor(lost_after, self._ledger, self.leading_since)

    @property
    def members(self) -> MemberIndex:
        """Members and revocations; raises `NotReady` until the store is loaded."""
        if not self._is_loaded:
            raise NotReady(f"the broker is {self.unready}", hint="try again in a moment")
        return self._ledger.member_index

    @property
    def not_serving_reason(self) -> str | None:
        """Why no request is answered now, or None.

        A broker whose lease has ended stops answering even before `run` has noticed, because its successor
        may have decided differently.
        """
        if self.unready is None and self._is_leading and not self._holds_lease:
            return "no longer the leader"
        return self.unready

    @property
    def readiness_detail(self) -> str:
        """How far the objects of the store lag; empty if they do not."""
        lag = self._commits.lag
        return f"objects lag {lag.changes} changes, {lag.seconds:.1f} s" if lag.changes else ""

    # -- lifecycle

    async def run(self, retry_after: float = 1.0) -> None:
        """Leads while this broker holds the lease, and follows the leader otherwise. Runs until cancelled."""
        while True:
            if not self.leadership.is_leader:
                await self._follow(retry_after)
            await self._lead(retry_after)
            # If another broker has written, it may be the leader: reopening the store now would fence it off.
            await self.leadership.refresh()

    async def load(self) -> None:
        """Loads the state from the store and starts accepting changes."""
        term = self.leadership.term
        records = await self._commits.load()
        self._restore(records)
        # Counted from now on: no advertisement could arrive before.
        self.leading_since = self.clock()
        self._provider_monitor = ProviderMonitor(self._lost_after, self._ledger, self.leading_since)
        self._is_leading, self._term = True, term
        log.info(
            "Ledger loaded",
            clusters=len(records.clusters),
            reservations=len(records.reservations),
            revision=records.revision,
        )

    async def expire(self) -> None:
        """Expires reservations, archives finished ones, and fails over from unreachable providers."""
        ledger, now = self.current()
        self._run(ledger, commands.expire_reservations(ledger, self.retention, now), now)
        for lost in self._run(ledger, failover.fail_over(ledger, self._provider_monitor, now), now):
            log.warning(
                "Provider unreachable, failing over its reservations",
                cluster=lost.id,
                last_seen=lost.received_at.isoformat(),
            )
        if now >= self._collected_at + COLLECT_INTERVAL:
            self._collected_at = now
            self._run(ledger, enrolment.collect_expired(ledger, now), now)
        await self._commits.wait_durable()

    async def close(self) -> None:
        """Rejects new requests, finishes pending commits, and closes the store."""
        self.unready = "stopping"
        self.streams.close_all()
        self._wake.set()
        await self._commits.close()

    # -- for every use case

    async def change(
        self,
        command: Callable[[Ledger, datetime], Command[Result]],
        view: Callable[[Ledger, Result], View],
    ) -> View:
        """Decides, applies and submits without an `await` in between; returns the view once it is durable."""
        self.check_leader()
        ledger, now = self.current()
        try:
            seen = view(ledger, self._run(ledger, command(ledger, now), now, CURRENT_ACTOR.get()))
        except KubelendError:  # a rejection, too, reveals state that may not be durable yet
            await self._commits.wait_durable()
            raise
        await self._commits.wait_durable()
        return seen

    async def execute(self, command: Callable[[Ledger, datetime], Command[Result]]) -> Result:
        """Like `change`, for a command whose result needs no view."""
        return await self.change(command, lambda _, result: result)

    async def read(self, query: Callable[[Ledger], View]) -> View:
        ledger, _ = self.current()
        try:
            return query(ledger)
        finally:
            await self._commits.wait_durable()

    def current(self) -> tuple[Ledger, datetime]:
        """Returns the current ledger, after expiring what is due, and the time."""
        if (reason := self.not_serving_reason) is not None:
            raise NotReady(f"the broker is {reason}", hint="try again in a moment")
        ledger, now = self._ledger, self.clock()
        due = ledger.next_deadline()
        if due is not None and due <= now and self._is_leading:
            self._run(ledger, commands.expire_reservations(ledger, self.retention, now), now)
        return ledger, now

    async def query_store(self, query: Callable[[Store], Result]) -> Result:
        """Queries the store for what is not in memory; all of it is durable."""
        if self.unready is None and not self._is_leading:
            return await self._replica.query(query)
        return await self._commits.query(query)

    def append_audit(self, entry: AuditEntry) -> None:
        """Appends a rejection, which changes nothing, to the audit log; does not wait for the commit."""
        if self.unready is None and self._is_leading:
            self.persist([entry])

    def persist(self, changes: Sequence[Change]) -> None:
        """Submits changes that are not part of the ledger."""
        self._commits.submit(changes, self._ledger.revision)

    async def rewrite_record(self, record: Cluster | Reservation) -> None:
        """Has the store write a record again from the ledger, because its stored copy was modified."""
        self.check_leader()
        ledger, _ = self.current()
        is_current = (
            record is ledger.clusters.get(record.id)
            if isinstance(record, Cluster)
            else record is ledger.reservations.get(record.id)
        )
        if is_current:
            self.persist([record])
        await self._commits.wait_durable()

    async def wait_durable(self) -> None:
        """Waits until everything decided so far is durable."""
        await self._commits.wait_durable()

    async def wait_written(self) -> None:
        """Waits until the store's objects show everything decided so far."""
        await self._commits.wait_written()

    async def check_fencing(self) -> None:
        """Raises if another broker has written to the store: then the state in memory may be stale.

        For callers that write what follows from the ledger somewhere else, where no commit would fence them.
        They read the object first, check here, and write only if it is unchanged, so that a write of another
        broker is never overwritten.
        """
        self.check_leader()
        self.current()
        await self._commits.query(lambda store: store.check_fencing())

    def check_leader(self) -> None:
        """Raises `NotLeader` on a follower. Call it before a lookup that precedes a change: a follower may
        not have replicated the record yet.
        """
        if self.unready is None and not self.is_leader:
            leader = self.leadership.leader
            raise NotLeader(
                "not the leader",
                hint=f"send the request to {leader}, the current leader"
                if leader
                else "try again in a moment",
            )

    @property
    def is_leader(self) -> bool:
        """Whether this broker is ready and the leader."""
        return self.unready is None and self._is_leading and self._holds_lease

    @property
    def _holds_lease(self) -> bool:
        return self.leadership.is_leader and self.leadership.term == self._term

    def _run(
        self, ledger: Ledger, command: Command[Result], now: datetime, actor: Actor = BROKER_ACTOR
    ) -> Result:
        before = ledger.revision
        try:
            answer, changes = commands.run_command(ledger, command, now, actor)
        except Exception as error:
            if ledger.revision != before:  # the ledger is ahead of the store
                log.error(
                    "Command failed after applying events; reloading state from the store",
                    exc_info=error,
                )
                reason = "a command failed after applying events; state is being reloaded"
                self._commits.fail(StoreFailed(reason))
            raise
        if changes:
            self._commits.submit(changes, ledger.revision)
        return answer

    # -- callbacks of the group commit

    def _on_commit(self, changes: Sequence[Change], seconds: float) -> None:
        self._metrics.observe_commit(changes, seconds)
        self.streams.publish(changes)
        change_log.log_changes(changes)
        self._notify_listeners(changes)

    def _notify_listeners(self, changes: Sequence[Change] | None) -> None:
        for on_change in self.listeners:
            on_change(changes)

    def _on_store_failed(self, problem: Exception) -> None:
        self._drop_state(f"without its store: {problem}")
        self._wake.set()
        log.error("Store failed, will reload", error=str(problem))

    def _drop_state(self, reason: str) -> None:
        """Drops the state in memory, which may be stale."""
        self.unready = reason
        self._metrics.set_store_up(up=False)
        self._is_loaded = self._is_leading = False
        self._ledger = Ledger()
        self._metrics.set_ledger(self._ledger)
        self.streams.close_all()

    def _restore(self, records: WorkingSet) -> None:
        self._ledger = Ledger.restore(records)
        self._metrics.set_ledger(self._ledger)
        self._is_loaded = True
        self.unready = None
        self._notify_listeners(None)

    # -- as a follower

    async def _follow(self, interval: float) -> None:
        """Replicates until this broker becomes the leader; raises if replication fails unexpectedly."""
        following = asyncio.create_task(self._replicate(interval), name="following")
        winning = asyncio.create_task(self.leadership.wait_for_leadership(), name="winning")
        try:
            done, _ = await asyncio.wait((following, winning), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            following.cancel()
            winning.cancel()
            await asyncio.gather(following, winning, return_exceptions=True)
        log.info("Became leader")

    async def _replicate(self, interval: float) -> None:
        """Replicates what the leader has committed. Runs until cancelled."""
        while True:
            try:
                async for news in self._replica.follow():
                    self._apply_replicated(news)
            except KubelendError as error:
                self._log_error_once("Replication failed, will retry", error)
            await asyncio.sleep(interval)

    def _apply_replicated(self, news: WorkingSet | CommittedChanges) -> None:
        if isinstance(news, WorkingSet):
            self._restore(news)
            log.info("Following leader", leader=self.leadership.leader, revision=news.revision)
        else:
            self._ledger.apply_changes(news.changes, news.revision)
            self.streams.publish(news.changes)
            self._notify_listeners(news.changes)

    # -- as the leader

    async def _lead(self, interval: float) -> None:
        """Loads, then expires what is due; returns when the store has failed or leadership is lost."""
        await self._load(interval)
        while self.is_leader:
            await self._sleep_until_due(interval)
            if self.is_leader:
                await self._try_expire(interval)
        if self.unready is None:
            log.warning("Lost leadership", leader=self.leadership.leader)
            self._drop_state("changing from leader to follower")
            await self._commits.step_down(NotLeader("no longer the leader"))

    async def _load(self, interval: float) -> None:
        while self.leadership.is_leader:
            try:
                await self.load()
            except KubelendError as error:
                self._log_error_once("Loading the store failed, will retry", error)
                await asyncio.sleep(interval)
            else:
                self._metrics.set_store_up(up=True)
                return

    def _log_error_once(self, what: str, problem: Exception) -> None:
        """Logs an error once for each reason."""
        if self.unready != (reason := f"without its store: {problem}"):
            log.error(what, error=str(problem))
            self._drop_state(reason)

    async def _sleep_until_due(self, interval: float) -> None:
        due = self._ledger.next_deadline()
        wait = interval if due is None else (due - self.clock()).total_seconds()
        wait = min(wait, FAILOVER_PAUSE) if self._provider_monitor.is_busy else wait
        try:
            async with asyncio.timeout(min(max(wait, 0.001), interval)):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

    async def _try_expire(self, interval: float) -> None:
        """Expires what is due. A store failure has been logged; the caller's loop reloads the store."""
        try:
            await self.expire()
        except KubelendError as error:
            log.warning("Expiry failed, will retry", error=str(error))
        except Exception:
            if self.unready is None:
                raise  # the state was not dropped, so reloading would not help
            await asyncio.sleep(interval)  # a persistent bug must not cause reloads without a pause
