"""The single writer: group commit, leadership and replication."""

import asyncio
import contextlib
import threading
from functools import partial
from typing import Any

import pytest
from structlog.testing import capture_logs

import make
from clocks import Clock
from failing_store import FailingStore
from kubelend.broker import authorization
from kubelend.broker.audit_log import AuditLog
from kubelend.broker.group_commit import GroupCommit
from kubelend.broker.metrics import BrokerMetrics
from kubelend.broker.ports import NO_REPLICA
from kubelend.broker.service import Broker, BrokerRules
from kubelend.core.audit_log import BROKER_ACTOR, AuditEntry
from kubelend.core.errors import NotFound, NotLeader, NotReady, StoreFailed
from kubelend.core.events import Archived, ClusterDeleted, CommittedChanges, StoreLag
from kubelend.core.models import Cluster, ClusterId, ReservationId
from kubelend.wire import bodies
from virtual_time import settled
from waiting import PATIENCE, until

# -- group commit


class Scene:
    """A group commit on a store that can be held and broken, and what it reported."""

    def __init__(self):
        self.store = FailingStore()
        self.landed: list[list[str]] = []
        self.failures: list[str] = []
        self.commits = GroupCommit(
            lambda: self.store,
            lambda changes, _: self.landed.append([name_of(change) for change in changes]),
            lambda failure: self.failures.append(str(failure)),
        )
        self._revision = 0

    def submit(self, *names):
        self._revision += len(names)
        self.commits.submit([make.cluster(name) for name in names], self._revision)

    async def keep(self, name):
        self.submit(name)
        await self.commits.wait_durable()

    def kept(self):
        return sorted(found.id for found in self.store.kept.load().clusters)

    async def begin(self, name):
        """Submit what the store holds up; gives the task of who waits for it."""
        self.store.hold()
        begun, waiter = self.store.commits, asyncio.create_task(self.keep(name))
        await until(lambda: self.store.commits > begun)
        return waiter


def name_of(change):
    assert isinstance(change, Cluster)
    return change.id


@pytest.fixture
async def scene():
    made = Scene()
    await made.commits.load()
    yield made
    made.store.let_go()
    made.store.broken = None
    await made.commits.close()


async def test_changes_of_one_loop_iteration_are_one_commit(scene):
    await asyncio.wait_for(scene.commits.wait_durable(), PATIENCE)
    assert scene.store.commits == 0, "without pending changes"
    for name in "abc":
        scene.submit(name)
    await scene.commits.wait_durable()
    assert scene.landed == [["a", "b", "c"]]
    assert scene.store.kept.load().revision == 3


async def test_whoever_reads_objects_waits_until_they_show_what_was_submitted(scene):
    scene.submit("a")
    scene.store.shown = StoreLag(committed=3, written=2, changes=1)
    waiter = asyncio.create_task(scene.commits.wait_written())
    await scene.commits.wait_durable()
    await settled()
    assert not waiter.done()
    scene.store.shown = StoreLag(committed=4, written=3, changes=1)
    await waiter
    scene.store.shown = StoreLag(committed=4, written=4)


async def test_waiters_are_notified_after_the_commit(scene):
    early = await scene.begin("a")
    late = asyncio.create_task(scene.commits.wait_durable())
    await settled()
    assert (early.done(), late.done()) == (False, False)
    assert scene.landed == []
    scene.store.let_go()
    await asyncio.gather(early, late)
    assert scene.landed == [["a"]]


async def test_next_group_accumulates_during_a_commit(scene):
    first = await scene.begin("a")
    for name in "bcd":
        scene.submit(name)
        await asyncio.sleep(0)
    second = asyncio.create_task(scene.commits.wait_durable())
    await asyncio.sleep(0)
    scene.store.let_go()
    await asyncio.gather(first, second)
    assert scene.landed == [["a"], ["b", "c", "d"]]


async def test_cancelled_waiter_does_not_affect_the_commit(scene):
    gone = await scene.begin("a")
    other = asyncio.create_task(scene.commits.wait_durable())
    await settled()
    gone.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await gone
    scene.store.let_go()
    await other
    assert scene.kept() == ["a"]


