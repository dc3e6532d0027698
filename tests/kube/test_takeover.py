"""Objects of the published Go broker, taken over by ours when it first starts on them."""

import asyncio
import contextlib
from contextlib import closing
from datetime import timedelta

import msgspec
import pytest

import brokers
from clocks import RunningClock
from kube_stores import Interruption, connecting
from kubelend.cli import main as cli
from kubelend.core.audit_log import decode_line
from kubelend.core.durations import MAX_DURATION
from kubelend.core.errors import StoreFailed
from kubelend.core.lifecycle import Reason
from kubelend.core.models import ClusterId
from kubelend.kits import clock
from kubelend.stores import factory
from kubelend.stores.kubernetes.objects import LEDGER_RECORDS
from kubelend.stores.kubernetes.store import KubernetesStore
from kubelend.wire.broker_objects import RESERVATION_FINALIZER
from published_objects import ADVERTISEMENTS, HOUR, RESERVATIONS, PublishedObjects
from waiting import until

pytestmark = pytest.mark.timeout(120)

BOTH = pytest.mark.parametrize("interface", ["http", "http,kubernetes"])
PARIS = ClusterId("paris")


@pytest.fixture
def published(place):
    return PublishedObjects(place)


@pytest.fixture
def serving(place, certificates):
    """Listening, perhaps before it is ready."""

    def serving(interface):
        return brokers.listening(
            certificates,
            open_store=lambda: KubernetesStore.open(place.access, place.namespace),
            clock=RunningClock(),
            broker_interface=interface,
            store=place.url,
            http_namespace=place.namespace,
        )

    return serving


@pytest.fixture
def broker(place, serving):
    """Ready; at the end its store passes the audit."""

    @contextlib.asynccontextmanager
    async def broker(interface="http"):
        async with serving(interface) as running:
            await until(lambda: running.service.unready is None)
            yield running
            await running.service.wait_durable()
        _, violations, _ = await asyncio.to_thread(factory.audit_store, place.url)
        assert violations == []

    return broker


def ledger(running):
    return running.service.current()[0]


@BOTH
async def test_live_reservations_hold_what_they_held(published, broker, interface):
    """Also beyond our longest duration, and whatever the Go broker's counter says."""
    published.advertise("paris", counted="99")
    published.reserve("rsv-rome-1", ago=HOUR / 2)
    published.reserve("rsv-rome-2", phase="Active", duration="8760h", ago=HOUR)
    async with broker(interface) as running:
        found = ledger(running)
        first, second = (found.reservations[f"rsv-rome-{number}"] for number in (1, 2))
        assert (first.phase, first.target, first.requester) == ("Reserved", "paris", "rome")
        assert (first.reserved_at, first.expires_at) == (
            published.now - HOUR / 2,
            published.now + HOUR / 2,
        )
        assert (second.phase, second.expires_at) == ("Active", published.now + 8759 * HOUR)
        assert found.reserved(PARIS).quantities()["cpu"] == "6"
        assert found.available(PARIS).quantities()["cpu"] == "3"
        answer = await running.cluster("milan").post("reservations", request("4"))
        assert answer.status == 409
        shown = published.find(RESERVATIONS, "rsv-rome-2")
        assert (shown.status.phase, shown.spec.duration) == ("Active", "8760h")
        await until(lambda: published.find(RESERVATIONS, "rsv-rome-2").status.record is not None)
        await running.service.release("rsv-rome-2", "ReleasedByRequester")
        assert (await running.cluster("milan").post("reservations", request("4"))).status == 201


def request(cpu):
    return {"requestedResources": {"cpu": cpu, "memory": "1Gi"}, "duration": "1h"}


@BOTH
async def test_only_what_was_held_is_held(published, broker, interface):
    """Ended ones stay so, one that expired meanwhile ends, and what nobody has decided is a new request."""
    published.advertise("paris")
    published.reserve("over", phase="Released", ago=HOUR / 2)
    published.reserve("rejected", phase="Failed", duration="")
    published.reserve("expired", ago=2 * HOUR)
    published.reserve("new", target="", phase="")
    async with broker(interface) as running:
        found = ledger(running).reservations
        assert (found["over"].phase, found["over"].reason) == ("Released", "ReleasedByRequester")
        await until(lambda: found["expired"].phase == "Released")
        assert "rejected" not in found
        if interface == "http":
            assert ledger(running).reserved(PARIS).quantities()["cpu"] == "0"
            assert "new" not in found
        else:
            await until(lambda: "new" in found)
            assert ledger(running).reserved(PARIS).quantities()["cpu"] == "3"
        assert published.find(RESERVATIONS, "rejected").status.phase == "Failed"


