"""The Kubernetes store answers when its head is written; the objects follow."""

import threading
from contextlib import closing

import pytest
from msgspec.structs import replace

import kube_stores
import make
from kube_stores import Gate, Interruption, stored_state
from kubelend.core.errors import StoreFailed
from kubelend.core.events import Archived, ClusterDeleted, StoreLag
from kubelend.core.lifecycle import Phase, Reason
from kubelend.core.models import ClusterId, ReservationId
from kubelend.kits import clock
from kubelend.stores.kubernetes import writer
from kubelend.stores.kubernetes.objects import (
    LEDGER_RECORDS,
    STORED_ADVERTISEMENTS,
    STORED_RESERVATIONS,
)
from kubelend.stores.kubernetes.store import KubernetesStore
from kubelend.stores.memory import MemoryStore
from store_kinds import ARCHIVE_FOR
from waiting import PATIENCE, wait_until

HELD = make.reservation("rsv-1", phase=Phase.RESERVED, target=ClusterId("a"), reserved_at=make.T0)
ACTIVE = replace(HELD, phase=Phase.ACTIVE, activated_at=make.T0)
OVER = replace(HELD, phase=Phase.RELEASED, reason=Reason.EXPIRED, finished_at=make.T0)
NAMES = ["rsv-1", "rsv-2"]


class ObjectGate(Gate):
    """Lets writes of LedgerRecords through, and notes all others."""

    def __init__(self):
        super().__init__()
        self.left = 0
        self.written = []

    async def around(self, write):
        resource = write.cr_frame.f_locals.get("resource")  # None of a raw request
        if resource is LEDGER_RECORDS:
            return await write
        found = await super().around(write)
        self.written.append(resource)
        return found


@pytest.fixture
def gate():
    gate = ObjectGate()
    yield gate
    gate.opened.set()


@pytest.fixture
def lagging(place, gate):
    """A store whose objects are not written before the gate is opened."""
    connect = kube_stores.connecting(gate.around)
    with closing(place.open(connect, KubernetesStore)) as store:
        yield store
        gate.opened.set()


def expected(*commits):
    store = MemoryStore(archive_for=ARCHIVE_FOR)
    for revision, changes in enumerate(commits, start=1):
        store.commit(changes, revision)
    return stored_state(store, NAMES)


def test_commits_do_not_wait_for_objects_and_each_is_written_once(place, gate, lagging):
    lagging.commit([make.cluster("a"), HELD], 1)
    assert gate.reached.wait(PATIENCE)
    lagging.commit([replace(HELD, id=ReservationId("rsv-2"))], 2)
    lagging.commit([replace(ACTIVE, id=ReservationId("rsv-2"))], 3)
    lag = lagging.lag()
    assert (lag.committed, lag.written, lag.changes) == (3, 0, 4)
    assert place.find(STORED_RESERVATIONS, "rsv-2") is None
    gate.opened.set()
    lagging.flush()
    assert lagging.lag() == StoreLag(3, 3)
    assert gate.written.count(STORED_RESERVATIONS) == 4  # two objects, each with its status
    assert place.find(STORED_RESERVATIONS, "rsv-2").status.phase == "Active"


COMMITS = {
    "changes": [[make.cluster("a"), HELD], [ACTIVE], [make.cluster("a", "cpu=9,memory=9Gi")]],
    "ends": [[make.cluster("a"), HELD], [OVER], [Archived(HELD.id)]],
    "returns": [[make.cluster("a")], [ClusterDeleted(ClusterId("a"))], [make.cluster("a"), HELD]],
}


@pytest.mark.parametrize("commits", COMMITS.values(), ids=COMMITS)
@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_commits_whose_objects_are_missing_are_loaded(place, gate, lagging, commits, after):
    """After so many writes the broker is killed."""
    gate.left = after + 1
    for revision, changes in enumerate(commits, start=1):
        lagging.commit(changes, revision)
    wanted = expected(*commits)
    assert stored_state(place.open_readonly(), NAMES) == wanted
    assert stored_state(place.open(), NAMES) == wanted
    assert stored_state(place.open_readonly(), NAMES) == wanted


