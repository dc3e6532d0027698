"""What is done about a ClusterAdvertisement object, and what its spec and status show."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import broker_samples as samples
import make
from kubelend.broker import service
from kubelend.controllers import advertisement_plan
from kubelend.controllers.advertisement_plan import AdvertisementAction
from kubelend.core.errors import InvalidInput
from kubelend.core.models import Cluster, ClusterId
from kubelend.stores.kubernetes.projection import advertisement_from_object
from kubelend.wire.bodies import Amounts, Quantities
from kubelend.wire.broker_objects import ClusterAdvertisementStatus

FOUND = samples.advertisement()
OFFER = advertisement_from_object(FOUND)
NOW = make.T0 + make.MINUTE
STALE = make.T0 + make.STALE_AFTER


def record(offer=OFFER, **fields):
    return Cluster(offer, make.T0, make.T0 + make.STALE_AFTER, revision=4, **fields)


def plan(found, processed=None, known=None):
    advertisement = advertisement_from_object(found)
    return advertisement_plan.plan_advertisement(found, advertisement, processed, known)


# -- what administrators request


@pytest.mark.parametrize(
    "annotations, expected",
    [
        ({}, None),
        ({"broker.fluidos.eu/cordon": "new\nswitch"}, ("broker.fluidos.eu/cordon", "new switch")),
        ({"broker.fluidos.eu/drain": ""}, ("broker.fluidos.eu/drain", "by an administrator")),
        ({"broker.fluidos.eu/drain": "x" * 2000}, ("broker.fluidos.eu/drain", "x" * 1024)),
        ({"example.org/cordon": "no"}, None),
    ],
)
def test_annotations_are_requests_of_administrators(annotations, expected):
    found = replace(FOUND.metadata, annotations=annotations)
    assert advertisement_plan.admin_request(found) == expected


# -- the advertisement in the spec


def test_allocatable_defaults_to_the_capacity_and_the_time_to_the_creation():
    resources = replace(FOUND.spec.resources, allocatable=None)
    offer = advertisement_from_object(samples.with_spec(FOUND, resources=resources, timestamp=None))
    assert offer.allocatable == offer.capacity == make.resources("cpu=4,memory=8Gi")
    assert offer.sent_at == FOUND.metadata.creation_timestamp


def test_reserved_and_available_in_the_spec_are_ignored():
    amounts = {"available": Amounts("99", "1Ti"), "reserved": Amounts("1", "0")}
    claims = replace(FOUND.spec.resources, **amounts)
    assert advertisement_from_object(samples.with_spec(FOUND, resources=claims)) == OFFER


LOTS = replace(FOUND.spec.resources, capacity=Quantities("lots", "1Gi"))


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("resources", LOTS, r"resources\.capacity"),
        ("cluster_id", "a\x1b", r"clusterID: 'a\\x1b' contains a control character"),
    ],
)
def test_invalid_spec_is_rejected(field, value, message):
    with pytest.raises(InvalidInput, match=message):
        advertisement_from_object(samples.with_spec(FOUND, **{field: value}))


# -- actions

LATER = samples.with_spec(FOUND, timestamp=make.T0 + make.MINUTE)
LARGER = samples.advertisement(cpu="9")
ADOPTED = samples.advertisement_object(record(), is_managed=False)
SAME_TIME = record(advertisement_from_object(LARGER))
OF_AGENT = record(replace(SAME_TIME.advertisement, sent_at=make.T0 + make.HOUR))
OBSERVED = samples.with_status(FOUND, observed_generation=FOUND.metadata.generation)
NAMED = samples.with_metadata(OBSERVED, name="any-name")
REJECTED = samples.with_status(NAMED, message=f"{advertisement_plan.REJECTED_PREFIX}it was revoked")
EDITED = samples.with_metadata(NAMED, generation=2)


RENAMED = samples.with_spec(ADOPTED, cluster_name="")
OF_LATER = advertisement_from_object(LATER)
USERS = {
    "new": (FOUND, None, None, AdvertisementAction.ADVERTISE),
    "the ledger lost it": (FOUND, OFFER, None, AdvertisementAction.ADVERTISE),
    "lost before a restart": (NAMED, None, None, AdvertisementAction.ADVERTISE),
    "processed already": (ADOPTED, OFFER, record(), None),
    "processed before a restart": (ADOPTED, None, record(), None),
    "another time alone": (LATER, OFFER, record(), AdvertisementAction.ADVERTISE),
    "another amount": (LARGER, OFFER, record(), AdvertisementAction.ADVERTISE),
    "newer one elsewhere": (RENAMED, OFFER, SAME_TIME, AdvertisementAction.REPAIR),
    "deleted": (samples.being_deleted(FOUND), None, None, None),
    "record removed": (FOUND, OFFER, record(), AdvertisementAction.REPAIR),
    "has no record": (samples.advertisement(name="any-name"), OFFER, record(), None),
    "processed before a restart, older": (NAMED, None, OF_AGENT, None),
    "processed before, same time": (NAMED, None, SAME_TIME, None),
    "has an outdated record": (OBSERVED, None, OF_AGENT, AdvertisementAction.REPAIR),
    "edited, older": (EDITED, None, OF_AGENT, AdvertisementAction.IGNORE_OUTDATED),
    "edited, same time": (EDITED, None, SAME_TIME, AdvertisementAction.ADVERTISE),
    "rejected before": (REJECTED, None, SAME_TIME, AdvertisementAction.ADVERTISE),
    "nothing new": (EDITED, OFFER, OF_AGENT, None),
    "new, and older": (EDITED, OF_LATER, OF_AGENT, AdvertisementAction.IGNORE_OUTDATED),
    "replaces its own": (EDITED, OF_AGENT.advertisement, OF_AGENT, AdvertisementAction.ADVERTISE),
}


@pytest.mark.parametrize("found, processed, known, action", USERS.values(), ids=USERS)
def test_users_object_is_processed_once_per_change_unless_it_is_outdated(
    found, processed, known, action
):
    assert plan(found, processed, known) == action


SHOWN = samples.advertisement_object(record())
SUMS = {"available": Amounts("1", "1Gi"), "reserved": Amounts("3", "0")}
MANY = {f"l{number}": "x" for number in range(64)}


SUMMED = samples.with_spec(SHOWN, resources=replace(SHOWN.spec.resources, **SUMS))
TOO_MANY = record(replace(OFFER, labels={**MANY, "region": "eu"}))
"""Accepted by a broker that did not count the region as a label."""
MANAGED = {
    "rejected": (FOUND, None, None),
    "up to date": (SHOWN, record(), None),
    "orphan": (SHOWN, None, AdvertisementAction.DELETE_ORPHAN),
    "edited": (samples.with_spec(SHOWN, cluster_name="x"), record(), AdvertisementAction.REPAIR),
    "older record": (SHOWN, record(cordon="why"), AdvertisementAction.REPAIR),
    "sums of the controllers": (SUMMED, record(), None),
    "record that fits no object": (
        samples.advertisement_object(record(replace(OFFER, labels=MANY))),
        TOO_MANY,
        AdvertisementAction.REPAIR,
    ),
}


@pytest.mark.parametrize("found, known, action", MANAGED.values(), ids=MANAGED)
def test_object_without_an_own_advertisement_is_compared_with_the_record(found, known, action):
    assert advertisement_plan.plan_advertisement(found, None, None, known) == action


@pytest.mark.parametrize(
    "deleted, processed, known, is_withdrawn",
    [
        pytest.param(FOUND, OFFER, record(), True, id="its own"),
        pytest.param(FOUND, OFFER, SAME_TIME, False, id="newer one elsewhere"),
        pytest.param(SHOWN, None, record(), True, id="managed"),
        pytest.param(SHOWN, None, record(cordon="x"), False, id="being rewritten"),
    ],
)
def test_deleted_object_withdraws_its_own_advertisement(deleted, processed, known, is_withdrawn):
    assert advertisement_plan.is_withdrawn(deleted, processed, known) is is_withdrawn


# -- spec and status


def view(*held, **cluster):
    runner = make.runner(lender=make.advertisement("lender", "cpu=4,memory=8Gi", **cluster))
    for amounts in held:
        runner.reserve(amounts)
    return service.cluster_view(runner.ledger, runner.ledger.cluster(ClusterId("lender")))


def status(found, seen, error="", now=NOW):
    return advertisement_plan.status_patch(found, seen, error, now)


def patched(found, change):
    """The object after a merge patch of its status."""
    before = msgspec.to_builtins(found.status)
    merged = {name: value for name, value in (before | change).items() if value is not None}
    return replace(found, status=msgspec.convert(merged, ClusterAdvertisementStatus))


def written(found, seen, **at):
    return patched(found, status(found, seen, **at))


NOTHING = {"cpu": "0", "memory": "0", "gpu": None}
LENT = {
    "available": {"cpu": "1", "memory": "6Gi"},
    "reserved": {"cpu": "3", "memory": "2Gi"},
}


@pytest.mark.parametrize(
    "reserved, held, resources",
    [
        pytest.param(None, (), None, id="nothing"),
        pytest.param(None, ("cpu=3,memory=2Gi",), LENT, id="new"),
        pytest.param(Amounts("3", "2Gi", gpu="1"), (), {"reserved": NOTHING}, id="no longer"),
    ],
)
def test_reserved_and_available_are_corrected(reserved, held, resources):
    shown = replace(FOUND.spec.resources, reserved=reserved)
    change = advertisement_plan.spec_patch(samples.with_spec(FOUND, resources=shown), view(*held))
    assert change == ({"resources": resources} if resources else {})


def test_overcommitted_cluster_has_nothing_available():
    seen = view("cpu=3,memory=2Gi")
    grown = replace(seen.cluster.advertisement, allocated=make.resources("cpu=2,memory=1Gi"))
    seen = seen._replace(cluster=replace(seen.cluster, advertisement=grown))
    change: Any = advertisement_plan.spec_patch(FOUND, seen)
    assert change["resources"]["available"]["cpu"] == "0"
    shown = written(FOUND, seen).status
    true = [one.type for one in shown.conditions if one.status == "True"]
    assert true == ["Ready", "Overcommitted"]
    assert shown.message == "Overcommitted: the cluster's own pods use resources that it has lent"


def test_active_cluster_shows_its_score():
    change = status(FOUND, view("cpu=1,memory=2Gi"))
    assert (change["phase"], change["active"], change["score"]) == ("Active", True, "75.00")
    assert (change["reservations"], change["observedGeneration"]) == (1, 1)
    assert {one["type"]: (one["status"], one["reason"]) for one in change["conditions"]} == {
        "Ready": ("True", "ClusterActive"),
        "Stale": ("False", "AdvertisementAge"),
        "Overcommitted": ("False", "ResourceCheck"),
    }


@pytest.mark.parametrize("held", [(), ("cpu=1,memory=1Gi",)])
def test_unchanged_status_is_not_written_again(held):
    seen = view(*held)
    found = written(FOUND, seen)
    assert status(found, seen) == {}
    assert status(found, seen, now=NOW + make.MINUTE) == {}


def test_stale_cluster_is_inactive_since_its_last_advertisement():
    seen = view()
    found = written(FOUND, seen)
    change = status(found, seen, now=STALE)
    assert (change["phase"], change["active"]) == ("Stale", False)
    assert change["message"] == "Stale: no advertisement since 2026-01-01T12:00:00Z"
    shown = {one.type: one for one in patched(found, change).status.conditions}
    assert (shown["Ready"].reason, shown["Stale"].status) == ("ClusterStale", "True")
    assert shown["Stale"].last_transition_time == STALE
    assert shown["Overcommitted"].last_transition_time == NOW


def test_cordoned_cluster_is_not_ready():
    seen = view()
    change = status(FOUND, seen._replace(cluster=replace(seen.cluster, cordon="repairs")))
    shown = change["phase"], change["active"], change["cordonReason"]
    assert shown == ("Active", False, "repairs")
    assert change["message"] == "Closed to new reservations: repairs"


def test_conditions_of_others_stay():
    found = samples.with_status(FOUND, conditions=(samples.condition("Theirs"),))
    shown = [one.type for one in written(found, view()).status.conditions]
    assert shown == ["Theirs", "Ready", "Stale", "Overcommitted"]


@pytest.mark.parametrize("labels, is_written", [(None, True), (samples.MANAGED, False)])
def test_generation_alone_is_written_on_objects_of_users_only(labels, is_written):
    seen = view()
    found = written(samples.advertisement(labels=labels), seen)
    assert bool(status(samples.with_metadata(found, generation=2), seen)) is is_written


def test_rejection_is_shown():
    change = status(FOUND, None, "Rejected: nonsense")
    assert change == {"message": "Rejected: nonsense", "observedGeneration": 1}
    known = status(FOUND, view(), "Rejected: nonsense")
    assert (known["phase"], known["message"]) == ("Active", "Rejected: nonsense")
