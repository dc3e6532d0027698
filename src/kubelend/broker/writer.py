"""The single writer of the ledger: the road that every change takes, and every question too.

A change is decided, assumed and handed to the store in one stretch without `await`; it is answered
when it is durable. Every answer, also to a question, waits until what it shows is durable. When the store
fails, the broker is unready, drops its memory and reads it anew: it never guesses.

Of several brokers on one store one leads. The others follow: they answer questions from what the leader
has made durable, and refuse changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import structlog

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
"""Is told of what has become durable; of None when all may be otherwise, for the store was read anew."""

ACTOR: ContextVar[Actor] = ContextVar("actor", default=THE_BROKER)
"""On whose behalf this task changes things. Whoever takes a call in sets it; the journal shows it."""

SWEEP_EVERY = timedelta(minutes=1)
"""How often tokens and members are looked at that may be over: it costs a look at each of them."""

PAUSE = 0.05
"""Seconds between two portions of much that is to be moved: meanwhile callers are answered."""

log = structlog.get_logger("kubelend.broker")


class Writer:
    """Use `run` as a root task; everything else may be called once `unready` is None."""

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
        self.unready: str | None = "starting: the store is being read"
        """Why no call can be answered now, or None."""
        self._metrics = metrics
        self.retention = retention
        """How long what is over stays at hand."""
        self._lost_after = lost_after
        self._commits = GroupCommit(open_store, self._landed, self._store_failed)
        self._replica = replica
        self._ledger = Ledger()
        self._is_loaded = False
        self._is_leading = False
        self._term = 0
        """In which the store was read: what is in memory is good for no other."""
        self._wake = asyncio.Event()
        self._swept_at = datetime.min.replace(tzinfo=UTC)
        self._vigil = Vigil(lost_after, self._ledger, clock())

    @property
    def registry(self) -> Registry:
        """Who belongs, and who was put out; `NotReady` while the store that knows is not read."""
        if not self._is_loaded:
            raise NotReady(f"the broker is {self.unready}", hint="try again in a moment")
        return self._ledger.registry

    @property
    def silent_because(self) -> str | None:
        """Why nothing is answered now, or None. One that leads no more is silent before it has noticed.

        Its successor may have decided otherwise meanwhile.
        """
        if self.unready is None and self._is_leading and not self._has_the_seat:
            return "leading no more"
        return self.unready

    # -- life

    async def run(self, patience: float = 1.0) -> None:
        """Lead while this broker may, and follow the one that does meanwhile. Never returns."""
        while True:
            if not self.leadership.leads:
                await self._follow(patience)
            await self._lead(patience)
            # If another has written, it may lead: to take the store from it now would be to fight.
            await self.leadership.look()

    async def load(self) -> None:
        """Take the state from the store, and be ready to change it."""
        term = self.leadership.term
        records = await self._commits.load()
        self._restore(records)
        # Anew: until now nobody could be heard.
        self._vigil = Vigil(self._lost_after, self._ledger, self.clock())
        self._is_leading, self._term = True, term
        log.info(
            "ready",
            clusters=len(records.clusters),
            reservations=len(records.reservations),
            revision=records.revision,
        )

    async def expire(self) -> None:
        """End what is over, archive what ended long ago, and leave providers that fell silent."""
        ledger, now = self.present()
        self._run(ledger, commands.expire(ledger, self.retention, now), now)
        for lost in self._run(ledger, silence.leave(ledger, self._vigil, now), now):
            log.warning(
                "provider is silent, what it lends moves",
                cluster=lost.id,
                heard_at=lost.received_at.isoformat(),
            )
        if now >= self._swept_at + SWEEP_EVERY:
            self._swept_at = now
            self._run(ledger, revocation.sweep(ledger, now), now)
        await self._commits.settled()

    async def close(self) -> None:
        """Refuse what is new, finish what has begun, and let go of the store."""
        self.unready = "stopping"
        self.feeds.close_all()
        self._wake.set()
        await self._commits.close()

    # -- the road, for every use case

    async def change(
        self,
        command: Callable[[Ledger, datetime], Command[Answer]],
        view: Callable[[Ledger, Answer], View],
    ) -> View:
        """Decide, assume and record in one stretch; answer what was true then, once it is durable."""
        self.check_leading()
        ledger, now = self.present()
        try:
            seen = view(ledger, self._run(ledger, command(ledger, now), now, ACTOR.get()))
        except KubelendError:  # a refusal, too, tells of what it is built on
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
        """The ledger as of now, with what is over ended."""
        if (why := self.silent_because) is not None:
            raise NotReady(f"the broker is {why}", hint="try again in a moment")
        ledger, now = self._ledger, self.clock()
        due = ledger.next_deadline()
        if due is not None and due <= now and self._is_leading:
            self._run(ledger, commands.expire(ledger, self.retention, now), now)
        return ledger, now

    async def ask(self, question: Callable[[Store], Answer]) -> Answer:
        """Ask the store for what is not in memory: all of it is durable."""
        if self.unready is None and not self._is_leading:
            return await self._replica.ask(question)
        return await self._commits.ask(question)

    def tell(self, entry: Entry) -> None:
        """Have the journal tell of something that changed nothing: a refusal. Nobody waits for it."""
        if self.unready is None and self._is_leading:
            self.keep([entry])

    def keep(self, changes: Sequence[Change]) -> None:
        """Have the store keep what is no part of the ledger."""
        self._commits.submit(changes, self._ledger.revision)

    async def rewrite(self, record: Cluster | Reservation) -> None:
        """Have the store write a record once more, as it is in the ledger: its copy was spoilt."""
        self.check_leading()
        ledger, _ = self.present()
        if record is _newest(ledger, record):
            self.keep([record])
        await self._commits.settled()

    async def settled(self) -> None:
        """Wait until all that was decided so far is durable, and may be shown."""
        await self._commits.settled()

    async def confirm(self) -> None:
        """Raises if another broker has written to the store: then what is in memory may be old.

        For who writes elsewhere what follows from the ledger, where no commit would refuse it. He looks at
        what he means to change before he asks, and changes it only if it is as it was: so whatever another
        broker has made of it stays.
        """
        self.check_leading()
        self.present()
        await self._commits.ask(lambda store: store.check())

    def check_leading(self) -> None:
        """`NotLeader` if another broker decides. Who looks something up before he changes it asks first:
        what a follower has not heard of yet is there all the same.
        """
        if self.unready is None and not self.may_decide:
            leader = self.leadership.leader
            raise NotLeader(
                "this broker follows another one",
                hint=f"ask {leader}, which leads" if leader else "try again in a moment",
            )

    @property
    def may_decide(self) -> bool:
        """Whether this broker is ready, and the one that leads."""
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
        """Commands raise before their first event. One that did not has left what no store will keep."""
        log.error("a command failed halfway, which is a bug", exc_info=problem)
        self._commits.fail(StoreFailed("a command failed halfway, and all is read anew"))

    # -- what the store reports

    def _landed(self, changes: Sequence[Change], seconds: float) -> None:
        self._metrics.committed(changes, seconds)
        self.feeds.publish(changes)
        self._tell(changes)

    def _tell(self, changes: Sequence[Change] | None) -> None:
        for hear in self.listeners:
            hear(changes)

    def _store_failed(self, problem: Exception) -> None:
        self._forget(f"without its store: {problem}")
        self._metrics.store_up(up=False)
        self._wake.set()
        log.error("store failed", problem=str(problem))

    def _forget(self, why: str) -> None:
        """Drop what is in memory: it may not be true any more."""
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

    # -- the root task, while another broker leads

    async def _follow(self, patience: float) -> None:
        """Until this one leads. A failure of what keeps it up to date is not overlooked."""
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
        log.info("leading")

    async def _keep_up(self, patience: float) -> None:
        """Show what the leader has made durable, for as long as this is not cancelled."""
        while True:
            try:
                async for news in self._replica.follow():
                    self._take_in(news)
            except KubelendError as problem:
                self._complain("cannot follow", problem)
            await asyncio.sleep(patience)

    def _take_in(self, news: Records | News) -> None:
        if isinstance(news, Records):
            self._restore(news)
            log.info("following", leader=self.leadership.leader, revision=news.revision)
        else:
            self._ledger.adopt(news.changes, news.revision)
            self.feeds.publish(news.changes)
            self._tell(news.changes)

    # -- the root task, while this one does

    async def _lead(self, patience: float) -> None:
        """Load, then end what is due; returns when the store has failed, or another broker leads."""
        await self._load(patience)
        while self.may_decide:
            await self._sleep_until_due(patience)
            if self.may_decide:
                await self._expire_quietly(patience)
        if self.unready is None:
            log.warning("leading no more", leader=self.leadership.leader)
            self._forget("between leading and following")
            await self._commits.stand_down(NotLeader("this broker leads no more"))

    async def _load(self, patience: float) -> None:
        while self.leadership.leads:
            try:
                await self.load()
            except KubelendError as problem:
                self._complain("cannot load", problem)
                await asyncio.sleep(patience)
            else:
                self._metrics.store_up(up=True)
                return

    def _complain(self, what: str, problem: Exception) -> None:
        """Once for each reason."""
        if self.unready != (reason := f"without its store: {problem}"):
            log.error(what, problem=str(problem))
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
        """A store that fails here has been reported; the loop around goes on to reload it."""
        try:
            await self.expire()
        except KubelendError as problem:
            log.warning("expiry put off", problem=str(problem))
        except Exception:
            if self.unready is None:
                raise  # nothing was dropped, so loading would not put it right
            await asyncio.sleep(
                patience
            )  # a bug that comes back each time must not load all the time


def _newest(ledger: Ledger, record: Cluster | Reservation) -> Cluster | Reservation | None:
    if isinstance(record, Cluster):
        return ledger.clusters.get(record.id)
    return ledger.reservations.get(record.id)
