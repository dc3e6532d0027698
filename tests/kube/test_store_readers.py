"""Whoever reads beside a broker that writes all the time sees one moment of it, and soon."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

import make
from kube_stores import Place
from kubelend.core import audit_log
from kubelend.core.audit_log import Actor, AuditEntry
from kubelend.core.errors import Gone, StoreFailed
from kubelend.core.events import AuditLogTruncated, Change, WorkingSet
from kubelend.core.lifecycle import Phase
from kubelend.kube.client import Client
from kubelend.stores.kubernetes import head
from kubelend.stores.kubernetes.objects import LEDGER_RECORDS
from kubelend.stores.kubernetes.store import KubernetesReplica, KubernetesStore
from waiting import PATIENCE

WIDTH = 5
"""Reservations, and as many clusters. Commits change one of each after the other."""


def changes(number: int) -> list[Change]:
    """One commit's. By what is found in all of them it can be told which commits somebody has seen."""
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
    """A broker that commits whenever it is told to, or one commit behind the other."""

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
    """A reader before whose every call something happens, which is told if it asks for a certain version."""

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
    "room", [head.MAX_OBJECT_BYTES, 1000], ids=["in the head", "beside the head"]
)
def test_reader_sees_one_commit_whole_though_the_broker_writes_before_each_of_its_calls(
    place, monkeypatch, room
):
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
async def test_follower_begins_beside_a_busy_leader_and_misses_nothing(kube):
    place = await asyncio.to_thread(Place, kube)
    store = await asyncio.to_thread(place.open)
    busy = await asyncio.to_thread(Busy, store)
    with busy.working():
        replica = KubernetesReplica(place.access, place.namespace)
        async with contextlib.aclosing(replica.follow()) as heard:
            first = await asyncio.wait_for(anext(heard), PATIENCE)
            revisions = [
                (await asyncio.wait_for(anext(heard), PATIENCE)).revision for _ in range(5)
            ]
    await asyncio.to_thread(store.close)
    assert isinstance(first, WorkingSet)
    check_one_moment(first)
    assert revisions == [first.revision + count for count in range(1, 6)]


@pytest.mark.timeout(120)
def test_reader_begins_anew_if_the_version_that_it_reads_is_forgotten(lab, clusters):
    """As a server forgets every few minutes."""
    [cluster] = clusters()
    place, forgotten = Place(cluster), threading.Event()
    with closing(place.open()) as store:
        Busy(store)

    def forget(asks_for_version: bool) -> None:
        if asks_for_version and not forgotten.is_set():
            body = b'{"metadata": {"generateName": "later-"}}'
            cluster.call("POST", "/api/v1/namespaces", body)
            lab.etcd.compact()
            cluster.restart()  # else it has the last versions in memory
            forgotten.set()

    with closing(reading(place, forget)) as reader:
        check_one_moment(reader.load())
    assert forgotten.is_set()


def test_server_that_forgets_at_once_is_told_and_not_asked_for_ever(place):
    with closing(place.open()) as store:
        Busy(store)
    asked = []

    def forget(asks_for_version: bool) -> None:
        if asks_for_version:
            asked.append(True)
            raise Gone("too old")

    told_so = pytest.raises(StoreFailed, match="compacts versions")
    with closing(reading(place, forget)) as reader, told_so:
        reader.load()
    assert 1 < len(asked) < 10


LINES = 1200
"""In more than two blocks."""


@pytest.fixture
def journalled(place):
    """A broker's store with a journal."""
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


def test_journal_that_is_cut_while_it_is_read_is_read_as_it_was(place, journalled):
    with closing(place.look()) as reader:
        start, end = reader.audit_log_bounds()
        first = reader.audit_lines(start.number, 100)
        cut(journalled)
        rest = reader.audit_lines(first[-1].number, LINES)
        assert list(audit_log.verify_chain([*first, *rest], start, end)) == []
    with closing(place.look()) as reader:
        assert reader.audit_lines(0, 1)[0].number == 1101


def test_journal_of_which_a_part_was_deleted_is_damaged_for_readers_too(place, journalled):
    place.run(lambda client: client.delete(LEDGER_RECORDS, "audit-log-513", place.namespace))
    told_so = pytest.raises(StoreFailed, match="audit-log-513 is missing")
    with closing(place.look()) as reader, told_so:
        reader.audit_lines(0, LINES)


def test_journal_that_was_cut_so_long_ago_that_the_server_has_forgotten_is_no_damage(
    place, journalled
):
    def forget(asks_for_version: bool) -> None:
        if asks_for_version:
            raise Gone("too old")

    told_so = pytest.raises(StoreFailed, match="may have been truncated")
    with closing(reading(place, forget)) as reader:
        cut(journalled)
        with told_so:
            reader.audit_lines(0, LINES)


def test_broker_whose_successor_cuts_the_journal_is_told_of_it_and_of_no_damage(place, journalled):
    with closing(place.open()) as newer:
        cut(newer)
        with pytest.raises(StoreFailed, match="another broker has written"):
            journalled.audit_lines(0, LINES)
        with pytest.raises(StoreFailed, match="another broker has written"):
            journalled.check_fencing()
        newer.check_fencing()
