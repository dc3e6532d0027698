"""Clients that may write labels or status of the objects cannot change what the store knows: signatures."""

import asyncio
from contextlib import closing
from zlib import crc32

import pytest
from msgspec.structs import replace

import kube_broker
import make
from kube_broker import quiet
from kube_stores import Place, stored_state
from kubelend.core.errors import StoreFailed
from kubelend.core.events import Archived
from kubelend.core.lifecycle import Phase, Reason
from kubelend.core.models import ClusterId
from kubelend.kube import config, resources
from kubelend.kube.client import Client
from kubelend.stores.kubernetes import head as kubernetes_head
from kubelend.stores.kubernetes import objects
from kubelend.stores.kubernetes.objects import (
    HEAD_NAME,
    LEDGER_RECORDS,
    STORED_ADVERTISEMENTS,
)
from kubelend.stores.kubernetes.store import KubernetesStore
from kubelend.wire import broker_objects
from kubelend.wire.broker_objects import RESERVATION_FINALIZER, ClusterAdvertisement, Reservation

pytestmark = [pytest.mark.timeout(120), pytest.mark.kube, pytest.mark.broker("objects")]

WHOLE = resources.resource_for(broker_objects.Reservation)
HELD = make.reservation("rsv-1", phase=Phase.RESERVED, target=ClusterId("a"), reserved_at=make.T0)
ACTIVE = replace(HELD, phase=Phase.ACTIVE, activated_at=make.T0)
OVER = replace(HELD, id="rsv-2", phase=Phase.RELEASED, reason=Reason.EXPIRED, finished_at=make.T0)
LATE = replace(OVER, id="rsv-3", finished_at=make.T0 + 31 * 24 * make.HOUR)
ARCHIVED, FINISHED = "broker.fluidos.eu/archived", "broker.fluidos.eu/finished"
HIDDEN = {"labels": {ARCHIVED: "true", FINISHED: "2020-01-01T00"}}


@pytest.fixture
def place(kube):
    """With a live reservation, a finished one, and one in the archive."""
    place = Place(kube)
    with closing(place.open()) as store:
        store.commit([make.cluster("a"), HELD, replace(OVER, id="rsv-4")], 1)
        store.commit([OVER, Archived(OVER.id)], 2)
    return place


def held(store):
    with closing(store):
        return [found for found in store.load().reservations if found.is_live]


def test_archive_label_does_not_hide_a_live_reservation(place):
    place.edit(WHOLE, "rsv-1", {"metadata": {**HIDDEN, "finalizers": None}})
    assert held(place.open_readonly()) == [HELD]
    assert place.find(WHOLE, "rsv-1").metadata.labels[ARCHIVED] == "true"
    assert held(place.open()) == [HELD]
    found = place.find(WHOLE, "rsv-1").metadata
    assert found.labels.keys() == {"broker.fluidos.eu/managed-by"}
    assert found.finalizers == (RESERVATION_FINALIZER,)


def test_archive_label_does_not_hide_a_reservation_from_a_store_that_was_never_loaded(place):
    with closing(place.open()) as store:
        store.commit([make.cluster("b")], 3)
    place.edit(WHOLE, "rsv-1", {"metadata": HIDDEN})
    assert held(place.open()) == [HELD]


def test_archive_label_does_not_hide_the_last_commit(place):
    with closing(place.open()) as store:
        store.load()
        store.commit([ACTIVE], 3)
    place.edit(WHOLE, "rsv-1", {"metadata": HIDDEN})
    assert held(place.open()) == [ACTIVE]
    assert ARCHIVED not in place.find(WHOLE, "rsv-1").metadata.labels


def test_hidden_reservation_can_be_released_and_archived(place):
    place.edit(WHOLE, "rsv-1", {"metadata": HIDDEN})
    over = replace(OVER, id=HELD.id)
    with closing(place.open()) as store:
        store.load()
        store.commit([over], 3)
        store.commit([Archived(over.id)], 4)
    records, *_ = stored_state(place.open(), [])
    assert [*records[1]] == ["rsv-4"]


def test_deleted_reservation_restores_nothing_from_the_archive(place):
    place.delete(WHOLE, "rsv-1", force=True)
    records, _, archived, *_ = stored_state(place.open(), ["rsv-2"])
    assert [*records[1]] == ["rsv-4"]
    assert archived == {"rsv-2": OVER}


def test_archive_is_swept_by_records_and_not_by_labels(place):
    with closing(place.open()) as store:
        store.load()
        place.edit(WHOLE, "rsv-1", {"metadata": HIDDEN | {"finalizers": None}})
        hour = {"labels": {ARCHIVED: "true", FINISHED: f"{make.T0:%Y-%m-%dT%H}"}}
        place.edit(WHOLE, "rsv-1", {"metadata": hour})
        store.commit([LATE, Archived(LATE.id)], 3)
        assert place.find(WHOLE, "rsv-2") is None
        assert place.find(WHOLE, "rsv-1").status.phase == "Reserved"
    assert held(place.open()) == [HELD]


