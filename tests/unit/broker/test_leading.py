"""Several brokers on one store: one decides, the others show what it has made durable and change nothing."""

import asyncio
import contextlib
from functools import partial
from typing import Any

import pytest
from structlog.testing import capture_logs

import make
from clocks import Clock
from kubelend.broker import authorization
from kubelend.broker.audit_log import AuditLog
from kubelend.broker.metrics import Metrics
from kubelend.broker.ports import NO_REPLICA
from kubelend.broker.service import Broker, BrokerRules
from kubelend.core.audit_log import BROKER_ACTOR, AuditEntry
from kubelend.core.errors import NotFound, NotLeader, NotReady, StoreFailed
from kubelend.core.events import Archived, ClusterDeleted, CommittedChanges
from kubelend.core.models import ClusterId, ReservationId
from waiting import until

A = ClusterId("a")
RULES = BrokerRules(stale_after=make.STALE_AFTER, retention=make.HOUR)


class Vote:
    """Whoever the test says leads."""

    def __init__(self, is_leader=False):
        self.is_leader = is_leader
        self.leader = "broker-1"
        self.term = 0
        self.finds: bool | None = None
        """Whether it leads, as a look would show, if that is not known yet."""
        self._turned = asyncio.Event()

    def turn(self, leads):
        self.term += leads and not self.is_leader
        self.is_leader = leads
        self._turned.set()

    async def wait_for_leadership(self):
        while not self.is_leader:
            await self._turned.wait()
            self._turned.clear()

    async def refresh(self):
        if self.finds is not None:
            self.turn(self.finds)


class Tail:
    """Hands on what the test puts in: records, news, or an error."""

    def __init__(self, store=None):
        self.store = store
        self.news: asyncio.Queue[Any] = asyncio.Queue()
        self.queries = 0

    async def follow(self):
        while True:
            found = await self.news.get()
            if isinstance(found, Exception):
                raise found
            yield found

    async def query(self, query):
        self.queries += 1
        return query(self.store)


@contextlib.asynccontextmanager
async def running(vote, open_store, tail=NO_REPLICA):
    clock = Clock()
    broker = Broker(open_store, clock, RULES, Metrics(), vote, tail)
    task = asyncio.create_task(broker.run(retry_after=0.01))
    try:
        yield broker
    finally:
        task.cancel()
        await asyncio.wait([task])
        await broker.close()


@pytest.fixture
def tail(store):
    return Tail(store)


async def test_a_follower_shows_what_the_leader_has_made_durable(store, tail):
    async with running(Vote(), lambda: store, tail) as broker:
        assert broker.unready is not None
        store.commit([make.cluster("a")], 7)
        await tail.news.put(store.load())
        await until(lambda: broker.unready is None)
        held = make.reservation("rsv-1", phase="Reserved", target=A, revision=8)
        async with broker.stream(A, None) as opening:
            await tail.news.put(CommittedChanges([held], 8))
            (pushed,) = await opening.subscription.read(5)
        assert pushed == held == await broker.reservation(held.id)
        assert (await broker.cluster(A)).reserved == held.request.resources


async def test_a_follower_does_not_log_what_the_leader_has_logged(store, tail):
    async with running(Vote(), lambda: store, tail) as broker:
        await tail.news.put(store.load())
        await until(lambda: broker.unready is None)
        held = make.reservation("rsv-1", phase="Reserved", target=A, revision=8)
        entry = AuditEntry(make.T0, BROKER_ACTOR, "Requested", "reservation/rsv-1", None, held)
        with capture_logs() as logs:
            await tail.news.put(CommittedChanges([make.cluster("a"), held, entry], 8))
            await until(lambda: held.id in broker.current()[0].reservations)
    assert logs == []


async def test_a_follower_knows_what_is_archived(store, tail):
    over = make.reservation("rsv-1", phase="Released", reason="Expired", finished_at=make.T0)
    store.commit([over], 1)
    store.commit([Archived(over.id)], 2)
    async with running(Vote(), lambda: store, tail) as broker:
        await tail.news.put(store.load())
        await until(lambda: broker.unready is None)
        assert await broker.reservation(over.id) == over
        with pytest.raises(NotFound):
            await broker.reservation(ReservationId("rsv-2"))


async def test_what_goes_and_was_never_seen_is_no_trouble(store, tail):
    async with running(Vote(), lambda: store, tail) as broker:
        await tail.news.put(store.load())
        await tail.news.put(
            CommittedChanges([Archived(ReservationId("rsv-1")), ClusterDeleted(A)], 2)
        )
        await until(lambda: broker.unready is None and broker.current()[0].revision == 2)


async def test_a_follower_that_breaks_ends_the_process(store, tail):
    broker = Broker(lambda: store, Clock(), RULES, Metrics(), Vote(), tail)
    await tail.news.put(TypeError("broken"))
    with pytest.raises(TypeError, match="broken"):
        await broker.run()
    await broker.close()


async def test_a_follower_refuses_changes_and_says_who_leads(store, tail):
    async with running(Vote(), lambda: store, tail) as broker:
        await tail.news.put(store.load())
        await until(lambda: broker.unready is None)
        with pytest.raises(NotLeader, match="send the request to broker-1, the current leader"):
            await broker.advertise(make.advertisement("a"))
    assert store.load().clusters == []


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(authorization.owned_by, id="release"),
        pytest.param(authorization.acknowledge_hold, id="acknowledge"),
        pytest.param(partial(authorization.refuse_hold, reason="no"), id="refuse"),
    ],
)
async def test_a_follower_that_lags_behind_does_not_say_that_there_is_no_reservation(
    store, tail, change
):
    """Whoever hears that asks nobody else."""
    async with running(Vote(), lambda: store, tail) as broker:
        await tail.news.put(store.load())
        await until(lambda: broker.unready is None)
        with pytest.raises(NotLeader):
            await change(broker, ReservationId("rsv-new"), cluster=A)


