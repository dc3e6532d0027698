"""What controllers write beside the store, while another broker may have written to that: then nothing."""

import msgspec
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

import broker_samples as samples
import brokers
import make
import scripted_api
from kubelend.controllers.advertisements import AdvertisementReconciler
from kubelend.controllers.events import EventRecorder
from kubelend.controllers.reservations import ReservationReconciler
from kubelend.core.errors import StoreFailed
from kubelend.kube.client import Client
from kubelend.kube.informer import Deleted, Listed
from kubelend.wire.broker_objects import RESERVATION_FINALIZER, ReservationStatus, StoredRecord
from kubelend.wire.conversion import RequestLimits
from root_tasks import working
from waiting import until

TERMS = RequestLimits(make.HOUR, make.HOUR, make.HOUR)
LONG_AGO = make.T0 - 2 * make.HOUR


@pytest.fixture
async def broker(store):
    async with brokers.loaded(store=store) as broker:
        yield broker
        store.broken = None


class Server:
    """Has one object, or none, and remembers who would write it."""

    def __init__(self):
        self.found = None
        self.writes = []

    async def answer(self, request):
        is_asked_for = self.found and request.path.endswith(f"/{self.found.metadata.name}")
        if request.method != "GET":
            self.writes.append(request.method)
        elif not is_asked_for:
            return scripted_api.status(404, reason="NotFound", name=request.path.split("/")[-1])
        return scripted_api.found(msgspec.to_builtins(self.found))


@pytest.fixture
def server():
    return Server()


@pytest.fixture
async def client(certificates, server):
    async with scripted_api.running(certificates.server()) as scripted:
        scripted.answers.extend([server.answer] * 50)
        async with Client.open(scripted.access()) as client:
            yield client


def leaving():
    found = samples.wish()
    known = replace(
        found.metadata, deletion_timestamp=make.T0, finalizers=(RESERVATION_FINALIZER, "other/one")
    )
    return replace(found, metadata=known)


def refused():
    return replace(samples.wish(), status=ReservationStatus(phase="Failed", finished_at=LONG_AGO))


def claiming():
    status = ReservationStatus(phase="Reserved", record=StoredRecord(3, "", "{}"))
    return replace(samples.wish(), status=status)


UNKNOWN = [
    pytest.param(lambda: samples.wish(labels=samples.OWN), "DELETE", id="orphan"),
    pytest.param(claiming, "PATCH", id="claims a record"),
    pytest.param(samples.wish, "PATCH", id="to be refused"),
    pytest.param(refused, "DELETE", id="refused long ago"),
    pytest.param(leaving, "PATCH", id="leaving"),
]


@pytest.mark.parametrize("make_object, write", UNKNOWN)
async def test_reservation_that_the_ledger_does_not_know_is_dealt_with(
    broker, client, server, make_object, write
):
    server.found = make_object()
    kept = ReservationReconciler(broker, client, "hub", TERMS, EventRecorder(client, broker.clock))
    async with working(kept.queue):
        kept.cache.handle(Listed([server.found], []))
        await until(lambda: server.writes == [write])


@pytest.mark.parametrize("make_object, write", UNKNOWN)
async def test_reservation_is_left_alone_if_another_broker_has_written(
    broker, store, client, server, make_object, write
):
    store.broken = StoreFailed("another broker has written to the store since")
    server.found = make_object()
    kept = ReservationReconciler(broker, client, "hub", TERMS, EventRecorder(client, broker.clock))
    with capture_logs() as logs:
        async with working(kept.queue):
            kept.cache.handle(Listed([server.found], []))
            await until(lambda: any(one["event"] == "Reconcile failed, will retry" for one in logs))
    assert server.writes == []


async def test_advertisement_is_left_alone_if_another_broker_has_written(
    broker, store, client, server
):
    store.broken = StoreFailed("another broker has written to the store since")
    server.found = samples.advertisement(labels=samples.OWN)
    kept = AdvertisementReconciler(broker, client, "hub", EventRecorder(client, broker.clock))
    with capture_logs() as logs:
        async with working(kept.queue):
            kept.cache.handle(Listed([server.found], []))
            await until(lambda: any(one["event"] == "Reconcile failed, will retry" for one in logs))
            assert server.writes == []
            store.broken = None
            await until(lambda: server.writes == ["DELETE"])


async def test_cluster_whose_object_came_late_is_not_missing_any_more(broker, client):
    """When that one goes, and says less than was heard since, the store makes another."""
    await broker.advertise(make.advertisement("lender"))
    kept = AdvertisementReconciler(broker, client, "hub", EventRecorder(client, broker.clock))
    kept.cache.handle(Listed([], []))
    kept.enqueue_missing()
    late = samples.advertisement(labels=samples.OWN)
    kept.cache.handle(late)
    async with working(kept.queue):
        await until(lambda: not vars(kept)["_missing"])
        kept.cache.handle(Deleted(late))
        await until(lambda: not kept.cache.tombstones(late.metadata.name))
    assert "lender" in broker.current()[0].clusters
