"""What is done about a Reservation object, for each combination of object and record."""

import pytest
from msgspec.structs import replace

import broker_samples as samples
import make
import object_samples
from kubelend.controllers import labels, reservation_plan
from kubelend.controllers.reservation_plan import ActionKind, ReservationAction
from kubelend.core.errors import InvalidDuration, InvalidInput
from kubelend.core.lifecycle import Reason
from kubelend.core.models import Constraints
from kubelend.stores.kubernetes import objects, projection
from kubelend.wire import route
from kubelend.wire.broker_objects import RESERVATION_FINALIZER, Renewal
from kubelend.wire.conversion import RequestLimits

TERMS = RequestLimits(make.HOUR, 2 * make.HOUR, make.HOUR)
LATER = make.T0 + make.MINUTE
NEW = samples.request_object()
RESERVED, PENDING = samples.record(), samples.record("Pending")
RELEASED = samples.record("Released", reason=Reason.EXPIRED)
ACTIVE = samples.record("Active", activated_at=make.T0)

RELEASE, FORGET = (
    ReservationAction(ActionKind.RELEASE),
    ReservationAction(ActionKind.FORGET),
)
RELEASE_DELETED = ReservationAction(ActionKind.RELEASE, Reason.DELETED)
ACTIVATE = ReservationAction(ActionKind.ACTIVATE)


def plan(found, record=None):
    return reservation_plan.plan_reservation(found, record)


def repair(*fields):
    return ReservationAction(ActionKind.REPAIR, fields=fields)


HELD = samples.with_metadata(NEW, finalizers=(RESERVATION_FINALIZER, "x"))
UNKNOWN = {
    "new": (NEW, ActionKind.RESERVE),
    "claimed phase": (samples.with_status(NEW, phase="Reserved"), ActionKind.RESERVE),
    "failed": (samples.with_status(NEW, phase="Failed"), None),
    "released": (samples.with_status(NEW, phase="Released"), None),
    "orphan": (samples.request_object(labels=samples.MANAGED), ActionKind.DELETE_ORPHAN),
    "claims a record": (samples.reservation_object(RESERVED), ActionKind.RESET),
    "claims an end": (samples.reservation_object(RELEASED), None),
    "deleted before it was processed": (samples.being_deleted(NEW), None),
    "deleted, with finalizer": (
        samples.being_deleted(HELD),
        ActionKind.REMOVE_FINALIZER,
    ),
}


@pytest.mark.parametrize("found, kind", UNKNOWN.values(), ids=UNKNOWN)
def test_object_without_a_record(found, kind):
    assert plan(found) == (kind and ReservationAction(kind))


@pytest.mark.parametrize("phase", ["Pending", "Reserved", "Active", "Released", "Failed"])
@pytest.mark.parametrize("is_managed", [False, True])
def test_object_that_agrees_with_its_record_needs_no_action(phase, is_managed):
    record = samples.record(phase)
    assert plan(samples.reservation_object(record, is_managed=is_managed), record) is None


OLDER = samples.stored_record(samples.record("Active"))


@pytest.mark.parametrize(
    "edit, fields, drifted",
    [
        (samples.with_status, {"phase": "Failed"}, ("phase", "Failed")),
        (samples.with_status, {"message": ""}, ("message", None)),
        (samples.with_status, {"expires_at": None}, ("expiresAt", None)),
        (samples.with_status, {"record": None}, ("record", None)),
        (samples.with_status, {"record": OLDER}, ("record", OLDER.checksum)),
        (samples.with_metadata, {"finalizers": ("x",)}, ("finalizers", ("x",))),
        (samples.with_spec, {"target_cluster_id": "other"}, ("targetClusterID", "other")),
    ],
    ids=["phase", "message", "end", "no record", "older record", "finalizer", "target"],
)
def test_edited_object_is_repaired(edit, fields, drifted):
    record = samples.record(message="Resources locked")
    assert plan(edit(samples.reservation_object(record), **fields), record) == repair(drifted)


