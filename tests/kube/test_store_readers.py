"""Reading the Kubernetes store while a broker writes: consistent snapshots, the audit log, and replicas."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

import kube_fixtures
import make
from kube_stores import Place
from kubelend.core import audit_log
from kubelend.core.audit_log import Actor, AuditEntry
from kubelend.core.errors import Gone, StoreFailed
from kubelend.core.events import (
    Archived,
    AuditLogTruncated,
    Change,
    ClusterDeleted,
    CommittedChanges,
    RecordDeleted,
    WorkingSet,
)
from kubelend.core.lifecycle import Phase
from kubelend.core.models import ClusterId, Limits
from kubelend.kube.client import Client
from kubelend.stores.kubernetes import head
from kubelend.stores.kubernetes.objects import HEAD_NAME, LEDGER_RECORDS
from kubelend.stores.kubernetes.store import KubernetesReplica, KubernetesStore
from waiting import PATIENCE

WIDTH = 5
"""Reservations, and as many clusters. Commits change one of each after the other."""


def changes(number: int) -> list[Change]:
    """Of one commit: the records show which commits a reader has seen."""
    offer = make.cluster(f"c-{number % WIDTH}", labels={"commit": str(number), "x": "y" * 900})
    where, name = offer.id, f"rsv-{number % WIDTH}"
    held = make.reservation(name, phase=Phase.RESERVED, target=where, message=str(number))
    return [offer, held]


def check_one_moment(seen: WorkingSet) -> None:
    """Nothing of a later commit, and all of those before."""
    newest = range(seen.revision, seen.revision - WIDTH, -1)
    expected = {str(number) for number in newest}
    assert {one.message for one in seen.reservations} == expected
    assert {one.advertisement.labels["commit"] for one in seen.clusters} == expected


class Busy:
    """A broker that commits on demand, or one commit after the other."""

    def __init__(self, store: KubernetesStore) -> None:
        self.commits = 0
        self._store = store
        store.load()
        for _ in range(WIDTH):
            self.commit()

    def commit(self) -> None:
        self.commits += 1
        self._store.commit(changes(self.commits), self.commits)

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """All the time, in a thread."""
        is_over = threading.Event()

        def work() -> None:
            while not is_over.is_set():
                self.commit()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join(60)
            assert not thread.is_alive()


def reading(place: Place, happen: Callable[[bool], None]) -> KubernetesStore:
    """A reader that calls `happen` before each of its calls: whether it asks for a certain version."""

    class Hindered(Client):
        async def list(self, *arguments: Any, at: str = "", **named: Any) -> Any:
            await asyncio.to_thread(happen, at != "")
            return await super().list(*arguments, at=at, **named)

        async def find(self, *arguments: Any, **named: Any) -> Any:
            await asyncio.to_thread(happen, False)
            return await super().find(*arguments, **named)

    return KubernetesStore.open_readonly(place.access, place.namespace, connect=Hindered.open)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "room", [head.MAX_OBJECT_BYTES, 400], ids=["in the head", "beside the head"]
)
def test_reader_gets_a_consistent_snapshot_while_the_broker_writes(place, monkeypatch, room):
    monkeypatch.setattr(head, "MAX_OBJECT_BYTES", room)
    with closing(place.open()) as store:
        busy = Busy(store)
        with closing(reading(place, lambda _: busy.commit())) as reader:
            before = busy.commits
            seen = reader.load()
            check_one_moment(seen)
            assert seen.revision > before
            assert busy.commits < before + 10, "it had to begin anew"


@pytest.mark.timeout(120)
async def test_follower_of_a_busy_leader_misses_nothing(kube):
    place = await asyncio.to_thread(Place, kube)
    store = await asyncio.to_thread(place.open)
    busy = await asyncio.to_thread(Busy, store)
    with busy.working():
        replica = KubernetesReplica(place.access, place.namespace)
        async with contextlib.aclosing(replica.follow()) as stream:
            first = await asyncio.wait_for(anext(stream), PATIENCE)
            revisions = [
                (await asyncio.wait_for(anext(stream), PATIENCE)).revision for _ in range(5)
            ]
    await asyncio.to_thread(store.close)
    assert isinstance(first, WorkingSet)
    check_one_moment(first)
    assert revisions == [first.revision + count for count in range(1, 6)]


@pytest.mark.timeout(120)
def test_reader_starts_again_if_its_version_is_compacted(lab, clusters):
    """As a server forgets every few minutes."""
    [cluster] = clusters()
    place, forgotten = Place(cluster), threading.Event()
    with closing(place.open()) as store:
        Busy(store)

    def forget(asks_for_version: bool) -> None:
        if asks_for_version and not forgotten.is_set():
            body = b'{"metadata": {"generateName": "later-"}}'
            cluster.call("POST", "/api/v1/namespaces", body)
            kube_fixtures.compact(lab.etcd)
            cluster.restart()  # else it has the last versions in memory
            forgotten.set()

    with closing(reading(place, forget)) as reader:
        check_one_moment(reader.load())
    assert forgotten.is_set()


def test_server_that_compacts_immediately_is_reported(place):
    with closing(place.open()) as store:
        Busy(store)
    asked = []

    def forget(asks_for_version: bool) -> None:
        if asks_for_version:
            asked.append(True)
            raise Gone("too old")

    reported = pytest.raises(StoreFailed, match="compacts versions")
    with closing(reading(place, forget)) as reader, reported:
        reader.load()
    assert 1 < len(asked) < 10


LINES = 1200
"""In more than two blocks."""


@pytest.fixture
def audited(place):
    """A broker's store with an audit log."""
    with closing(place.open()) as store:
        entry = AuditEntry(make.T0, Actor("alice", "admin"), "Cordoned", "cluster/a")
        store.commit([entry] * LINES, 1)
        store.commit([entry], 2)
        yield store