def test_way_back_finishes_commits_whose_objects_are_missing(place, lagging):
    """It deletes the head, which alone has them."""
    lagging.commit([make.cluster("a"), HELD], 1)
    lagging.commit([ACTIVE], 2)
    assert KubernetesStore.leave(place.access, place.namespace, clock.utc_now) == 1
    assert place.find(STORED_RESERVATIONS, "rsv-1").status.phase == "Active"


def check_finished_one_is_loaded(place):
    for opened in (place.open_readonly(), place.open()):
        with closing(opened):
            assert opened.load().reservations == [OVER]


def test_reservation_that_ends_before_its_object_has_the_record_is_loaded(place, gate, lagging):
    gate.left = 2  # the object is created without the record
    lagging.commit([HELD], 1)
    assert gate.reached.wait(PATIENCE)
    lagging.commit([OVER], 2)
    check_finished_one_is_loaded(place)


def test_name_of_an_archived_reservation_is_used_again(place, gate, lagging):
    gate.left = 2
    lagging.commit([OVER, Archived(OVER.id)], 1)
    assert gate.reached.wait(PATIENCE)
    lagging.commit([HELD], 2)
    lagging.commit([OVER], 3)
    check_finished_one_is_loaded(place)


def test_archived_reservation_is_found_before_its_object_shows_it(place, lagging):
    for revision, changes in enumerate(COMMITS["ends"], start=1):
        lagging.commit(changes, revision)
    assert lagging.archived(HELD.id) == OVER
    with closing(place.open_readonly()) as reader:
        assert lagging.archive() == reader.archive() == [OVER]


def test_commit_waits_when_too_many_changes_are_pending(gate, lagging, monkeypatch):
    monkeypatch.setattr(writer, "MAX_PENDING_WRITES", 2)
    lagging.commit([make.cluster("a"), HELD], 1)
    third = threading.Thread(target=lagging.commit, args=([ACTIVE], 2))
    third.start()
    assert gate.reached.wait(PATIENCE)
    third.join(0.2)
    assert (third.is_alive(), lagging.lag().committed) == (True, 1)
    gate.opened.set()
    third.join(PATIENCE)
    assert lagging.lag().committed == 2


def test_error_in_the_background_fails_the_next_commit_and_is_tried_again(place, monkeypatch):
    interruption = Interruption(is_sent=False)
    connect = kube_stores.connecting(interruption.around)
    with closing(place.open(connect, KubernetesStore)) as store:
        store.load()
        interruption.left = 2
        store.commit([make.cluster("a")], 1)
        wait_until(lambda: interruption.has_happened)
        with pytest.raises(StoreFailed, match="cut off"):
            store.flush()
        with pytest.raises(StoreFailed, match="cut off"):
            store.commit([HELD], 2)
        interruption.has_happened = False
        wait_until(lambda: store.lag().changes == 0)
        store.commit([HELD], 2)
    assert stored_state(place.open(), NAMES) == expected([make.cluster("a")], [HELD])


def test_suspended_broker_with_several_commits_undoes_nothing(place, gate, lagging):
    """It still has three commits to write when its successor has written, changed and deleted all of it."""
    for revision, changes in enumerate(COMMITS["changes"], start=1):
        lagging.commit(changes, revision)
    assert gate.reached.wait(PATIENCE)
    with closing(place.open()) as newer:
        newer.load()
        newer.commit([ClusterDeleted(ClusterId("a")), OVER], 4)
        newer.commit([], 4)
        gate.opened.set()
        with pytest.raises(StoreFailed, match="another broker has written"):
            lagging.flush()
        assert newer.load().clusters == []
    assert place.find(STORED_RESERVATIONS, "rsv-1").status.phase == "Released"
    found = place.find(STORED_ADVERTISEMENTS, "a-adv")
    assert found is None or found.record is None


def test_own_commits_are_not_taken_for_those_of_another_broker(place):
    with closing(place.open(kind=KubernetesStore)) as store:
        for number in range(30):
            store.commit([replace(HELD, id=ReservationId(f"rsv-{number}"))], number + 1)
            store.check_fencing()
        store.flush()
        assert len(store.load().reservations) == 30