def test_of_a_users_spec_only_the_target_is_repaired():
    users = samples.with_spec(samples.reservation_object(RESERVED), duration="2h", priority=7)
    assert plan(users, RESERVED) is None
    managed = samples.reservation_object(RESERVED, is_managed=True)
    found = plan(samples.with_spec(managed, priority=7), RESERVED)
    assert [name for name, _ in found.fields] == ["spec"]


def test_generation_is_observed_on_objects_of_users():
    newer = samples.with_metadata(samples.reservation_object(RESERVED), generation=3)
    assert plan(newer, RESERVED) == ReservationAction(ActionKind.OBSERVE_GENERATION)
    managed = samples.reservation_object(RESERVED, is_managed=True)
    assert plan(samples.with_metadata(managed, generation=3), RESERVED) is None


@pytest.mark.parametrize(
    "record, is_managed, action",
    [
        (RESERVED, False, FORGET),
        (PENDING, False, FORGET),
        (RELEASED, False, FORGET),
        (RESERVED, True, RELEASE_DELETED),
        (PENDING, True, RELEASE_DELETED),
        (RELEASED, True, repair(("finalizers", ()))),
    ],
)
def test_deleted_object_releases_what_it_holds(record, is_managed, action):
    found = samples.reservation_object(record, is_managed=is_managed)
    assert plan(samples.being_deleted(found), record) == action


def test_drift_of_a_deleted_object_and_a_record_of_another_one_are_forgotten():
    drifted = samples.with_status(samples.reservation_object(RESERVED), phase="Failed")
    assert plan(samples.being_deleted(drifted), RESERVED) == FORGET
    other = samples.with_metadata(NEW, uid="u-2")
    assert plan(other, RESERVED) == plan(other, make.reservation("mine")) == FORGET


@pytest.mark.parametrize(
    "condition, record, action",
    [
        ("RequesterActive", RESERVED, ACTIVATE),
        ("RequesterActive", ACTIVE, None),
        ("RequesterActive", PENDING, None),
        ("RequesterActive", RELEASED, None),
        ("RequesterReleased", RESERVED, RELEASE),
        ("RequesterReleased", ACTIVE, RELEASE),
        ("RequesterReleased", PENDING, RELEASE),
        ("RequesterReleased", RELEASED, None),
        ("SomethingElse", RESERVED, None),
    ],
)
@pytest.mark.parametrize("is_managed", [False, True])
def test_conditions_of_the_requester(condition, record, action, is_managed):
    found = samples.reservation_object(record, is_managed=is_managed)
    for status, expected in (("True", action), ("False", None)):
        conditions = (samples.condition(condition, status),)
        assert plan(samples.with_status(found, conditions=conditions), record) == expected


RENEWAL = {"renewal": Renewal(LATER, "2h")}


@pytest.mark.parametrize(
    "spec, record, action",
    [
        ({"released": True}, PENDING, RELEASE),
        ({"released": True, "active_cluster_id": RESERVED.target}, RESERVED, RELEASE),
        ({"released": True}, RELEASED, None),
        ({"active_cluster_id": RESERVED.target}, RESERVED, ACTIVATE),
        ({"active_cluster_id": "previous"}, RESERVED, None),
        ({"active_cluster_id": RESERVED.target}, ACTIVE, None),
        (RENEWAL, ACTIVE, ReservationAction(ActionKind.RENEW)),
        (RENEWAL, RELEASED, None),
    ],
    ids=str,
)
def test_spec_of_the_requester(spec, record, action):
    found = samples.with_spec(samples.reservation_object(record), **spec)
    assert reservation_plan.wanted_change(found, record) == action
    renewed = samples.with_status(found, renew_time=LATER)
    expected = None if spec is RENEWAL else action
    assert reservation_plan.wanted_change(renewed, record) == expected