def cut(store: KubernetesStore) -> None:
    """Two blocks off, as the broker does with what is old."""
    (last,) = store.audit_lines(1099, 1)
    store.commit(
        [AuditLogTruncated(last.number), audit_log.truncation_entry(last, make.T0, make.T0)], 3
    )
    assert store.audit_log_bounds()[0].number == 1100


def test_audit_log_that_is_truncated_during_a_read_is_read_completely(place, audited):
    with closing(place.open_readonly()) as reader:
        start, end = reader.audit_log_bounds()
        first = reader.audit_lines(start.number, 100)
        cut(audited)
        rest = reader.audit_lines(first[-1].number, LINES)
        assert list(audit_log.verify_chain([*first, *rest], start, end)) == []
    with closing(place.open_readonly()) as reader:
        assert reader.audit_lines(0, 1)[0].number == 1101


def test_deleted_segment_of_the_audit_log_is_corruption_for_readers_too(place, audited):
    place.delete(LEDGER_RECORDS, "audit-log-513")
    reported = pytest.raises(StoreFailed, match="audit-log-513 is missing")
    with closing(place.open_readonly()) as reader, reported:
        reader.audit_lines(0, LINES)


def test_truncation_at_a_compacted_version_is_no_corruption(place, audited):
    def forget(asks_for_version: bool) -> None:
        if asks_for_version:
            raise Gone("too old")

    reported = pytest.raises(StoreFailed, match="may have been truncated")
    with closing(reading(place, forget)) as reader:
        cut(audited)
        with reported:
            reader.audit_lines(0, LINES)


def test_truncation_by_a_successor_is_reported_as_fencing(place, audited):
    with closing(place.open()) as newer:
        cut(newer)
        with pytest.raises(StoreFailed, match="another broker has written"):
            audited.audit_lines(0, LINES)
        with pytest.raises(StoreFailed, match="another broker has written"):
            audited.check_fencing()
        newer.check_fencing()