async def test_permanent_lock_stays_for_the_longest_time_that_go_knows(published, broker):
    published.reserve("for-ever", duration="", requester="")
    async with broker() as running:
        [found] = ledger(running).reservations.values()
        assert found.expires_at == published.now + MAX_DURATION
        assert found.requester == published.place.namespace
        answer = await running.cluster("paris").get("instructions")
        assert [one["id"] for one in answer.json] == ["for-ever"]


async def test_provider_counts_what_it_lent_when_it_advertises(published, broker):
    """Also more than it has: the Go broker may have locked one reservation twice."""
    for number in range(4):
        published.reserve(f"rsv-rome-{number}")
    async with broker() as running:
        await running.cluster("paris").advertise(cpu="10", memory="64Gi")
        assert ledger(running).reserved(PARIS).quantities()["cpu"] == "12"
        assert (await running.cluster("milan").post("reservations", request("1"))).status == 409


async def test_newest_of_two_advertisements_counts_until_it_is_stale(published, broker):
    published.advertise("paris", cpu="8", ago=HOUR / 60)
    published.advertise("paris", cpu="10", ago=HOUR, name="another")
    published.advertise("milan", ago=HOUR)
    async with broker() as running:
        found = ledger(running).clusters
        assert found["paris"].advertisement.capacity.quantities()["cpu"] == "8"
        assert found["paris"].valid_until == published.now - HOUR / 60 + HOUR / 6
        assert found["milan"].is_stale(published.now)


async def test_take_over_is_in_the_audit_log_and_happens_once(published, broker):
    published.advertise("paris")
    published.reserve("rsv-rome-1")
    async with broker() as running:
        pass
    published.reserve("later")  # as nobody but the Go broker writes it, beside ours
    async with broker() as running:
        assert set(ledger(running).reservations) == {"rsv-rome-1"}
        lines = await running.service.query_store(lambda store: store.audit_lines(0, 100))
        actions = [(line.action, line.subject) for line in map(decode_line, lines)]
        assert actions.count(("TakenOver", "reservation/rsv-rome-1")) == 1
        assert ("TakenOver", "reservation/later") not in actions


async def test_deleting_a_reservation_that_was_taken_over_releases_it(published, broker):
    published.advertise("paris")
    published.reserve("kept")
    published.reserve("rsv-rome-1")
    published.reserve("deleted-before")
    published.run(
        lambda client: client.delete(RESERVATIONS, "deleted-before", published.place.namespace)
    )
    async with broker("http,kubernetes") as running:
        assert set(ledger(running).reservations) == {"kept", "rsv-rome-1"}
        published.run(
            lambda client: client.delete(RESERVATIONS, "rsv-rome-1", published.place.namespace)
        )
        await until(lambda: ledger(running).reserved(PARIS).quantities()["cpu"] == "3")
        await until(lambda: published.find(RESERVATIONS, "rsv-rome-1") is None)
        await until(lambda: published.find(RESERVATIONS, "deleted-before") is None)


@pytest.mark.parametrize(
    "spec, why",
    [
        ({"targetClusterID": ""}, "without a target cluster"),
        ({"requesterID": "paris"}, "its requester and its provider"),
    ],
)
def test_what_cannot_be_taken_over_stops_the_start(published, place, spec, why):
    """With the name and the way out; nothing was written, so the Go broker can go on."""
    published.reserve("good")
    body = {"requestedResources": {"cpu": "3", "memory": "1Gi"}, "targetClusterID": "paris"}
    body |= {"requesterID": "rome"} | spec
    published.apply(RESERVATIONS, "odd", {"spec": body, "status": {"phase": "Reserved"}})
    with closing(place.open()) as store, pytest.raises(StoreFailed) as caught:
        store.load()
    assert "Reservation odd of another broker cannot be taken over" in str(caught.value)
    assert why in str(caught.value)
    assert "delete it" in caught.value.hint
    assert published.find(RESERVATIONS, "good").status.record is None


async def test_broker_starts_as_soon_as_the_object_is_corrected(published, serving):
    published.reserve("odd", target="")
    async with serving("http") as running:
        await until(lambda: "odd of another broker" in (running.service.unready or ""))
        published.edit(RESERVATIONS, "odd", {"spec": {"targetClusterID": "paris"}})
        await until(lambda: running.service.unready is None)
        assert ledger(running).reservations["odd"].target == "paris"


