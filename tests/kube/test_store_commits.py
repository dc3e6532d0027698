"""Commits of the Kubernetes store: how often it writes, and what is left if it is interrupted anywhere."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from msgspec.structs import replace

import kube_stores
import make
import tcp_cuts
import waiting
from kube_stores import Gate, Interruption, Place, stored_state
from kubelend.core import audit_log
from kubelend.core.audit_log import Actor, AuditEntry
from kubelend.core.errors import StoreFailed
from kubelend.core.events import Archived, AuditLogTruncated, ClusterDeleted, RecordDeleted
from kubelend.core.lifecycle import Phase, Reason, Role
from kubelend.core.members import Member, MembershipStatus, Token, TokenId
from kubelend.core.models import ClusterId, Limits, Quota, ReservationId
from kubelend.kube.client import Client
from kubelend.stores.kubernetes import head
from kubelend.stores.kubernetes.objects import (
    HEAD_NAME,
    LEDGER_RECORDS,
    MANAGED_BY,
    MANAGED_BY_BROKER,
    STORED_RESERVATIONS,
    Spec,
    StoredObject,
)
from kubelend.stores.kubernetes.store import KubernetesStore
from kubelend.stores.memory import MemoryStore
from kubelend.wire.objects import Metadata
from store_kinds import ARCHIVE_FOR

pytestmark = pytest.mark.timeout(120)

HELD = make.reservation("rsv-1", phase=Phase.RESERVED, target=ClusterId("a"), reserved_at=make.T0)
OVER = replace(HELD, phase=Phase.RELEASED, reason=Reason.EXPIRED, finished_at=make.T0)


class Counter:
    def __init__(self):
        self.writes = 0

    async def around(self, write):
        self.writes += 1
        return await write


@pytest.mark.parametrize(
    "changes, writes",
    [
        pytest.param([], 1, id="nothing"),
        pytest.param([HELD], 3, id="a new reservation"),
        pytest.param([replace(HELD, id=f"rsv-{n}") for n in range(10, 20)], 21, id="ten of them"),
        pytest.param([make.cluster("a", cordon="why")], 2, id="a status"),
        pytest.param([make.cluster("a", "cpu=9,memory=9Gi")], 3, id="an advertisement"),
        pytest.param([Archived(ReservationId("rsv-2"))], 2, id="one for the archive"),
    ],
)
def test_number_of_writes_of_a_commit(kube, changes, writes):
    counter = Counter()
    with closing(Place(kube).open(kube_stores.connecting(counter.around))) as store:
        store.commit([make.cluster("a"), replace(OVER, id=ReservationId("rsv-2"))], 1)
        counter.writes = 0
        store.commit(changes, 2)
    assert counter.writes == writes


@pytest.mark.parametrize("count", [1, 10])
def test_new_reservations_need_one_fencing_check(kube, count):
    """Whether the head is still this broker's. Whether they are there already, nobody has to ask."""
    asked = []

    class Noting(Client):
        async def find(self, resource: Any, name: str, namespace: str = "") -> Any:
            asked.append(name)
            return await super().find(resource, name, namespace)

    with closing(Place(kube).open(Noting.open)) as store:
        store.load()
        asked.clear()
        store.commit([replace(HELD, id=ReservationId(f"rsv-{n}")) for n in range(count)], 1)
    assert asked == ["head"]


def test_unknown_object_is_found_when_it_is_created(kube):
    """Made by a broker that was stopped before it could fill it, after this one had looked."""
    place = Place(kube)
    with closing(place.open()) as store:
        store.load()
        metadata = Metadata(HELD.id, place.namespace, labels={MANAGED_BY: MANAGED_BY_BROKER})
        wanted: Spec = {"requestedResources": {"cpu": "9", "memory": "9Gi"}}
        place.run(lambda client: client.create(STORED_RESERVATIONS, StoredObject(metadata, wanted)))
        store.commit([HELD], 1)
    with closing(place.open()) as again:
        assert again.load().reservations == [HELD]


def test_load_writes_nothing_but_the_epoch(kube):
    place, counter = Place(kube), Counter()
    with closing(place.open()) as store:
        store.commit([make.cluster("a"), HELD, OVER], 1)
    with closing(place.open(kube_stores.connecting(counter.around))) as store:
        store.load()
        store.load()
    assert counter.writes == 1


# -- interruptions


def entries(count):
    return [
        AuditEntry(make.T0, Actor("alice", "admin"), "Cordoned", f"s/{n}") for n in range(count)
    ]


def placed(name, target, **fields):
    where = ClusterId(target)
    return make.reservation(name, phase=Phase.RESERVED, target=where, reserved_at=make.T0, **fields)


