"""A follower of the Kubernetes store: commit by commit what the leader holds, and all of it after a gap."""

import asyncio
import contextlib

import pytest

import make
from kube_stores import Place
from kubelend.core.errors import StoreFailed
from kubelend.core.events import (
    Archived,
    ClusterDeleted,
    CommittedChanges,
    RecordDeleted,
    WorkingSet,
)
from kubelend.core.ledger import Ledger
from kubelend.core.models import ClusterId, Limits
from kubelend.stores.kubernetes.head import MAX_OBJECT_BYTES
from kubelend.stores.kubernetes.store import KubernetesReplica
from waiting import PATIENCE


@pytest.fixture
async def place(kube):
    return await asyncio.to_thread(Place, kube)


@pytest.fixture
async def store(place):
    """As the leader has it open."""
    opened = await asyncio.to_thread(place.open)
    await asyncio.to_thread(opened.load)
    yield opened
    await asyncio.to_thread(opened.close)


@contextlib.asynccontextmanager
async def following(place):
    replica = KubernetesReplica(place.access, place.namespace)
    async with contextlib.aclosing(replica.follow()) as heard:
        yield lambda: asyncio.wait_for(anext(heard), PATIENCE)


async def commit(store, *changes, revision):
    await asyncio.to_thread(store.commit, changes, revision)


async def test_all_comes_first_and_then_each_commit(place, store):
    await commit(store, make.cluster("a"), revision=1)
    async with following(place) as heard:
        first = await heard()
        assert (first.revision, [found.id for found in first.clusters]) == (1, ["a"])
        held = make.reservation("rsv-1", phase="Reserved", target=ClusterId("a"))
        await commit(store, held, make.cluster("b"), revision=3)
        assert await heard() == CommittedChanges([make.cluster("b"), held], 3)


async def test_before_the_first_broker_has_led_there_is_nothing_to_tell(place):
    async with following(place) as heard:
        first = asyncio.create_task(heard())
        await asyncio.sleep(0)
        store = await asyncio.to_thread(place.open)
        assert await first == WorkingSet([], [], 0, [], [], [])
        await asyncio.to_thread(store.close)


async def test_what_goes_away_goes_away(place, store):
    over = make.reservation("rsv-1", phase="Released", reason="Expired", finished_at=make.T0)
    limits = Limits(ClusterId("a"), policy=make.policy(deny=["x"]))
    await commit(store, make.cluster("a"), over, limits, revision=3)
    async with following(place) as heard:
        assert isinstance(await heard(), WorkingSet)
        gone = (Archived(over.id), ClusterDeleted(ClusterId("a")), RecordDeleted("limits", "a"))
        await commit(store, *gone, revision=6)
        news = await heard()
        assert {*news.changes} == {*gone}


async def test_with_a_new_leader_all_comes_again(place, store):
    """It may not know what somebody deleted before it looked."""
    async with following(place) as heard:
        await heard()
        second = await asyncio.to_thread(place.open)
        await asyncio.to_thread(second.load)
        assert await heard() == WorkingSet([], [], 0, [], [], [])
        await commit(second, make.cluster("late"), revision=1)
        assert await heard() == CommittedChanges([make.cluster("late")], 1)
        await asyncio.to_thread(second.close)


async def test_the_archive_and_the_journal_can_be_asked(place, store):
    over = make.reservation("rsv-1", phase="Released", reason="Expired", finished_at=make.T0)
    await commit(store, over, revision=1)
    await commit(store, Archived(over.id), revision=2)
    replica = KubernetesReplica(place.access, place.namespace)
    assert await replica.query(lambda found: found.archived(over.id)) == over
    assert await replica.query(lambda found: found.audit_lines(0, 10)) == []


async def test_a_commit_too_large_for_the_head_is_read_from_the_objects(place, store):
    labels = {f"label-{number}": "y" * 250 for number in range(12)}
    many = [make.cluster(f"c-{number}", labels=labels) for number in range(300)]
    assert len(many) * sum(map(len, labels.values())) > MAX_OBJECT_BYTES
    async with following(place) as heard:
        await heard()
        await commit(store, *many, revision=300)
        found = await heard()
        clusters = found.clusters if isinstance(found, WorkingSet) else found.changes
        assert len(clusters) == 300


async def test_a_follower_ends_with_what_the_leader_has(place, store):
    """Through a whole life, restored at the start and told commit by commit."""
    ledger = Ledger()
    async with following(place) as heard:
        follower = Ledger.restore(await heard())
        desk = make.Desk(make.Recorder(), make.T0)
        for step in range(6):
            desk.advertise(f"c{step % 3}", "cpu=4,memory=8Gi")
            desk.reserve("cpu=1,memory=1Gi")
            changes = [ledger.apply(event) for event in desk.ledger.events[ledger.revision :]]
            await commit(store, *changes, revision=ledger.revision)
            news = await heard()
            follower.apply_changes(news.changes, news.revision)
            assert make.state(follower) == make.state(ledger)


async def test_a_server_that_is_away_is_said_and_not_waited_for(clusters):
    [cluster] = await asyncio.to_thread(clusters)
    place = await asyncio.to_thread(Place, cluster)
    store = await asyncio.to_thread(place.open)
    await asyncio.to_thread(store.close)
    async with following(place) as heard:
        await heard()
        await asyncio.to_thread(cluster.kill)
        with pytest.raises(StoreFailed, match="cannot connect to the API server"):
            await heard()


async def test_a_head_that_is_deleted_is_said(place, store, kube_client):
    from kubelend.stores.kubernetes.objects import HEAD_NAME, LEDGER_RECORDS

    async with following(place) as heard:
        await heard()
        await kube_client.delete(LEDGER_RECORDS, HEAD_NAME, place.namespace)
        with pytest.raises(StoreFailed, match="was deleted"):
            await heard()
