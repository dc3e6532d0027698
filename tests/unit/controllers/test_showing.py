"""What an advertisement shows: amounts, score, phase and conditions, and only where they are different."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

import broker_samples as samples
import make
from kubelend.broker import service
from kubelend.controllers import advertisement_plan
from kubelend.core.models import ClusterId
from kubelend.wire.bodies import Amounts
from kubelend.wire.broker_objects import ClusterAdvertisementStatus

NOW = make.T0 + make.MINUTE
STALE = make.T0 + make.STALE_AFTER


def view(*held, **cluster):
    desk = make.desk(lender=make.advertisement("lender", "cpu=4,memory=8Gi", **cluster))
    for amounts in held:
        desk.reserve(amounts)
    return service.cluster_view(desk.ledger, desk.ledger.cluster(ClusterId("lender")))


def status(found, seen, problem="", now=NOW):
    return advertisement_plan.status_patch(found, seen, problem, now)


def applied(found, change):
    """As a merge patch is."""
    before = msgspec.to_builtins(found.status)
    merged = {name: value for name, value in (before | change).items() if value is not None}
    return replace(found, status=msgspec.convert(merged, ClusterAdvertisementStatus))


def test_nothing_reserved_needs_no_word():
    assert advertisement_plan.spec_patch(samples.advertisement(), view()) == {}


def test_reserved_and_available_are_put_right():
    change = advertisement_plan.spec_patch(samples.advertisement(), view("cpu=3,memory=2Gi"))
    assert change == {
        "resources": {
            "available": {"cpu": "1", "memory": "6Gi"},
            "reserved": {"cpu": "3", "memory": "2Gi"},
        }
    }


def test_what_is_not_there_any_more_is_taken_off():
    found = samples.advertisement()
    claims = replace(found.spec.resources, reserved=Amounts("3", "2Gi", gpu="1"))
    change = advertisement_plan.spec_patch(samples.with_spec(found, resources=claims), view())
    assert change == {"resources": {"reserved": {"cpu": "0", "memory": "0", "gpu": None}}}


def test_what_grew_over_the_promises_shows_nothing_left():
    seen = view("cpu=3,memory=2Gi")
    grown = seen.cluster.advertisement
    grown = replace(grown, allocated=make.resources("cpu=2,memory=1Gi"))
    seen = seen._replace(cluster=replace(seen.cluster, advertisement=grown))
    change: Any = advertisement_plan.spec_patch(samples.advertisement(), seen)
    assert change["resources"]["available"]["cpu"] == "0"
    said = applied(samples.advertisement(), status(samples.advertisement(), seen)).status
    assert [one.type for one in said.conditions if one.status == "True"] == [
        "Ready",
        "Overcommitted",
    ]
    assert said.message == "Overcommitted: the cluster's own pods use resources that it has lent"


def test_active_cluster_shows_its_score():
    change = status(samples.advertisement(), view("cpu=1,memory=2Gi"))
    assert (change["phase"], change["active"], change["score"]) == ("Active", True, "75.00")
    assert (change["reservations"], change["observedGeneration"]) == (1, 1)
    assert {one["type"]: (one["status"], one["reason"]) for one in change["conditions"]} == {
        "Ready": ("True", "ClusterActive"),
        "Stale": ("False", "AdvertisementAge"),
        "Overcommitted": ("False", "ResourceCheck"),
    }


@pytest.mark.parametrize("held", [(), ("cpu=1,memory=1Gi",)])
def test_what_is_shown_once_is_not_written_again(held):
    seen = view(*held)
    found = applied(samples.advertisement(), status(samples.advertisement(), seen))
    assert status(found, seen) == {}
    assert status(found, seen, now=NOW + make.MINUTE) == {}


def test_stale_cluster_is_inactive_and_says_since_when():
    seen = view()
    found = applied(samples.advertisement(), status(samples.advertisement(), seen))
    change = status(found, seen, now=STALE)
    assert (change["phase"], change["active"]) == ("Stale", False)
    assert change["message"] == "Stale: no advertisement since 2026-01-01T12:00:00Z"
    stale = applied(found, change).status
    said = {one.type: one for one in stale.conditions}
    assert (said["Ready"].reason, said["Stale"].status) == ("ClusterStale", "True")
    assert said["Stale"].last_transition_time == STALE
    assert said["Overcommitted"].last_transition_time == NOW


def test_cordoned_cluster_is_not_ready():
    seen = view()
    seen = seen._replace(cluster=replace(seen.cluster, cordon="repairs"))
    change = status(samples.advertisement(), seen)
    assert (change["phase"], change["active"], change["cordonReason"]) == (
        "Active",
        False,
        "repairs",
    )
    assert change["message"] == "Closed to new reservations: repairs"


def test_conditions_of_others_stay():
    theirs = samples.condition("Theirs")
    found = samples.with_status(samples.advertisement(), conditions=(theirs,))
    said = applied(found, status(found, view())).status
    assert [one.type for one in said.conditions] == ["Theirs", "Ready", "Stale", "Overcommitted"]


def test_generation_alone_is_written_on_objects_of_others_only():
    seen = view()
    for labels, is_written in ((None, True), (samples.OWN, False)):
        found = samples.advertisement(labels=labels)
        found = applied(found, status(found, seen))
        newer = samples.with_metadata(found, generation=2)
        assert bool(status(newer, seen)) is is_written


def test_what_cannot_be_read_is_told():
    change = status(samples.advertisement(), None, "Rejected: nonsense")
    assert change == {"message": "Rejected: nonsense", "observedGeneration": 1}
    known = status(samples.advertisement(), view(), "Rejected: nonsense")
    assert (known["phase"], known["message"]) == ("Active", "Rejected: nonsense")