def finished(name, at=make.T0):
    return make.reservation(name, phase=Phase.RELEASED, reason=Reason.EXPIRED, finished_at=at)


def cutting(number):
    """The line that tells of a cut names the digest of the last line that goes."""
    *_, last = audit_log.chain_entries(entries(number), audit_log.CHAIN_START)
    return [AuditLogTruncated(number), audit_log.truncation_entry(last, make.T0, make.T0)]


MEMBER = Member(Role.CLUSTER, "berlin", MembershipStatus.APPROVED, make.T0)
TOKEN = Token(TokenId("abc"), "d1", Role.VIEWER, make.T0, "alice", make.T0, 5)
LIMITS = Limits(ClusterId("a"), None, Quota(reservations=3))
BASE = [
    make.cluster("a", "cpu=4,memory=8Gi", labels={"tier": "gold"}),
    make.cluster("b", "cpu=4,memory=8Gi"),
    placed("rsv-1", "a"),
    placed("rsv-2", "b"),
    finished("rsv-3"),
    finished("rsv-4"),
    MEMBER,
    TOKEN,
    *entries(3),
]
LATER = make.T0 + 2 * ARCHIVE_FOR
NAMES = ["rsv-1", "rsv-2", "rsv-3", "rsv-4", "rsv-5"]

COMMITS = {
    "creates": [make.cluster("c"), placed("rsv-5", "c"), LIMITS, *entries(1)],
    "changes": [
        make.cluster("a", "cpu=5,memory=8Gi"),
        replace(placed("rsv-1", "a"), phase=Phase.ACTIVE, activated_at=make.T0),
        replace(TOKEN, uses_left=4),
    ],
    "moves": [placed("rsv-1", "b", left=(ClusterId("a"),)), *entries(2)],
    "releases": [finished("rsv-1"), placed("rsv-5", "a")],
    "archives": [
        Archived(ReservationId("rsv-3")),
        finished("rsv-1"),
        Archived(ReservationId("rsv-1")),
    ],
    "forgets": [
        finished("rsv-2", LATER),
        Archived(ReservationId("rsv-2")),
        Archived(ReservationId("rsv-3")),
    ],
    "drops": [ClusterDeleted(ClusterId("a")), make.cluster("c")],
    "erases": [RecordDeleted("member", MEMBER.id), RecordDeleted("token", TOKEN.id), LIMITS],
}


def expected(*commits):
    """What a store that cannot be stopped would tell."""
    store = MemoryStore(archive_for=ARCHIVE_FOR)
    for revision, changes in enumerate(commits, start=1):
        store.commit(changes, revision)
    return stored_state(store, NAMES)


def interrupted(place, interruption, after, changes):
    """Commit, and be cut off so many writes later; whether the store has said that it was kept."""
    with closing(place.open(kube_stores.connecting(interruption.around))) as store:
        store.load()
        interruption.left = after
        try:
            store.commit(changes, 2)
        except StoreFailed:
            return False
    return True


def gone_on(place):
    """The state after one commit more: by then all of the one before has to be in the objects."""
    store = place.open()
    store.commit([], store.load().revision)
    return stored_state(store, NAMES)


def check_gaps(kube, base, changes, *, is_sent=True):
    """Gives after how many writes the commit was through.

    `is_sent`: each write is done, and its response lost. Not sent, the same is left as one write earlier.
    """
    before, after = expected(base), expected(base, changes)
    assert before != after
    for writes in itertools.count(1):
        place, interruption = Place(kube), Interruption(is_sent=is_sent)
        with closing(place.open()) as store:
            store.commit(base, 1)
        was_kept = interrupted(place, interruption, writes, changes)
        found = stored_state(place.open_readonly(), NAMES)
        assert found in (before, after), f"stopped at write {writes}"
        assert found == gone_on(place)
        if was_kept:
            assert found == after
            return writes
    raise AssertionError("unreachable")


@pytest.mark.parametrize("name", COMMITS)
def test_interrupted_commit_is_atomic(kube, name):
    assert check_gaps(kube, BASE, COMMITS[name]) > 2


def test_commit_is_atomic_if_a_write_is_not_sent(kube):
    assert check_gaps(kube, BASE, COMMITS["moves"], is_sent=False) > 2


def test_interrupted_commit_of_several_objects_is_atomic(kube, monkeypatch):
    monkeypatch.setattr(head, "MAX_OBJECT_BYTES", 500)
    changes = [*COMMITS["creates"], *COMMITS["moves"], finished("rsv-2")]
    assert check_gaps(kube, BASE, changes) > 8


@pytest.mark.parametrize(
    "base, changes",
    [
        pytest.param(entries(3), entries(600), id="moves lines out of the head"),
        pytest.param(entries(1200), cutting(1100), id="cuts two blocks off"),
    ],
)
def test_interrupted_commit_of_the_audit_log_is_atomic(kube, base, changes):
    assert check_gaps(kube, base, changes) > 2