@pytest.mark.parametrize(
    "problem",
    [StoreFailed("full"), OSError("full"), ValueError("full")],
    ids=lambda p: type(p).__name__,
)
async def test_failed_commit_fails_everything_submitted_since(scene, problem):
    first = await scene.begin("a")
    scene.submit("b")
    second = asyncio.create_task(scene.commits.wait_durable())
    third = asyncio.create_task(scene.commits.wait_durable())
    await asyncio.sleep(0)
    scene.store.broken = problem
    scene.store.let_go()
    outcomes = await asyncio.gather(first, second, third, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [StoreFailed] * 3
    assert [str(outcome) for outcome in outcomes] == ["full"] * 3
    assert scene.failures == ["full"]
    with pytest.raises(StoreFailed, match="full"):
        scene.submit("c")
    assert (scene.landed, scene.kept()) == ([], [])


async def test_commit_in_flight_completes_when_the_pending_group_is_dropped(scene):
    written = await scene.begin("a")
    scene.submit("b")
    gathering = asyncio.create_task(scene.commits.wait_durable())
    await asyncio.sleep(0)
    scene.commits.fail(StoreFailed("given up"))
    with pytest.raises(StoreFailed, match="given up"):
        scene.submit("c")
    loading = asyncio.create_task(scene.commits.load())
    await settled()
    assert (gathering.done(), written.done()) == (True, False)
    with pytest.raises(StoreFailed, match="given up"):
        await gathering
    scene.store.let_go()
    await written
    assert (await loading).revision == 1
    assert (scene.failures, scene.landed, scene.kept()) == (["given up"], [["a"]], ["a"])
    await scene.keep("d")
    assert scene.kept() == ["a", "d"]


@pytest.mark.parametrize("problem", [StoreFailed("unfit"), ValueError("unfit")], ids=repr)
async def test_failed_preparation_is_a_failed_commit(scene, problem):
    scene.store.unfit = problem
    scene.submit("a")
    with pytest.raises(StoreFailed, match="unfit"):
        await scene.commits.wait_durable()
    assert (scene.failures, scene.landed, scene.kept()) == (["unfit"], [], [])
    scene.store.unfit = None
    await scene.commits.load()
    await scene.keep("b")
    assert scene.kept() == ["b"]


@pytest.mark.parametrize("goes_away", [False, True])
async def test_store_is_not_used_in_the_event_loop_during_a_query(scene, goes_away):
    """The reader's connection is the writer's, and has a transaction of its own open."""
    reads, may_end = threading.Event(), threading.Event()

    def question(_):
        reads.set()
        return may_end.wait(PATIENCE)

    asker = asyncio.create_task(scene.commits.query(question))
    await until(reads.is_set)
    if goes_away:
        asker.cancel()
        await asyncio.wait([asker])
    scene.submit("a")
    await settled()
    assert (scene.store.prepared, scene.store.commits) == (0, 0)
    may_end.set()
    await scene.commits.wait_durable()
    assert (scene.store.prepared, scene.kept()) == (0, ["a"])
    await scene.keep("b")
    assert (scene.store.prepared, scene.kept()) == (1, ["a", "b"])


async def test_store_that_lost_committed_data_is_rejected(scene):
    scene.submit("a", "b")
    await scene.commits.wait_durable()
    scene.store.kept = FailingStore().kept
    with pytest.raises(StoreFailed, match="lost committed data: it is at revision 0, not 2"):
        await scene.commits.load()


async def test_failed_store_is_neither_written_nor_queried_until_it_is_reloaded(scene):
    """It may answer: what it says is not trusted until it was opened anew."""
    scene.store.broken = StoreFailed("full")
    scene.submit("a")
    with pytest.raises(StoreFailed):
        await scene.commits.wait_durable()
    with pytest.raises(StoreFailed, match="full"):
        await scene.commits.load()
    scene.store.broken = None
    with pytest.raises(StoreFailed, match="full"):
        await scene.commits.query(lambda store: store.audit_log_bounds())
    assert (await scene.commits.load()).revision == 0
    await scene.commits.query(lambda store: store.audit_log_bounds())
    await scene.keep("b")
    assert scene.kept() == ["b"]


async def test_close_commits_pending_changes_and_rejects_new_ones():
    made = Scene()
    with pytest.raises(NotReady):  # before the load, too
        made.submit("a")
    await made.commits.load()
    made.store.hold()
    made.submit("a")
    asyncio.get_running_loop().call_later(0.05, made.store.let_go)
    made.submit("b")
    await made.commits.close()
    assert made.kept() == ["a", "b"]
    with pytest.raises(NotReady):
        made.submit("c")


async def test_close_ends_even_if_the_last_commit_fails():
    made = Scene()
    await made.commits.load()
    made.store.broken = StoreFailed("full")
    made.submit("a")
    await made.commits.close()
    assert made.failures == ["full"]


# -- leadership


A = ClusterId("a")
RULES = BrokerRules(stale_after=make.STALE_AFTER, retention=make.HOUR)


class FakeLeadership:
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


class FakeReplica:
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
async def running(leadership, open_store, replica=NO_REPLICA, metrics=None):
    clock = Clock()
    broker = Broker(open_store, clock, RULES, metrics or BrokerMetrics(), leadership, replica)
    task = asyncio.create_task(broker.run(retry_after=0.01))
    try:
        yield broker
    finally:
        task.cancel()
        await asyncio.wait([task])
        await broker.close()


@pytest.fixture
def replica(store):
    return FakeReplica(store)


@contextlib.asynccontextmanager
async def following(store, replica):
    """A follower that shows the state of the store."""
    async with running(FakeLeadership(), lambda: store, replica) as broker:
        await replica.news.put(store.load())
        await until(lambda: broker.unready is None)
        yield broker


async def test_follower_shows_the_committed_state_of_the_leader(store, replica):
    """It logs no changes, and accepts none."""
    store.commit([make.cluster("a")], 7)
    async with following(store, replica) as broker:
        held = make.reservation("rsv-1", phase="Reserved", target=A, revision=8)
        entry = AuditEntry(make.T0, BROKER_ACTOR, "Requested", "reservation/rsv-1", None, held)
        async with broker.stream(A, None) as opening:
            with capture_logs() as logs:
                await replica.news.put(CommittedChanges([held, entry], 8))
                (pushed,) = await opening.subscription.read(5)
        assert logs == []
        assert pushed == held == await broker.reservation(held.id)
        assert (await broker.cluster(A)).reserved == held.request.resources
        with pytest.raises(NotLeader, match="send the request to broker-1, the current leader"):
            await broker.advertise(make.advertisement("b"))
    assert store.load().revision == 7


async def test_follower_reads_the_archive(store, replica):
    over = make.reservation("rsv-1", phase="Released", reason="Expired", finished_at=make.T0)
    store.commit([over], 1)
    store.commit([Archived(over.id)], 2)
    async with following(store, replica) as broker:
        assert await broker.reservation(over.id) == over
        with pytest.raises(NotFound):
            await broker.reservation(ReservationId("rsv-2"))


async def test_unexpected_replication_error_ends_the_process(store, replica):
    broker = Broker(lambda: store, Clock(), RULES, BrokerMetrics(), FakeLeadership(), replica)
    await replica.news.put(TypeError("broken"))
    with pytest.raises(TypeError, match="broken"):
        await broker.run()
    await broker.close()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(authorization.owned_by, id="release"),
        pytest.param(
            partial(authorization.acknowledge_hold, body=bodies.AcknowledgeRequest()),
            id="acknowledge",
        ),
        pytest.param(partial(authorization.refuse_hold, reason="no"), id="refuse"),
    ],
)
async def test_lagging_follower_does_not_answer_not_found(store, replica, change):
    """Who is answered so asks nobody else."""
    async with following(store, replica) as broker:
        with pytest.raises(NotLeader):
            await change(broker, ReservationId("rsv-new"), cluster=A)


