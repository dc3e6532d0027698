"""What objects say of records, and back."""

from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

import make
from kubelend.core.lifecycle import Phase
from kubelend.core.models import ClusterId
from kubelend.stores import batch
from kubelend.stores.batch import CorruptRecord
from kubelend.stores.kubernetes import objects, projection
from kubelend.stores.kubernetes.objects import StoredObject, StoredStatus
from kubelend.wire.objects import Metadata

CLUSTER = make.cluster(
    "berlin",
    "cpu=4,memory=8Gi,gpu=1",
    allocated="cpu=1500m",
    labels={"tier": "gold"},
    valid_for=timedelta(seconds=90),
    cordon="maintenance",
)
RESERVATION = make.reservation(
    "rsv-1",
    make.request(
        "cpu=500m,memory=1Gi", "paris", wait=make.MINUTE, max_price="0.5", excluded=("x",)
    ),
    phase=Phase.RESERVED,
    target=ClusterId("berlin"),
    reserved_at=make.T0,
)


@pytest.mark.parametrize(
    "kind, id, name",
    [
        ("cluster", "berlin", "berlin-adv"),
        ("reservation", "rsv-paris-1", "rsv-paris-1"),
        ("token", "abc", "token-abc"),
        ("limits", "a.b", "limits-a.b"),
    ],
)
def test_dns_names_stay_what_they_are(kind, id, name):
    assert objects.record_object_name(kind, id) == name


def test_other_names_are_hashed_and_never_meet():
    ids = ["", "A", "a_b", "a/b", "-a", "a-", "a..b", "é", "a" * 241, "\ud800", "a\n"]
    ids.append(objects.record_object_name("reservation", "A"))
    names = {objects.record_object_name("reservation", found) for found in ids}
    assert len(names) == len(ids)
    assert all(name.startswith("hashed-") and len(name) < 60 for name in names)


def test_specs_say_what_was_offered_and_asked():
    offered: Any = projection.cluster_spec(CLUSTER)
    assert offered["clusterID"] == "berlin"
    assert offered["resources"]["capacity"] == {"cpu": "4", "memory": "8Gi", "gpu": "1"}
    assert (offered["labels"], offered["validFor"]) == ({"tier": "gold"}, "1m30s")
    asked = projection.reservation_spec(RESERVATION)
    assert asked["requestedResources"] == {"cpu": "500m", "memory": "1Gi"}
    assert (asked["requesterID"], asked["targetClusterID"]) == ("paris", "berlin")
    assert asked["constraints"] == {"exclude": ["x"], "maxPricePerHour": "0.5"}
    assert asked["wait"] == "1m0s"


def test_status_takes_away_what_is_no_longer_so_and_leaves_conditions_alone():
    status = projection.reservation_status(RESERVATION)
    assert (status["phase"], status["reservedAt"]) == ("Reserved", "2026-01-01T12:00:00Z")
    assert status["finishedAt"] is None
    assert "conditions" not in status
    cluster = projection.cluster_status(CLUSTER)
    assert (cluster["active"], cluster["cordonReason"]) == (False, "maintenance")
    assert not cluster.keys() & {"conditions", "score", "reservations"}


def test_plain_form_has_what_the_definitions_require_and_no_more():
    spec: Any
    spec, status, _ = projection.minimal(projection.project(CLUSTER))
    assert spec.keys() == {"clusterID", "resources"}
    assert spec["resources"].keys() == {"capacity", "allocated", "available"}
    assert status == {"phase": "Active"}
    asked = projection.minimal(projection.project(RESERVATION)).spec
    assert asked.keys() == {"requestedResources", "requesterID", "targetClusterID"}


KEY = "ab" * 32


def stored(found, name="rsv-1", text=None, **edited):
    _, _, encoded = batch.encode_record(found)
    words = encoded if text is None else text
    kept = projection.stored_record(KEY, "reservation", found.id, words, 3)
    return StoredObject(Metadata(name), {}, StoredStatus(replace(kept, **edited)))


LESS = batch.encode_record(RESERVATION)[2].decode().replace('"cpu":500', '"cpu":100')


def test_record_is_read_from_what_an_object_keeps():
    assert projection.verified_record("reservation", stored(RESERVATION), KEY) == RESERVATION


@pytest.mark.parametrize(
    "found, why",
    [
        (stored(RESERVATION, "rsv-2"), "record of another object"),
        (stored(RESERVATION, text=b"{}"), "cannot be decoded"),
        (stored(make.reservation("rsv-2")), "another"),
        (StoredObject(Metadata("rsv-1")), "no record"),
        (stored(RESERVATION, revision=4), "not written by the broker"),
        (stored(RESERVATION, checksum=""), "not written by the broker"),
        (stored(RESERVATION, checksum="é"), "not written by the broker"),
        (stored(RESERVATION, data=LESS), "not written by the broker"),
    ],
)
def test_record_that_is_not_what_was_written_is_refused(found, why):
    with pytest.raises(CorruptRecord, match=why):
        projection.verified_record("reservation", found, KEY)


def test_what_controllers_write_into_a_spec_is_not_compared():
    spec: Any = projection.cluster_spec(CLUSTER)
    edited = {**spec, "resources": {**spec["resources"], "reserved": {"cpu": "1"}}}
    assert projection.comparable_spec(edited) == projection.comparable_spec(spec)