@pytest.mark.parametrize("is_sent", [True, False])
@pytest.mark.parametrize("writes", [1, 3, 5, 7])
def test_interrupted_take_over_is_finished_by_the_next_start(published, place, writes, is_sent):
    """Or starts again, if it was interrupted before its commit."""
    published.reserve("rsv-rome-1")
    published.reserve("rsv-rome-2")
    cut = Interruption(is_sent=is_sent)
    cut.left = writes
    with contextlib.suppress(StoreFailed), closing(place.open(connecting(cut.around))) as store:
        commit_left(store)
    with closing(place.open()) as store:
        left = store.load()
        if left.left.reservations:
            commit_left(store)
        assert {one.id for one in store.load().reservations} == {"rsv-rome-1", "rsv-rome-2"}
    for name in ("rsv-rome-1", "rsv-rome-2"):
        assert published.find(RESERVATIONS, name).status.record is not None


def commit_left(store):
    left = store.load().left
    store.commit(list(left.reservations), len(left.reservations))


def test_of_two_brokers_one_takes_over(published, place):
    published.reserve("rsv-rome-1")
    with closing(place.open()) as first:
        old = first.load().left
        with closing(place.open()) as second:
            commit_left(second)
            assert not any(second.load().left)
        with pytest.raises(StoreFailed, match="another broker"):
            first.commit(list(old.reservations), 1)


# -- the way back

GO_STATUS = {
    RESERVATIONS: {"phase", "message", "reservedAt", "expiresAt", "lastUpdateTime", "conditions"},
    ADVERTISEMENTS: {"phase", "message", "lastUpdateTime", "active", "score", "conditions"},
}


@pytest.fixture
def migrate_back(place):
    return lambda: cli.run(["migrate-back", "--yes", "--store", place.url])


async def serve(published, broker):
    """What our broker has taken over, what it has added, and what has ended; then it is stopped."""
    published.advertise("paris")
    published.reserve("rsv-rome-1", cpu="3")
    published.reserve("for-ever", cpu="1", duration="")
    async with broker("http,kubernetes") as running:
        await running.cluster("berlin").advertise(cpu="4", memory="8Gi")
        milan = running.cluster("milan")
        active, over = [(await milan.post("reservations", request(n))).json["id"] for n in "21"]
        await running.service.activate(active)
        await running.service.release(over, Reason.BY_REQUESTER)
        return live(running), over


def live(running):
    return {
        one.id: (one.phase, one.target, one.requester, one.request.resources, one.expires_at)
        for one in ledger(running).reservations.values()
        if one.is_live
    }


async def test_way_back_leaves_objects_as_the_go_broker_writes_them(
    published, broker, place, migrate_back
):
    """It counts on from them, and a second take-over finds the same reservations."""
    before, over = await serve(published, broker)
    assert len(before) == 3
    assert await asyncio.to_thread(migrate_back) == 0
    assert await asyncio.to_thread(migrate_back) == 0  # as after an interruption
    sums = {}
    for kind, names in GO_STATUS.items():
        for found in published.list(kind):
            assert not {one for one in found["metadata"].get("labels", {}) if "fluidos" in one}
            assert found["status"].keys() <= names | {"targetClusterID"}
            if kind is RESERVATIONS:
                is_held = RESERVATION_FINALIZER in found["metadata"].get("finalizers", ())
                assert is_held == (found["metadata"]["name"] != over)
            else:
                amounts = found["spec"]["resources"]
                sums[found["spec"]["clusterID"]] = amounts["reserved"]["cpu"]
    assert sums == {"paris": "4", "berlin": "2"}
    assert "expiresAt" not in msgspec.to_builtins(published.find(RESERVATIONS, "for-ever").status)
    assert published.list(LEDGER_RECORDS) == []
    async with broker() as running:
        assert live(running) == before


async def test_way_back_waits_for_the_broker_to_stop(published, serving, place):
    published.reserve("rsv-rome-1")
    soon = timedelta(seconds=1)
    async with serving("http") as running:
        await until(lambda: running.service.unready is None)
        with pytest.raises(StoreFailed, match="still leads; stop all brokers first"):
            await asyncio.to_thread(
                KubernetesStore.leave, place.access, place.namespace, clock.utc_now, soon
            )
        await running.service.release("rsv-rome-1", Reason.BY_REQUESTER)


def test_neither_broker_starts_on_a_way_back_that_was_interrupted(published, place, migrate_back):
    published.reserve("rsv-rome-1")
    with closing(place.open()) as store:
        commit_left(store)
    place.delete(LEDGER_RECORDS, "head")
    with pytest.raises(StoreFailed, match="head is missing"):
        place.open()
    assert migrate_back() == 0
    with closing(place.open()) as store:
        assert [one.id for one in store.load().left.reservations] == ["rsv-rome-1"]