async def test_follower_expires_and_truncates_nothing(store, replica):
    over = make.reservation("rsv-1", phase="Reserved", target=A, expires_at=make.T0)
    line = AuditEntry(make.T0, BROKER_ACTOR, "Advertised", "cluster/a")
    store.commit([make.cluster("a"), over, line], 1)
    async with following(store, replica) as broker:
        broker.clock.pass_time(2 * make.HOUR)
        assert (await broker.reservation(over.id)).phase == "Reserved"
        await AuditLog(broker, retention=make.HOUR).truncate()
        assert replica.queries == 0
        unknown = (Archived(ReservationId("rsv-2")), ClusterDeleted(ClusterId("b")))
        await replica.news.put(CommittedChanges(unknown, 2))
        await until(lambda: broker.current()[0].revision == 2)
    assert store.load().revision == 1
    assert store.audit_log_bounds()[0].number == 0


async def test_follower_is_unready_while_replication_fails(store, replica):
    async with following(store, replica) as broker:
        await replica.news.put(StoreFailed("the server is away"))
        await until(lambda: broker.unready == "without its store: the server is away")
        await replica.news.put(store.load())
        await until(lambda: broker.unready is None)


async def test_new_leader_loads_the_store_and_accepts_changes(store, replica):
    leadership = FakeLeadership()
    async with running(leadership, lambda: store, replica) as broker:
        await replica.news.put(store.load())
        await until(lambda: broker.unready is None)
        store.commit([make.cluster("late")], 3)
        leadership.turn(leads=True)
        await until(lambda: "late" in broker.current()[0].clusters)
        await broker.advertise(make.advertisement("a"))
    assert {found.id for found in store.load().clusters} == {"late", "a"}


