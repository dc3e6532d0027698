"""What is done about a Reservation object, for each way that it and its record can stand to each other."""

import pytest
from msgspec.structs import replace

import broker_samples as samples
import make
from kubelend.controllers import labels as controllers_labels
from kubelend.controllers import reservation_plan
from kubelend.core.errors import InvalidDuration, InvalidInput
from kubelend.core.lifecycle import Reason
from kubelend.core.models import Constraints
from kubelend.wire import route
from kubelend.wire.broker_objects import RESERVATION_FINALIZER
from kubelend.wire.conversion import RequestLimits
from kubelend.wire.objects import Metadata

TERMS = RequestLimits(make.HOUR, 2 * make.HOUR, make.HOUR)
FINALIZER = RESERVATION_FINALIZER
RELEASED = samples.record("Released", reason=Reason.EXPIRED)
ACTIVE = samples.record("Active", activated_at=make.T0)


def plan(found, record=None):
    return reservation_plan.plan_reservation(found, record)


@pytest.mark.parametrize(
    "found, action",
    [
        pytest.param(samples.wish(), reservation_plan.Reserve(), id="new"),
        pytest.param(
            samples.with_status(samples.wish(), phase="Reserved"),
            reservation_plan.Reserve(),
            id="whatever phase its maker claims",
        ),
        pytest.param(samples.with_status(samples.wish(), phase="Failed"), None, id="failed"),
        pytest.param(samples.with_status(samples.wish(), phase="Released"), None, id="released"),
        pytest.param(
            samples.wish(labels=samples.OWN), reservation_plan.DeleteOrphan(), id="orphan"
        ),
        pytest.param(
            samples.written(samples.record()), reservation_plan.Reset(), id="claims a record"
        ),
        pytest.param(samples.written(RELEASED), None, id="claims an end"),
        pytest.param(samples.leaving(samples.wish()), None, id="deleted before it was taken up"),
        pytest.param(
            samples.leaving(samples.with_metadata(samples.wish(), finalizers=(FINALIZER, "x"))),
            reservation_plan.RemoveFinalizer(),
            id="deleted, and holds on",
        ),
    ],
)
def test_object_without_a_record(found, action):
    assert plan(found) == action


@pytest.mark.parametrize("phase", ["Pending", "Reserved", "Active", "Released", "Failed"])
@pytest.mark.parametrize("is_own", [False, True])
def test_object_that_says_what_its_record_says_is_left_alone(phase, is_own):
    record = samples.record(phase)
    assert plan(samples.written(record, is_own=is_own), record) is None


@pytest.mark.parametrize(
    "change, spoilt",
    [
        (lambda found: samples.with_status(found, phase="Failed"), ("phase", "Failed")),
        (lambda found: samples.with_status(found, message=""), ("message", None)),
        (lambda found: samples.with_status(found, expires_at=None), ("expiresAt", None)),
        (lambda found: samples.with_status(found, record=None), ("record", None)),
        (
            lambda found: samples.with_status(found, record=samples.kept(samples.record("Active"))),
            ("record", samples.kept(samples.record("Active")).checksum),
        ),
        (lambda found: samples.with_metadata(found, finalizers=("x",)), ("finalizers", ("x",))),
        (
            lambda found: samples.with_spec(found, target_cluster_id="other"),
            ("targetClusterID", "other"),
        ),
    ],
    ids=["phase", "message", "end", "no record", "older record", "finalizer", "target"],
)
def test_edited_object_is_written_again(change, spoilt):
    record = samples.record(message="Resources locked")
    assert plan(change(samples.written(record)), record) == reservation_plan.Repair((spoilt,))


def test_spec_of_a_user_is_the_users_but_for_the_target():
    record = samples.record()
    theirs = samples.with_spec(samples.written(record), duration="2h", priority=7)
    assert plan(theirs, record) is None
    own = samples.with_spec(samples.written(record, is_own=True), priority=7)
    assert isinstance(plan(own, record), reservation_plan.Repair)


def test_generation_is_noted_on_objects_of_others():
    record = samples.record()
    newer = samples.with_metadata(samples.written(record), generation=3)
    assert plan(newer, record) == reservation_plan.ObserveGeneration()
    own = samples.with_metadata(samples.written(record, is_own=True), generation=3)
    assert plan(own, record) is None


@pytest.mark.parametrize(
    "record, is_own, action",
    [
        (samples.record(), False, reservation_plan.Forget()),
        (samples.record("Pending"), False, reservation_plan.Forget()),
        (RELEASED, False, reservation_plan.Forget()),
        (samples.record(), True, reservation_plan.Release(Reason.DELETED)),
        (samples.record("Pending"), True, reservation_plan.Release(Reason.DELETED)),
        (RELEASED, True, reservation_plan.Repair((("finalizers", ()),))),
    ],
)
def test_deleted_object_gives_back_what_it_holds(record, is_own, action):
    assert plan(samples.leaving(samples.written(record, is_own=is_own)), record) == action