def forged(stored):
    """A copy that takes less, with the digest that anybody can compute."""
    data = stored.data.replace('"cpu":', '"cpu":1,"was":')
    assert data != stored.data
    checksum = f"{crc32(data.encode(), crc32(b'rsv-1')):08x}"
    return {"revision": stored.revision, "checksum": checksum, "data": data}


def test_forged_record_is_rejected_at_the_start(place):
    record = forged(place.find(WHOLE, "rsv-1").status.record)
    place.edit(WHOLE, "rsv-1", {"status": {"record": record}}, "status")
    for opener in (place.open_readonly, place.open):
        refused = pytest.raises(StoreFailed, match=r"Reservation rsv-1: .*not written by .*backup")
        with closing(opener()) as store, refused:
            store.load()


def test_forged_record_is_overwritten_while_a_broker_runs(place):
    with closing(place.open()) as store:
        store.load()
        record = forged(place.find(WHOLE, "rsv-1").status.record)
        place.edit(WHOLE, "rsv-1", {"status": {"record": record}}, "status")
        store.commit([ACTIVE], 3)
        assert place.find(WHOLE, "rsv-1").status.phase == "Active"
    assert held(place.open()) == [ACTIVE]


def test_forged_and_hidden_record_is_rejected(place):
    stored = place.find(WHOLE, "rsv-1").status.record
    over = stored.data.replace('"phase":"Reserved"', '"phase":"Released"')
    place.edit(WHOLE, "rsv-1", {"status": {"record": forged(stored) | {"data": over}}}, "status")
    place.edit(WHOLE, "rsv-1", {"metadata": HIDDEN})
    with closing(place.open()) as store, pytest.raises(StoreFailed, match="Reservation rsv-1"):
        store.load()


def test_stores_have_keys_of_their_own(kube, place):
    other = Place(kube)
    with closing(other.open()) as store:
        store.commit([HELD], 1)
    one, two = (each.find(WHOLE, "rsv-1").status.record for each in (place, other))
    assert one.data == two.data
    assert one.checksum != two.checksum


# -- repair by the leader


@pytest.fixture
async def broker(broker):
    await broker.advertise("lender")
    await broker.reserve("mine")
    await broker.reserved("mine")
    return broker


@pytest.mark.parametrize(
    "kind, record, name, change",
    [
        pytest.param(Reservation, "reservation", "mine", {"checksum": "7"}, id="checksum"),
        pytest.param(
            ClusterAdvertisement, "cluster", "lender-adv", {"revision": 10**6}, id="revision"
        ),
    ],
)
async def test_corrupt_signature_is_repaired_once(kube, broker, kind, record, name, change):
    await quiet(broker)
    before = (await broker.find(kind, name)).status.record
    writes = await broker.writes()
    await broker.edit(kind, name, {"status": {"record": change}}, "status")
    key = await signature_key(broker.client, broker.namespace)
    repaired = await broker.shows(
        kind, name, lambda found: objects.verify(key, record, name, found.status.record)
    )
    assert repaired.status.record.data == before.data
    await quiet(broker)
    # The edit, the commit, and the object at the second attempt, because it was edited.
    assert await broker.writes() == writes + 4
    await asyncio.to_thread(check_that_another_can_start, kube, broker.namespace)


async def test_signatures_of_a_new_store_are_verified_with_its_own_key(kube, namespace):
    """By a verifier that has the key of another one."""
    from kubelend.controllers.reconciler import RecordVerifier

    async with Client.open(config.config_from_kubeconfig(kube.admin_kubeconfig)) as client:
        verifier = RecordVerifier(client, namespace)
        for _ in range(2):
            async with kube_broker.running(kube, namespace) as broker:
                await broker.advertise("lender")
                found = await broker.shows(
                    ClusterAdvertisement, "lender-adv", lambda one: one.status.record is not None
                )
                assert await verifier.verified(found) is found
            await client.delete(STORED_ADVERTISEMENTS, "lender-adv", namespace)
            await client.delete(LEDGER_RECORDS, HEAD_NAME, namespace)


async def signature_key(client: Client, namespace: str) -> str:
    head = await client.find(LEDGER_RECORDS, HEAD_NAME, namespace)
    assert head is not None
    return kubernetes_head.state_from_object(head).key


def check_that_another_can_start(cluster, namespace):
    found = config.config_from_kubeconfig(cluster.admin_kubeconfig)
    with closing(KubernetesStore.open_readonly(found, namespace)) as store:
        assert len(store.load().reservations) == 1
