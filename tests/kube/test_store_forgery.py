"""Whoever may write the labels or the status of reservations cannot change what the store knows."""

from contextlib import closing
from hashlib import sha256
from zlib import crc32

import pytest
from msgspec.structs import replace

import make
from kube_stores import Place, told
from kubelend.core.errors import StoreFailed
from kubelend.core.events import Archived
from kubelend.core.lifecycle import Phase, Reason
from kubelend.core.models import ClusterId
from kubelend.kube import resources
from kubelend.wire import broker_objects
from kubelend.wire.broker_objects import RESERVATION_FINALIZER

WHOLE = resources.resource_for(broker_objects.Reservation)
HELD = make.reservation("rsv-1", phase=Phase.RESERVED, target=ClusterId("a"), reserved_at=make.T0)
ACTIVE = replace(HELD, phase=Phase.ACTIVE, activated_at=make.T0)
OVER = replace(HELD, id="rsv-2", phase=Phase.RELEASED, reason=Reason.EXPIRED, finished_at=make.T0)
LATE = replace(OVER, id="rsv-3", finished_at=make.T0 + 31 * 24 * make.HOUR)
ARCHIVED, FINISHED = "broker.fluidos.eu/archived", "broker.fluidos.eu/finished"
HIDDEN = {"labels": {ARCHIVED: "true", FINISHED: "2020-01-01T00"}}


@pytest.fixture
def place(kube):
    """With a lock, one that is over, and one in the archive."""
    place = Place(kube)
    with closing(place.open()) as store:
        store.commit([make.cluster("a"), HELD, replace(OVER, id="rsv-4")], 1)
        store.commit([OVER, Archived(OVER.id)], 2)
    return place


def edit(place, name, change, subresource=""):
    return place.run(
        lambda client: client.patch(WHOLE, name, place.namespace, change, subresource=subresource)
    )


def find(place, name):
    return place.run(lambda client: client.find(WHOLE, name, place.namespace))


def held(store):
    with closing(store):
        return [found for found in store.load().reservations if found.is_live]


def test_label_of_the_archive_does_not_hide_a_lock(place):
    edit(place, "rsv-1", {"metadata": {**HIDDEN, "finalizers": None}})
    assert held(place.look()) == [HELD]
    assert find(place, "rsv-1").metadata.labels[ARCHIVED] == "true"
    assert held(place.open()) == [HELD]
    found = find(place, "rsv-1").metadata
    assert found.labels.keys() == {"broker.fluidos.eu/managed-by"}
    assert found.finalizers == (RESERVATION_FINALIZER,)


def test_label_does_not_hide_a_lock_from_a_store_that_was_never_loaded(place):
    with closing(place.open()) as store:
        store.commit([make.cluster("b")], 3)
    edit(place, "rsv-1", {"metadata": HIDDEN})
    assert held(place.open()) == [HELD]


def test_label_does_not_hide_what_the_last_commit_changed(place):
    with closing(place.open()) as store:
        store.load()
        store.commit([ACTIVE], 3)
    edit(place, "rsv-1", {"metadata": HIDDEN})
    assert held(place.open()) == [ACTIVE]
    assert ARCHIVED not in find(place, "rsv-1").metadata.labels


def test_hidden_lock_can_be_released_and_archived(place):
    edit(place, "rsv-1", {"metadata": HIDDEN})
    over = replace(OVER, id=HELD.id)
    with closing(place.open()) as store:
        store.load()
        store.commit([over], 3)
        store.commit([Archived(over.id)], 4)
    records, *_ = told(place.open(), [])
    assert [*records[1]] == ["rsv-4"]


def test_lock_that_is_gone_brings_nothing_back_from_the_archive(place):
    edit(place, "rsv-1", {"metadata": {"finalizers": None}})
    place.run(lambda client: client.delete(WHOLE, "rsv-1", place.namespace))
    records, _, archived, *_ = told(place.open(), ["rsv-2"])
    assert [*records[1]] == ["rsv-4"]
    assert archived == {"rsv-2": OVER}


def test_old_things_are_deleted_from_the_archive_by_their_records_and_not_by_labels(place):
    with closing(place.open()) as store:
        store.load()
        edit(place, "rsv-1", {"metadata": HIDDEN | {"finalizers": None}})
        hour = {"labels": {ARCHIVED: "true", FINISHED: f"{make.T0:%Y-%m-%dT%H}"}}
        edit(place, "rsv-1", {"metadata": hour})
        store.commit([LATE, Archived(LATE.id)], 3)
        assert find(place, "rsv-2") is None
        assert find(place, "rsv-1").status.phase == "Reserved"
    assert held(place.open()) == [HELD]


def forged(kept, **fields):
    """A copy that takes less, or whatever else is said."""
    less = kept.data.replace('"cpu":', '"cpu":1,"was":')
    assert less != kept.data
    return {"revision": kept.revision, "checksum": kept.checksum, "data": less} | fields


FORGERIES = [
    pytest.param(forged, id="old checksum"),
    pytest.param(
        lambda kept: forged(
            kept, checksum=f"{crc32(forged(kept)['data'].encode(), crc32(b'rsv-1')):08x}"
        ),
        id="without a key",
    ),
    pytest.param(
        lambda kept: forged(kept, checksum=sha256(kept.data.encode()).hexdigest()[:32]),
        id="a digest",
    ),
    pytest.param(lambda kept: forged(kept, data=kept.data, revision=10**6), id="a revision"),
    pytest.param(lambda kept: forged(kept, data=kept.data, checksum=""), id="no checksum"),
]


@pytest.mark.parametrize("forge", FORGERIES)
def test_forged_record_is_refused_when_a_broker_starts(place, forge):
    kept = find(place, "rsv-1").status.record
    edit(place, "rsv-1", {"status": {"record": forge(kept)}}, "status")
    for opener in (place.look, place.open):
        refused = pytest.raises(StoreFailed, match=r"Reservation rsv-1: .*not written by .*backup")
        with closing(opener()) as store, refused:
            store.load()


@pytest.mark.parametrize("forge", FORGERIES)
def test_forged_record_is_written_over_while_a_broker_runs(place, forge):
    with closing(place.open()) as store:
        store.load()
        kept = find(place, "rsv-1").status.record
        edit(place, "rsv-1", {"status": {"record": forge(kept)}}, "status")
        store.commit([ACTIVE], 3)
        assert find(place, "rsv-1").status.phase == "Active"
    assert held(place.open()) == [ACTIVE]


def test_forged_record_that_is_hidden_too_is_refused(place):
    kept = find(place, "rsv-1").status.record
    over = kept.data.replace('"phase":"Reserved"', '"phase":"Released"')
    edit(place, "rsv-1", {"status": {"record": forged(kept, data=over)}}, "status")
    edit(place, "rsv-1", {"metadata": HIDDEN})
    with closing(place.open()) as store, pytest.raises(StoreFailed, match="Reservation rsv-1"):
        store.load()


def test_stores_have_keys_of_their_own(kube, place):
    other = Place(kube)
    with closing(other.open()) as store:
        store.commit([HELD], 1)
    kept = find(other, "rsv-1").status.record
    assert kept.data == find(place, "rsv-1").status.record.data
    assert kept.checksum != find(place, "rsv-1").status.record.checksum