@pytest.mark.parametrize(
    "after, action",
    [(None, None), (-make.SECOND, None), (make.NO_TIME, ACTIVATE), (make.SECOND, ACTIVATE)],
)
def test_active_condition_for_one_provider_does_not_count_for_the_next(after, action):
    moved = samples.record(left=("first",))
    conditions = (samples.condition("RequesterActive", after=after),)
    found = samples.with_status(samples.reservation_object(moved), conditions=conditions)
    assert plan(found, moved) == action


def test_request_has_the_requester_and_the_key_of_the_object():
    asked = projection.request_from_object(
        samples.request_object(requester_id="me", target_cluster_id="there"), TERMS
    )
    assert (asked.requester, asked.constraints.pinned) == ("me", "there")
    assert (asked.key, asked.duration) == ("object→u-1", make.HOUR)
    assert projection.request_from_object(NEW, TERMS).requester == "hub"


@pytest.mark.parametrize(
    "name, spec, error, message",
    [
        ("hashed-x", {}, InvalidInput, "the name 'hashed-x' cannot be used"),
        ("x" * 250, {}, InvalidInput, "choose one of at most 240 characters"),
        ("mine", {"cpu": "0"}, InvalidInput, "requestedResources.cpu: must be more than zero"),
        ("mine", {"duration": "3h"}, InvalidInput, "exceeds the broker's maximum"),
        ("mine", {"wait": "-1s"}, InvalidDuration, "wait: '-1s' is below zero"),
        ("mine", {"requester_id": "a\x1b"}, InvalidInput, r"requesterID: 'a\x1b' contains a"),
    ],
)
def test_invalid_request_is_rejected_with_a_message(name, spec, error, message):
    with pytest.raises(error) as raised:
        projection.request_from_object(samples.request_object(name, **spec), TERMS)
    assert message in str(raised.value)


def test_no_client_can_send_the_key_of_an_object():
    with pytest.raises(InvalidInput):
        route.check_idempotency_key(objects.request_key_for_uid("u-1"))


def test_record_that_does_not_fit_the_type_of_objects_can_be_compared():
    """Accepted by a broker that did not count the region as a label."""
    many = {f"l{number}": "x" for number in range(65)}
    record = replace(RESERVED, request=replace(RESERVED.request, constraints=Constraints(many)))
    stored = samples.stored_record(record)
    managed = samples.reservation_object(RESERVED, is_managed=True)
    found = plan(samples.with_status(managed, record=stored), record)
    assert [name for name, _ in found.fields] == ["spec"]
    users = samples.with_status(samples.reservation_object(RESERVED), record=stored)
    assert plan(users, record) is None


# -- retention of rejected requests

REJECTED = samples.with_status(NEW, phase="Failed", finished_at=LATER)


@pytest.mark.parametrize(
    "found, since",
    [
        pytest.param(REJECTED, LATER, id="rejected"),
        pytest.param(samples.with_status(REJECTED, finished_at=None), make.T0, id="no time"),
        pytest.param(NEW, None, id="new"),
        pytest.param(samples.being_deleted(REJECTED), None, id="being deleted"),
        pytest.param(samples.with_metadata(REJECTED, labels=samples.MANAGED), None, id="managed"),
        pytest.param(samples.with_status(REJECTED, phase="Released"), None, id="released"),
        pytest.param(samples.reservation_object(samples.record("Failed")), None, id="has a record"),
        pytest.param(
            samples.with_status(REJECTED, instruction=object_samples.INSTRUCTION),
            None,
            id="was accepted",
        ),
    ],
)
def test_rejected_object_may_be_deleted_after_the_retention(found, since):
    assert labels.rejected_until(found, make.HOUR) == (since and since + make.HOUR)
    readable_until = since and since + labels.MIN_REJECTION_RETENTION
    assert labels.rejected_until(found, make.NO_TIME) == readable_until
