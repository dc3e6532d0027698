"""The broker's reconcilers: what they repair, write, report and forget, and when they must not write."""

from datetime import timedelta
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

import broker_samples as samples
import brokers
import make
import scripted_api
from clocks import Seconds
from kubelend.broker.service import BrokerRules
from kubelend.controllers import labels
from kubelend.controllers.advertisements import AdvertisementReconciler
from kubelend.controllers.reconciler import (
    DRIFT_DEADLINE,
    DRIFT_GRACE,
    MAX_REPAIRS,
    DriftTracker,
    NextDue,
)
from kubelend.controllers.reservations import ReservationReconciler
from kubelend.core.errors import NotReady, Revoked, StoreFailed
from kubelend.core.indexes import MemberIndex
from kubelend.core.lifecycle import Role
from kubelend.core.members import Member, MembershipStatus
from kubelend.core.models import ClusterId
from kubelend.kube.client import Client
from kubelend.kube.codec import UndecodableObject
from kubelend.kube.events import EventRecorder
from kubelend.kube.informer import Deleted, Listed
from kubelend.wire.broker_objects import RESERVATION_FINALIZER, StoredRecord
from kubelend.wire.conversion import RequestLimits
from root_tasks import working
from waiting import until

TERMS = RequestLimits(make.HOUR, make.HOUR, make.HOUR)
FOUND = samples.request_object()


class Server:
    """An API server with at most one object, which records writes."""

    def __init__(self) -> None:
        self.found: Any = None
        self.writes: list[str] = []

    async def answer(self, request: Any) -> Any:
        if request.method != "GET":
            self.writes.append(request.method)
        elif not self.found or not request.path.endswith(f"/{self.found.metadata.name}"):
            return scripted_api.status(404, reason="NotFound", name=request.path.split("/")[-1])
        return scripted_api.found(msgspec.to_builtins(self.found))


class EmittedEvents(EventRecorder):
    """Collects Events instead of writing them."""

    def __init__(self) -> None:
        self.emitted: list[Any] = []

    def emit(self, event: Any) -> None:
        self.emitted.append(event)


@pytest.fixture
def server():
    return Server()


@pytest.fixture
async def client(certificates, server):
    async with scripted_api.running(certificates.server()) as scripted:
        scripted.answers.extend([server.answer] * 50)
        async with Client.open(scripted.access()) as client:
            yield client


@pytest.fixture
async def broker(store):
    async with brokers.loaded(store=store) as broker:
        yield broker
        store.broken = None


@pytest.fixture
def recorder():
    return EmittedEvents()


@pytest.fixture
def reservations(broker, client, recorder):
    return ReservationReconciler(broker, client, "hub", TERMS, recorder)


@pytest.fixture
def advertisements(broker, client, recorder):
    return AdvertisementReconciler(broker, client, "hub", recorder)


# -- objects that the ledger does not know

DELETED = samples.with_metadata(
    FOUND, deletion_timestamp=make.T0, finalizers=(RESERVATION_FINALIZER, "other/one")
)
LONG_AGO = make.T0 - 2 * make.HOUR
CLAIM = {"phase": "Reserved", "record": StoredRecord(3, "", "{}")}
UNKNOWN = pytest.mark.parametrize(
    "found, write",
    [
        pytest.param(samples.request_object(labels=samples.MANAGED), "DELETE", id="orphan"),
        pytest.param(samples.with_status(FOUND, **CLAIM), "PATCH", id="claims a record"),
        pytest.param(FOUND, "PATCH", id="to be rejected"),
        pytest.param(
            samples.with_status(FOUND, phase="Failed", finished_at=LONG_AGO),
            "DELETE",
            id="rejected long ago",
        ),
        pytest.param(DELETED, "PATCH", id="being deleted"),
    ],
)


@UNKNOWN
async def test_reservation_that_the_ledger_does_not_know_is_written(
    reservations, server, found, write
):
    server.found = found
    async with working(reservations.queue):
        reservations.cache.handle(Listed([found], []))
        await until(lambda: server.writes == [write])