async def test_a_follower_ends_nothing_by_itself(store, tail):
    over = make.reservation("rsv-1", phase="Reserved", target=A, expires_at=make.T0)
    store.commit([make.cluster("a"), over], 1)
    async with running(Vote(), lambda: store, tail) as broker:
        await tail.news.put(store.load())
        await until(lambda: broker.unready is None)
        broker.clock.pass_time(make.HOUR)
        assert (await broker.reservation(over.id)).phase == "Reserved"
    assert store.load().revision == 1


async def test_a_follower_leaves_old_lines_of_the_audit_log_to_the_leader_and_does_not_look_for_them(
    store, tail
):
    store.commit([AuditEntry(make.T0, BROKER_ACTOR, "Advertised", "cluster/a")], 1)
    async with running(Vote(), lambda: store, tail) as broker:
        await tail.news.put(store.load())
        await until(lambda: broker.unready is None)
        broker.clock.pass_time(2 * make.HOUR)
        await AuditLog(broker, retention=make.HOUR).truncate()
        assert tail.queries == 0
    assert store.audit_log_bounds()[0].number == 0


async def test_a_follower_that_cannot_look_is_unready_until_it_can(store, tail):
    async with running(Vote(), lambda: store, tail) as broker:
        await tail.news.put(store.load())
        await until(lambda: broker.unready is None)
        await tail.news.put(StoreFailed("the server is away"))
        await until(lambda: broker.unready == "without its store: the server is away")
        await tail.news.put(store.load())
        await until(lambda: broker.unready is None)


async def test_who_wins_reads_the_store_and_decides(store, tail):
    vote = Vote()
    async with running(vote, lambda: store, tail) as broker:
        await tail.news.put(store.load())
        await until(lambda: broker.unready is None)
        store.commit([make.cluster("late")], 3)
        vote.turn(leads=True)
        await until(lambda: "late" in broker.current()[0].clusters)
        await broker.advertise(make.advertisement("a"))
    assert {found.id for found in store.load().clusters} == {"late", "a"}


async def test_who_loses_drops_what_it_knew_and_follows(store, tail):
    vote = Vote(is_leader=True)
    async with running(vote, lambda: store, tail) as broker:
        await until(lambda: broker.unready is None)
        await broker.advertise(make.advertisement("a"))
        vote.turn(leads=False)
        # At once, not when the root task has noticed.
        with pytest.raises(NotReady, match="no longer the leader"):
            await broker.cluster(A)
        with pytest.raises(NotLeader):
            await broker.advertise(make.advertisement("b"))
        await until(lambda: broker.unready == "changing from leader to follower")
        await tail.news.put(store.load())
        await until(lambda: broker.unready is None)
        assert (await broker.cluster(A)).cluster.id == A
        vote.turn(leads=True)
        await until(lambda: broker.unready is None and bool(broker.current()[0].clusters))
        await until(lambda: is_taken(broker))


async def test_who_finds_that_another_has_written_looks_who_leads_before_it_takes_the_store(
    store, tail
):
    """Else it takes it from its successor, which takes it back, by turns."""
    vote, opened = Vote(is_leader=True), []

    def open_store():
        opened.append(store)
        return store

    async with running(vote, open_store, tail) as broker:
        await until(lambda: broker.is_leader)
        store.broken, vote.finds = StoreFailed("another broker has written"), False
        with pytest.raises(StoreFailed):
            await broker.advertise(make.advertisement("a"))
        store.broken = None
        await tail.news.put(store.load())
        await until(lambda: broker.unready is None)
        assert not broker.is_leader
    assert len(opened) == 1


async def test_fencing_check_raises_once_another_broker_has_written(store):
    vote = Vote(is_leader=True)
    async with running(vote, lambda: store) as broker:
        await until(lambda: broker.is_leader)
        await broker.check_fencing()
        store.broken = StoreFailed("another broker has written")
        with pytest.raises(StoreFailed, match="another broker has written"):
            await broker.check_fencing()
        store.broken = None
        vote.turn(leads=False)
        with pytest.raises(NotLeader):
            await broker.check_fencing()


async def is_taken(broker):
    with contextlib.suppress(NotLeader, NotReady):
        await broker.advertise(make.advertisement("b"))
        return True
    return False


async def test_a_leader_that_was_interrupted_unnoticed_reads_the_store_anew(store):
    """Somebody else may have led and be gone again, and what is in memory be old."""
    vote = Vote(is_leader=True)
    async with running(vote, lambda: store) as broker:
        await until(lambda: broker.is_leader)
        told: list[Any] = []
        broker.listeners.append(told.append)
        store.commit([make.cluster("a")], 7)
        vote.turn(False)
        vote.turn(True)
        assert not broker.is_leader
        with pytest.raises(NotReady, match="no longer the leader"):
            broker.current()
        await until(lambda: broker.is_leader)
        assert list(broker.current()[0].clusters) == ["a"]
        assert told == [None]  # whoever looks at objects has to look again
