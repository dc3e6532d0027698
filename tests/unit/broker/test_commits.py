"""Group commit: in order, together, all or nothing, and nobody is woken before it is durable."""

import asyncio
import contextlib
import threading

import pytest

import make
from kubelend.broker.group_commit import GroupCommit
from kubelend.core.errors import NotReady, StoreFailed
from kubelend.core.models import Cluster, ReservationId
from troubled import TroubledStore
from virtual_time import settled
from waiting import PATIENCE, until


class Scene:
    """A group commit on a store that can be held and broken, and what it reported."""

    def __init__(self):
        self.store = TroubledStore()
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

    async def is_at_the_store(self):
        begun = self.store.commits
        await until(lambda: self.store.commits > begun)


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


async def test_nothing_is_taken_before_it_is_loaded():
    fresh = Scene()
    with pytest.raises(NotReady):
        fresh.submit("a")
    await fresh.commits.close()


async def test_load_gives_what_the_store_has():
    made = Scene()
    made.store.kept.commit([make.cluster("a")], 5)
    records = await made.commits.load()
    assert (records.clusters, records.revision) == ([make.cluster("a")], 5)
    await made.commits.close()


async def test_settled_is_over_at_once_when_nothing_is_under_way(scene):
    await asyncio.wait_for(scene.commits.wait_durable(), 1)
    assert scene.store.commits == 0


async def test_what_is_submitted_in_one_turn_is_one_commit(scene):
    for name in "abc":
        scene.submit(name)
    await scene.commits.wait_durable()
    assert scene.landed == [["a", "b", "c"]]
    assert scene.store.kept.load().revision == 3


async def test_nobody_is_woken_before_it_is_durable(scene):
    scene.store.hold()
    early = asyncio.create_task(scene.keep("a"))
    await scene.is_at_the_store()
    late = asyncio.create_task(scene.commits.wait_durable())
    await settled()
    assert (early.done(), late.done()) == (False, False)
    assert scene.landed == []
    scene.store.let_go()
    await asyncio.gather(early, late)
    assert scene.landed == [["a"]]


async def test_next_group_gathers_while_one_is_written(scene):
    scene.store.hold()
    scene.submit("a")
    first = asyncio.create_task(scene.commits.wait_durable())
    await scene.is_at_the_store()
    for name in "bcd":
        scene.submit(name)
        await asyncio.sleep(0)
    second = asyncio.create_task(scene.commits.wait_durable())
    await asyncio.sleep(0)
    scene.store.let_go()
    await asyncio.gather(first, second)
    assert scene.landed == [["a"], ["b", "c", "d"]]


async def test_changes_are_kept_though_nobody_waits_for_them(scene):
    scene.submit("a")
    await until(lambda: scene.kept() == ["a"])


async def test_caller_that_goes_away_takes_nothing_with_it(scene):
    scene.store.hold()
    scene.submit("a")
    gone, other = (asyncio.create_task(scene.commits.wait_durable()) for _ in range(2))
    await scene.is_at_the_store()
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
async def test_failure_fails_all_that_was_handed_over_since(scene, problem):
    scene.store.hold()
    scene.submit("a")
    first = asyncio.create_task(scene.commits.wait_durable())
    await scene.is_at_the_store()
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


async def test_what_is_being_written_lands_though_all_that_gathers_is_given_up(scene):
    scene.store.hold()
    scene.submit("a")
    written = asyncio.create_task(scene.commits.wait_durable())
    await scene.is_at_the_store()
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
    scene.submit("d")
    await scene.commits.wait_durable()
    assert scene.kept() == ["a", "d"]


async def test_after_a_failure_it_goes_on_once_it_is_loaded_anew(scene):
    scene.store.broken = StoreFailed("full")
    scene.submit("a")
    with pytest.raises(StoreFailed):
        await scene.commits.wait_durable()
    with pytest.raises(StoreFailed, match="full"):
        await scene.commits.load()
    scene.store.broken = None
    assert (await scene.commits.load()).revision == 0
    scene.submit("b")
    await scene.commits.wait_durable()
    assert scene.kept() == ["b"]


@pytest.mark.parametrize("problem", [StoreFailed("unfit"), ValueError("unfit")], ids=repr)
async def test_change_that_cannot_be_prepared_is_a_failure_too(scene, problem):
    scene.store.unfit = problem
    scene.submit("a")
    with pytest.raises(StoreFailed, match="unfit"):
        await scene.commits.wait_durable()
    assert (scene.failures, scene.landed, scene.kept()) == (["unfit"], [], [])
    scene.store.unfit = None
    await scene.commits.load()
    scene.submit("b")
    await scene.commits.wait_durable()
    assert scene.kept() == ["b"]


@pytest.mark.parametrize("goes_away", [False, True])
async def test_store_that_is_being_read_is_not_touched_in_the_event_loop(scene, goes_away):
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
    scene.submit("b")
    await scene.commits.wait_durable()
    assert (scene.store.prepared, scene.kept()) == (1, ["a", "b"])


async def test_store_that_has_lost_something_is_not_taken_again(scene):
    scene.submit("a", "b")
    await scene.commits.wait_durable()
    scene.store.kept = TroubledStore().kept
    with pytest.raises(StoreFailed, match="lost committed data: it is at revision 0, not 2"):
        await scene.commits.load()


async def test_archive_is_read_in_turn(scene):
    assert await scene.commits.query(lambda store: store.archived(ReservationId("rsv-1"))) is None


async def test_nothing_is_asked_of_a_store_that_has_failed(scene):
    """It may answer: what it says is not trusted until it was opened anew."""
    scene.store.broken = StoreFailed("full")
    scene.submit("a")
    with contextlib.suppress(StoreFailed):
        await scene.commits.wait_durable()
    scene.store.broken = None
    with pytest.raises(StoreFailed, match="full"):
        await scene.commits.query(lambda store: store.audit_log_bounds())
    await scene.commits.load()
    await scene.commits.query(lambda store: store.audit_log_bounds())


async def test_close_finishes_what_was_handed_over_and_takes_no_more():
    made = Scene()
    await made.commits.load()
    made.store.hold()
    made.submit("a")
    asyncio.get_running_loop().call_later(0.05, made.store.let_go)
    made.submit("b")
    await made.commits.close()
    assert made.kept() == ["a", "b"]
    with pytest.raises(NotReady):
        made.submit("c")


async def test_close_ends_also_when_the_last_commit_fails():
    made = Scene()
    await made.commits.load()
    made.store.broken = StoreFailed("full")
    made.submit("a")
    await made.commits.close()
    assert made.failures == ["full"]