async def handled_while_fenced(reconciler, store, found):
    """Handle the object until the store reports that another broker has written."""
    store.broken = StoreFailed("another broker has written to the store since")
    with capture_logs() as logs:
        async with working(reconciler.queue):
            reconciler.cache.handle(Listed([found], []))
            await until(lambda: any(one["event"] == "Reconcile failed, will retry" for one in logs))


@UNKNOWN
async def test_reservation_is_not_written_if_another_broker_has_written(
    reservations, store, server, found, write
):
    server.found = found
    await handled_while_fenced(reservations, store, found)
    assert server.writes == []


async def test_advertisement_is_not_written_if_another_broker_has_written(
    advertisements, store, server
):
    server.found = samples.advertisement(labels=samples.MANAGED)
    await handled_while_fenced(advertisements, store, server.found)
    assert server.writes == []
    store.broken = None
    async with working(advertisements.queue):
        advertisements.enqueue_all()
        await until(lambda: server.writes == ["DELETE"])


async def test_cluster_whose_object_appeared_late_is_not_missing_any_more(broker, advertisements):
    """When that object is deleted, and is older than the record, the store creates another one."""
    await broker.advertise(make.advertisement("lender"))
    advertisements.cache.handle(Listed([], []))
    advertisements.enqueue_missing()
    late = samples.advertisement(labels=samples.MANAGED)
    advertisements.cache.handle(late)
    async with working(advertisements.queue):
        await until(lambda: not vars(advertisements)["_missing"])
        advertisements.cache.handle(Deleted(late))
        await until(lambda: not advertisements.cache.tombstones(late.metadata.name))
    assert "lender" in broker.current()[0].clusters


async def test_undecodable_object_is_reported_once_for_each_error(reservations, recorder):
    odd = UndecodableObject("hub", "mine", "u-1", "nonsense")
    changes: list[Any] = [odd, odd, odd._replace(error="worse"), Listed([], []), odd]
    for change in changes:
        reservations.cache.handle(change)
        await reservations.reconcile("mine")
    messages = [one.message for one in recorder.emitted]
    assert messages == ["Skipped: nonsense", "Skipped: worse", "Skipped: nonsense"]
    about = recorder.emitted[0].involved_object
    assert about.type.kind == "Reservation"
    assert (about.metadata.name, about.metadata.uid) == ("mine", "u-1")


# -- nothing is kept of deleted objects: a broker runs for months


def keys_of(owner):
    """All keys in its dictionaries: they show in memory only."""
    return {key for one in vars(owner).values() if isinstance(one, dict) for key in one}


async def test_drift_is_forgotten_with_its_object(reservations):
    orphan = samples.request_object(labels=samples.MANAGED)
    drift = vars(reservations)["_drift"]
    async with working(reservations.queue):
        reservations.cache.handle(Listed([orphan], []))
        await until(lambda: "mine" in keys_of(drift))
        reservations.cache.handle(Deleted(orphan))
        await until(lambda: not reservations.cache.tombstones("mine"))
    assert keys_of(drift) == set()


async def test_deleted_advertisement_is_withdrawn_and_forgotten(broker, advertisements):
    found = samples.advertisement(name="any-name")
    async with working(advertisements.queue):
        advertisements.cache.handle(Listed([found], []))
        await until(lambda: "lender" in broker.current()[0].clusters)
        await until(lambda: keys_of(advertisements) >= {"lender", found.metadata.uid})
        advertisements.cache.handle(Deleted(found))
        await until(lambda: not advertisements.cache.tombstones("any-name"))
    assert "lender" not in broker.current()[0].clusters
    assert keys_of(advertisements) == set()


# -- leadership that ends between one line and the next


class ExpiringLease:
    leader = "broker-1"
    term = 1

    def __init__(self) -> None:
        self.checks_left = 1_000_000

    @property
    def is_leader(self) -> bool:
        self.checks_left -= 1
        return self.checks_left >= 0

    async def wait_for_leadership(self) -> None: ...

    async def refresh(self) -> None: ...