# -- replica


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
    async with contextlib.aclosing(replica.follow()) as stream:
        yield lambda: asyncio.wait_for(anext(stream), PATIENCE)


async def commit(store, *changes, revision):
    await asyncio.to_thread(store.commit, changes, revision)


async def test_snapshot_is_followed_by_each_commit(place, store):
    await commit(store, make.cluster("a"), revision=1)
    async with following(place) as next_change:
        first = await next_change()
        assert (first.revision, [found.id for found in first.clusters]) == (1, ["a"])
        held = make.reservation("rsv-1", phase="Reserved", target=ClusterId("a"))
        await commit(store, held, make.cluster("b"), revision=3)
        assert await next_change() == CommittedChanges([make.cluster("b"), held], 3)


async def test_nothing_is_replicated_before_the_first_leader(place):
    async with following(place) as next_change:
        first = asyncio.create_task(next_change())
        await asyncio.sleep(0)
        store = await asyncio.to_thread(place.open)
        assert await first == WorkingSet([], [], 0, [], [], [])
        await asyncio.to_thread(store.close)


async def test_deletions_are_replicated(place, store):
    over = make.reservation("rsv-1", phase="Released", reason="Expired", finished_at=make.T0)
    limits = Limits(ClusterId("a"), policy=make.policy(deny=["x"]))
    await commit(store, make.cluster("a"), over, limits, revision=3)
    async with following(place) as next_change:
        assert isinstance(await next_change(), WorkingSet)
        gone = (Archived(over.id), ClusterDeleted(ClusterId("a")), RecordDeleted("limits", "a"))
        await commit(store, *gone, revision=6)
        news = await next_change()
        assert {*news.changes} == {*gone}


async def test_new_leader_causes_a_snapshot(place, store):
    """It may not know what somebody deleted before it looked."""
    async with following(place) as next_change:
        await next_change()
        second = await asyncio.to_thread(place.open)
        await asyncio.to_thread(second.load)
        assert await next_change() == WorkingSet([], [], 0, [], [], [])
        await commit(second, make.cluster("late"), revision=1)
        assert await next_change() == CommittedChanges([make.cluster("late")], 1)
        await asyncio.to_thread(second.close)


async def test_archive_and_audit_log_can_be_queried(place, store):
    over = make.reservation("rsv-1", phase="Released", reason="Expired", finished_at=make.T0)
    await commit(store, over, revision=1)
    await commit(store, Archived(over.id), revision=2)
    replica = KubernetesReplica(place.access, place.namespace)
    assert await replica.query(lambda found: found.archived(over.id)) == over
    assert await replica.query(lambda found: found.audit_lines(0, 10)) == []


async def test_oversized_commit_causes_a_snapshot(place, store, monkeypatch):
    monkeypatch.setattr(head, "MAX_OBJECT_BYTES", 400)
    many = [make.cluster(f"c-{number}", labels={"x": "y" * 900}) for number in range(3)]
    async with following(place) as next_change:
        await next_change()
        await commit(store, *many, revision=300)
        found = await next_change()
        assert isinstance(found, WorkingSet)
        assert {one.id for one in found.clusters} == {one.id for one in many}


async def test_unreachable_server_ends_the_replication(clusters):
    [cluster] = await asyncio.to_thread(clusters)
    place = await asyncio.to_thread(Place, cluster)
    store = await asyncio.to_thread(place.open)
    await asyncio.to_thread(store.close)
    async with following(place) as next_change:
        await next_change()
        await asyncio.to_thread(cluster.kill)
        with pytest.raises(StoreFailed, match="cannot connect to the API server"):
            await next_change()


async def test_deleted_head_ends_the_replication(place, store, kube_client):
    async with following(place) as next_change:
        await next_change()
        await kube_client.delete(LEDGER_RECORDS, HEAD_NAME, place.namespace)
        with pytest.raises(StoreFailed, match="was deleted"):
            await next_change()