def leading_metrics(metrics):
    names = ("kubelend_leader", "kubelend_store_up")
    return [metrics.registry.get_sample_value(name) for name in names]


async def test_former_leader_drops_its_state_and_follows(store, replica):
    leadership, metrics = FakeLeadership(is_leader=True), BrokerMetrics()
    async with running(leadership, lambda: store, replica, metrics) as broker:
        await until(lambda: leading_metrics(metrics) == [1, 1])
        await until(lambda: broker.unready is None)
        await broker.advertise(make.advertisement("a"))
        leadership.turn(leads=False)
        # At once, not when the root task has noticed.
        with pytest.raises(NotReady, match="no longer the leader"):
            await broker.cluster(A)
        with pytest.raises(NotLeader):
            await broker.advertise(make.advertisement("b"))
        await until(lambda: broker.unready == "changing from leader to follower")
        assert leading_metrics(metrics) == [0, 0]
        await replica.news.put(store.load())
        await until(lambda: broker.unready is None)
        assert (await broker.cluster(A)).cluster.id == A
        leadership.turn(leads=True)
        await until(lambda: broker.unready is None and bool(broker.current()[0].clusters))
        await until(lambda: accepts_changes(broker))


async def test_fenced_leader_reads_the_lease_before_it_reopens_the_store(store, replica):
    """Else it takes it from its successor, which takes it back, by turns."""
    leadership, opened = FakeLeadership(is_leader=True), []

    def open_store():
        opened.append(store)
        return store

    async with running(leadership, open_store, replica) as broker:
        await until(lambda: broker.is_leader)
        store.broken, leadership.finds = StoreFailed("another broker has written"), False
        with pytest.raises(StoreFailed):
            await broker.advertise(make.advertisement("a"))
        store.broken = None
        await replica.news.put(store.load())
        await until(lambda: broker.unready is None)
        assert not broker.is_leader
    assert len(opened) == 1


async def test_fencing_check_raises_once_another_broker_has_written(store):
    leadership = FakeLeadership(is_leader=True)
    async with running(leadership, lambda: store) as broker:
        await until(lambda: broker.is_leader)
        await broker.check_fencing()
        store.broken = StoreFailed("another broker has written")
        with pytest.raises(StoreFailed, match="another broker has written"):
            await broker.check_fencing()
        store.broken = None
        leadership.turn(leads=False)
        with pytest.raises(NotLeader):
            await broker.check_fencing()


async def accepts_changes(broker):
    with contextlib.suppress(NotLeader, NotReady):
        await broker.advertise(make.advertisement("b"))
        return True
    return False


async def test_leader_of_an_interrupted_term_reloads_the_store(store):
    """Somebody else may have led and be gone again, and what is in memory be old."""
    leadership = FakeLeadership(is_leader=True)
    async with running(leadership, lambda: store) as broker:
        await until(lambda: broker.is_leader)
        received: list[Any] = []
        broker.listeners.append(received.append)
        store.commit([make.cluster("a")], 7)
        leadership.turn(False)
        leadership.turn(True)
        assert not broker.is_leader
        with pytest.raises(NotReady, match="no longer the leader"):
            broker.current()
        await until(lambda: broker.is_leader)
        assert list(broker.current()[0].clusters) == ["a"]
        assert received == [None]  # whoever looks at objects has to look again