def test_repeatedly_interrupted_commit_is_finished(kube):
    place, changes = Place(kube), [*COMMITS["creates"], *COMMITS["releases"]]
    with closing(place.open()) as store:
        store.commit(BASE, 1)
    assert not interrupted(place, Interruption(is_sent=True), 1, changes)
    for _ in range(20):
        interruption = Interruption(is_sent=True)
        with closing(place.open(kube_stores.connecting(interruption.around))) as store:
            interruption.left = 1
            try:
                store.load()
            except StoreFailed:
                continue
            break
    assert stored_state(place.open(), NAMES) == expected(BASE, changes)


# -- lost responses


@pytest.fixture
async def line(kube):
    """Between the broker and the API server."""
    async with tcp_cuts.network(urlsplit(kube.url).port) as line:
        yield line


class Loss:
    """Loses the answer to one write, and breaks its connection when it is lost and `meanwhile` is over."""

    def __init__(self, line: tcp_cuts.Line) -> None:
        self.left = 0
        self.meanwhile: Callable[[], None] | None = None
        self._line = line
        self._loop = asyncio.get_running_loop()

    async def around(self, write: Coroutine[Any, Any, Any]) -> Any:
        """In the loop of the store, which is another than that of the line."""
        self.left -= 1
        if self.left != 0:
            return await write
        self._loop.call_soon_threadsafe(self._lose)
        return await write

    def _lose(self) -> None:
        self._line.cut(up=False)
        self._mending = self._loop.create_task(self._mend())

    async def _mend(self) -> None:
        await waiting.until(lambda: self._line.has_lost)
        if self.meanwhile is not None:
            await asyncio.to_thread(self.meanwhile)
        self._line.mend()


@asynccontextmanager
async def far_store(
    place: Place, line: tcp_cuts.Line, loss: Loss
) -> AsyncIterator[KubernetesStore]:
    """One behind the line, with a connection that was used before."""
    access = msgspec.structs.replace(
        place.access, server=f"https://127.0.0.1:{line.port}", origin=None
    )
    connect = kube_stores.connecting(loss.around)
    store = await asyncio.to_thread(KubernetesStore.open, access, place.namespace, connect=connect)
    try:
        await asyncio.to_thread(store.load)
        yield store
    finally:
        await asyncio.to_thread(store.close)


async def head_of(place: Place) -> tuple[str, str]:
    async with Client.open(place.access) as client:
        found = await client.find(LEDGER_RECORDS, HEAD_NAME, place.namespace)
    assert found is not None
    return found.metadata.resource_version, found.record.data


async def test_commit_whose_response_is_lost_has_succeeded(place, line):
    loss = Loss(line)
    async with far_store(place, line, loss) as store:
        before = await head_of(place)
        loss.left = 1
        await asyncio.to_thread(store.commit, [make.cluster("a")], 1)
        assert await head_of(place) != before
        await asyncio.to_thread(store.commit, [make.cluster("b")], 2)
        loaded = await asyncio.to_thread(store.load)
    assert ({one.id for one in loaded.clusters}, loaded.revision) == ({"a", "b"}, 2)


async def test_broker_that_was_fenced_while_it_waited_for_a_response_fails(place, line):
    """Its commit is durable, and it may not go on: its successor has read the store since."""
    loss = Loss(line)

    async with far_store(place, line, loss) as store:
        loss.left, loss.meanwhile = 1, lambda: place.open().close()
        with pytest.raises(StoreFailed, match="another broker has written"):
            await asyncio.to_thread(store.commit, [make.cluster("a")], 1)
        with pytest.raises(StoreFailed, match="another broker has written"):
            await asyncio.to_thread(store.commit, [make.cluster("b")], 1)
    records, *_ = await asyncio.to_thread(lambda: stored_state(place.open(), []))
    assert [*records[0]] == ["a"]


def test_concurrent_openings_give_different_writers(kube):
    """Both write the same epoch on the same version: nothing but who they are tells them apart."""
    place, gate, opened = Place(kube), Gate(), list[KubernetesStore]()
    place.open().close()
    gate.left = 1
    later = threading.Thread(
        target=lambda: opened.append(place.open(kube_stores.connecting(gate.around)))
    )
    later.start()
    assert gate.reached.wait(20)
    with closing(place.open()) as first:
        gate.opened.set()
        later.join(20)
        with closing(opened[0]) as second:
            with pytest.raises(StoreFailed, match="another broker has written"):
                first.commit([make.cluster("a")], 1)
            second.commit([make.cluster("b")], 1)