async def test_reconcilers_survive_the_loss_of_leadership_at_any_moment(client, recorder):
    lease = ExpiringLease()
    rules = BrokerRules(lost_after=timedelta())
    async with brokers.loaded(rules=rules, leadership=lease) as broker:
        advertisements = AdvertisementReconciler(broker, client, "hub", recorder)
        advertisements.enqueue_all()
        lease.checks_left = 1
        advertisements.tick()
        assert lease.checks_left < 0
        with pytest.raises(NotReady):
            broker.current()
        for one in (
            advertisements,
            ReservationReconciler(broker, client, "hub", TERMS, recorder),
        ):
            one.cache.handle(Listed([], []))
            one.enqueue_all()


# -- drift


class Queue:
    def __init__(self) -> None:
        self.delayed: list[Any] = []

    def add_after(self, name: str, delay: timedelta) -> None:
        self.delayed.append((name, delay))


@pytest.fixture
def queue():
    return Queue()


@pytest.fixture
def clock():
    return Seconds(0.0)


@pytest.fixture
def drift(queue, clock):
    return DriftTracker(queue, clock)


def version(number):
    return samples.with_metadata(FOUND, resource_version=str(number))


def test_drift_is_persistent_if_the_object_does_not_change_for_a_while(drift, queue):
    assert not drift.is_persistent(version(7))
    assert queue.delayed == [("mine", DRIFT_GRACE)]
    assert drift.is_persistent(version(7))
    assert not drift.is_persistent(version(8))
    drift.clear(version(8))
    assert not drift.is_persistent(version(8))


def test_drift_of_an_object_that_changes_all_the_time_is_persistent_at_each_deadline(drift, clock):
    persistent = []
    for number in range(24):
        if drift.is_persistent(version(number)):
            persistent.append(clock.now)
        clock.now += DRIFT_GRACE.total_seconds() / 2
    assert persistent == [DRIFT_DEADLINE.total_seconds(), 2 * DRIFT_DEADLINE.total_seconds()]


def test_repairs_of_the_same_drift_are_limited(drift):
    attempts = [drift.may_repair(FOUND, "x") for _ in range(MAX_REPAIRS + 1)]
    assert attempts == [*[True] * MAX_REPAIRS, False]
    assert drift.may_repair(FOUND, "y")


def test_drift_of_a_correct_object_is_a_new_one(drift):
    for _ in range(2 * MAX_REPAIRS):
        assert drift.may_repair(FOUND, "x")
        drift.clear(FOUND)


def test_writes_by_others_after_the_last_repair_are_a_new_drift(drift):
    for number in range(MAX_REPAIRS):
        assert drift.may_repair(version(number), "x")
    for _ in range(2):
        assert not drift.may_repair(version(MAX_REPAIRS), "x")
    assert drift.may_repair(version(MAX_REPAIRS + 1), "x")


# -- due times and revoked clusters

SOON, LATER = make.T0 + make.SECOND, make.T0 + make.MINUTE


def test_next_due_is_the_earliest_time_in_the_future_until_it_is_cleared():
    due = NextDue()
    assert not due.is_due(LATER)
    for at in (LATER, SOON, LATER):
        due.set(at)
    assert [due.is_due(now) for now in (make.T0, SOON, LATER)] == [False, True, True]
    due.clear()
    assert not due.is_due(LATER)
    assert not due.has_passed(None, SOON)
    assert due.has_passed(SOON, SOON)
    assert not due.is_due(LATER)
    assert not due.has_passed(LATER, SOON)
    assert [due.is_due(now) for now in (SOON, LATER)] == [False, True]


def members(status, role=Role.CLUSTER):
    return MemberIndex([Member(role, "a", status, make.T0, reason="stolen")])


def test_only_a_revoked_cluster_is_rejected_with_the_reason():
    with pytest.raises(Revoked, match="cluster a was revoked: stolen"):
        labels.check_not_revoked(members(MembershipStatus.REVOKED), ClusterId("a"))
    for known in (
        MemberIndex(),
        members(MembershipStatus.APPROVED),
        members(MembershipStatus.REVOKED, Role.ADMIN),
    ):
        labels.check_not_revoked(known, ClusterId("a"))