def test_deletion_counts_more_than_what_was_edited():
    record = samples.record()
    found = samples.with_status(samples.written(record), phase="Failed")
    assert plan(samples.leaving(found), record) == reservation_plan.Forget()


def test_record_of_another_object_of_the_same_name_is_retired():
    anew = samples.with_metadata(samples.wish(), uid="u-2")
    assert plan(anew, samples.record()) == reservation_plan.Forget()
    assert plan(anew, make.reservation("mine")) == reservation_plan.Forget()


@pytest.mark.parametrize(
    "condition, record, action",
    [
        ("RequesterActive", samples.record(), reservation_plan.Activate()),
        ("RequesterActive", ACTIVE, None),
        ("RequesterActive", samples.record("Pending"), None),
        ("RequesterActive", RELEASED, None),
        ("RequesterReleased", samples.record(), reservation_plan.Release(Reason.BY_REQUESTER)),
        ("RequesterReleased", ACTIVE, reservation_plan.Release(Reason.BY_REQUESTER)),
        (
            "RequesterReleased",
            samples.record("Pending"),
            reservation_plan.Release(Reason.BY_REQUESTER),
        ),
        ("RequesterReleased", RELEASED, None),
        ("SomethingElse", samples.record(), None),
    ],
)
@pytest.mark.parametrize("is_own", [False, True])
def test_conditions_of_the_requester(condition, record, action, is_own):
    found = samples.written(record, is_own=is_own)
    said = samples.with_status(found, conditions=(samples.condition(condition),))
    assert plan(said, record) == action
    unsaid = samples.with_status(found, conditions=(samples.condition(condition, "False"),))
    assert plan(unsaid, record) is None


@pytest.mark.parametrize(
    "after, action",
    [
        (None, None),
        (-make.SECOND, None),
        (make.NO_TIME, reservation_plan.Activate()),
        (make.SECOND, reservation_plan.Activate()),
    ],
)
def test_what_was_said_of_one_provider_is_not_said_of_the_next(after, action):
    moved = samples.record(left=("first",))
    said = (samples.condition("RequesterActive", after=after),)
    assert plan(samples.with_status(samples.written(moved), conditions=said), moved) == action


def test_request_is_in_the_name_of_whom_the_object_says():
    asked = reservation_plan.request_from_object(
        samples.wish(requester_id="me", target_cluster_id="there"), TERMS
    )
    assert (asked.requester, asked.constraints.pinned) == ("me", "there")
    assert (asked.key, asked.duration) == ("object→u-1", make.HOUR)
    assert reservation_plan.request_from_object(samples.wish(), TERMS).requester == "hub"


@pytest.mark.parametrize(
    "found, error, words",
    [
        (samples.wish("hashed-x"), InvalidInput, "the name 'hashed-x' cannot be used"),
        (samples.wish("x" * 250), InvalidInput, "choose one of at most 240 characters"),
        (samples.wish(cpu="0"), InvalidInput, "requestedResources.cpu: must be more than zero"),
        (samples.wish(duration="3h"), InvalidInput, "exceeds the broker's maximum"),
        (samples.wish(wait="-1s"), InvalidDuration, "wait: '-1s' is below zero"),
        (
            samples.wish(requester_id="a\x1b"),
            InvalidInput,
            r"requesterID: 'a\x1b' contains a control",
        ),
    ],
)
def test_invalid_request_is_rejected_with_a_message(found, error, words):
    with pytest.raises(error) as raised:
        reservation_plan.request_from_object(found, TERMS)
    assert words in str(raised.value)


def test_nobody_can_send_the_key_of_an_object():
    key = controllers_labels.request_key(Metadata("mine", uid="u-1"))
    with pytest.raises(InvalidInput):
        route.check_idempotency_key(key)


def test_record_that_fits_no_object_can_be_compared():
    """Taken in by a broker that did not count the region as a label."""
    labels = {f"l{number}": "x" for number in range(65)}
    fitting = samples.record()
    record = replace(fitting, request=replace(fitting.request, constraints=Constraints(labels)))
    found = samples.with_status(samples.written(fitting, is_own=True), record=samples.kept(record))
    assert [name for name, _ in plan(found, record).fields] == ["spec"]
    theirs = samples.with_status(samples.written(fitting), record=samples.kept(record))
    assert plan(theirs, record) is None
