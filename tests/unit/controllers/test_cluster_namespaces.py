"""The objects of a cluster namespace: which writes they need, which are to be processed, and their cache."""

from typing import Any

import pytest
from msgspec.structs import replace

import make
from kubelend.broker import authorization, streams
from kubelend.broker.streams import InstructionAction
from kubelend.controllers.cluster_namespaces import plan
from kubelend.controllers.cluster_namespaces.plan import NamespaceCache
from kubelend.core.errors import (
    Forbidden,
    IdentityInUse,
    InvalidInput,
    KeyReused,
    NoCapacity,
    NotReady,
    QueueFull,
    QuotaExceeded,
    RateLimited,
    Revoked,
    StoreFailed,
)
from kubelend.core.lifecycle import Phase, Reason
from kubelend.core.models import ClusterId, ReservationId
from kubelend.stores.kubernetes import objects
from kubelend.wire import bodies, cluster_namespaces
from kubelend.wire.broker_objects import (
    RESERVATION_FINALIZER,
    AdvertisedResources,
    ClusterAdvertisement,
    ClusterAdvertisementSpec,
    ClusterAdvertisementStatus,
    ClusterSession,
    ClusterSessionStatus,
    Reservation,
    ReservationSpec,
    ReservationStatus,
)
from kubelend.wire.objects import Condition, Metadata, ProviderInstructionStatus

ROME, BONN, PARIS = ClusterId("rome"), ClusterId("bonn"), ClusterId("paris")
SOME = bodies.Quantities("1", "1Gi")
LATER = make.T0 + make.HOUR


def record(phase=Phase.RESERVED, **fields):
    given = {
        "phase": phase,
        "target": BONN,
        "reserved_at": make.T0,
        "expires_at": make.T0 + make.HOUR,
        "revision": 7,
    }
    return make.reservation("rsv-1", make.request(requester="rome", key="k"), **(given | fields))


OVER = record(Phase.RELEASED, reason=Reason.BY_REQUESTER, finished_at=make.T0, revision=9)


def instruction_for(cluster, found):
    """As the broker shows it, with a grant."""
    [part] = streams.instructions_for(cluster, found)
    return authorization.instruction_body(part, "signed")


def requester_object(found=None, *, annotations=None, generation=1, spec=None, **status):
    """An object that an agent of rome has made. What it shows is processed."""
    shown = None if found is None else instruction_for(ROME, found)
    key = {cluster_namespaces.IDEMPOTENCY_ANNOTATION: "k"} if annotations is None else annotations
    known: dict[str, Any] = {"instruction": shown, "observed_generation": int(found is not None)}
    return Reservation(
        Metadata("ask-1", "ns", uid="u", annotations=key, generation=generation),
        ReservationSpec(SOME, **(spec or {})),
        ReservationStatus(**(known | status)),
    )


def provider_object(found, **report):
    [part] = streams.instructions_for(BONN, found)
    made = plan.provider_instruction_object(part, "signed", "ns")
    return replace(made, status=ProviderInstructionStatus(**report))


def being_deleted(found):
    return replace(found, metadata=replace(found.metadata, deletion_timestamp=make.T0))


def steps(cluster, found, requester=None, provider=None):
    """The action of each instruction that is written, or the name of another step."""
    return [
        step.instruction.action if isinstance(step, plan.WriteInstruction) else type(step).__name__
        for step in plan.plan_reservation_objects(cluster, found, requester, provider)
    ]


LIVE = record()
MOVED = record(target=PARIS, left=(BONN,), revision=8)
OBJECTS = {
    "requested elsewhere": (ROME, LIVE, None, None, [InstructionAction.USE]),
    "not shown yet": (ROME, LIVE, requester_object(), None, [InstructionAction.USE]),
    "shown": (ROME, LIVE, requester_object(LIVE), None, []),
    "finished": (ROME, OVER, requester_object(LIVE), None, [InstructionAction.STOP]),
    "shown as finished": (ROME, OVER, requester_object(OVER), None, []),
    "finished before it was shown": (ROME, OVER, None, None, []),
    "evicted": (ROME, None, requester_object(OVER), None, ["DeleteObject"]),
    "evicted and being deleted": (ROME, None, being_deleted(requester_object(OVER)), None, []),
    "a user's object stays": (ROME, None, requester_object(OVER, annotations={}), None, []),
    "to hold": (BONN, LIVE, None, None, [InstructionAction.HOLD]),
    "held": (BONN, LIVE, None, provider_object(LIVE), []),
    "withdrawn": (BONN, OVER, None, provider_object(LIVE), [InstructionAction.WITHDRAW]),
    "moved away": (BONN, MOVED, None, provider_object(LIVE), [InstructionAction.WITHDRAW]),
    "withdrawn long ago": (BONN, None, None, provider_object(OVER), ["DeleteObject"]),
    "other cluster": (PARIS, LIVE, None, None, []),
}


@pytest.mark.parametrize(
    "cluster, found, requester, provider, expected", OBJECTS.values(), ids=OBJECTS
)
def test_objects_show_what_the_ledger_has(cluster, found, requester, provider, expected):
    assert steps(cluster, found, requester, provider) == expected


OTHER_KEY = {cluster_namespaces.IDEMPOTENCY_ANNOTATION: "other"}
RETRYABLE = (StoreFailed, NotReady)
FINAL = (
    *(IdentityInUse, KeyReused, Revoked, Forbidden, QuotaExceeded),
    *(NoCapacity, InvalidInput, RateLimited, QueueFull),
)


def rejected(kind, generation=1):
    conditions = (cluster_namespaces.accepted_condition(kind("no"), 1),)
    return requester_object(generation=generation, conditions=conditions, observed_generation=1)


OF_RECORD = {
    "shows it": (requester_object(LIVE), True),
    "shows another": (requester_object(replace(LIVE, id="rsv-2")), False),
    "not processed": (requester_object(), True),
    "changed since": (rejected(NoCapacity, generation=2), True),
    "another key": (requester_object(annotations=OTHER_KEY), False),
    "no key": (requester_object(annotations={}), False),
    **{kind.code: (rejected(kind), kind in RETRYABLE) for kind in (*RETRYABLE, *FINAL)},
}


@pytest.mark.parametrize("obj, is_object", OF_RECORD.values(), ids=OF_RECORD)
def test_request_without_a_decision_is_the_object_of_its_keys_reservation(obj, is_object):
    assert plan.is_object_of(obj, LIVE) is is_object


def test_shown_reservation_has_the_requested_spec():
    made = plan.reservation_object(record(), "ns")
    assert (made.metadata.name, made.spec["requesterID"]) == ("rsv-1", "rome")
    assert provider_object(LIVE).key == "ns/rsv-1-provider"


def test_reservation_with_more_labels_than_a_spec_allows_is_shown():
    labels = {f"label-{number}": "yes" for number in range(65)}
    request = make.request(requester="rome", key="k", labels=labels)
    found = replace(record(), request=request)
    assert plan.reservation_object(found, "ns").spec["constraints"] == {"labels": labels}
    assert "constraints" not in plan.reservation_object(found, "ns", in_full=False).spec


# -- what agents and users write


def advertised(generation=1, **status):
    amounts = AdvertisedResources(SOME, SOME, SOME)
    return ClusterAdvertisement(
        Metadata("bonn-adv", "ns", generation=generation),
        ClusterAdvertisementSpec("bonn", amounts),
        ClusterAdvertisementStatus(**status),
    )


def session(generation, **status):
    return ClusterSession(
        Metadata("session", generation=generation), status=ClusterSessionStatus(**status)
    )


MANAGED = {objects.MANAGED_BY: objects.MANAGED_BY_BROKER}
NOT_READY = (cluster_namespaces.accepted_condition(NotReady("not yet"), 1),)
OBSERVED = replace(
    provider_object(LIVE, report_time=make.T0),
    spec=replace(provider_object(LIVE).spec, observed_report_time=make.T0),
)
PENDING_OBJECTS = {
    "new request": (requester_object(), True),
    "shown": (requester_object(LIVE), False),
    "made by the broker": (
        Reservation(Metadata("rsv-1", labels=MANAGED, generation=1), ReservationSpec(SOME)),
        False,
    ),
    "changed": (requester_object(LIVE, generation=2), True),
    "refused": (rejected(NoCapacity), False),
    "refused for now": (rejected(NotReady), True),
    "new advertisement": (advertised(), True),
    "advertised": (advertised(observed_generation=1), False),
    "advertised again": (advertised(2, observed_generation=1), True),
    "advertised to a broker that is not ready": (
        advertised(observed_generation=1, conditions=NOT_READY),
        True,
    ),
    "session": (session(2, observed_generation=1), True),
    "synced": (session(2, observed_generation=2), False),
    "an instruction": (provider_object(LIVE), False),
    "reported": (provider_object(LIVE, report_time=make.T0), True),
    "report processed": (OBSERVED, False),
}


@pytest.mark.parametrize("obj, expected", PENDING_OBJECTS.values(), ids=PENDING_OBJECTS)
def test_object_is_pending_until_what_was_written_is_processed(obj, expected):
    assert plan.is_pending(obj) is expected


@pytest.mark.parametrize(
    "found, conditions, expected",
    [
        (record(), {}, False),
        (record(), {"RequesterActive": "True"}, True),
        (record(), {"RequesterActive": "False"}, False),
        (record(Phase.ACTIVE), {"RequesterActive": "True"}, False),
        (record(Phase.ACTIVE), {"RequesterActive": "True", "RequesterReleased": "True"}, True),
        (OVER, {"RequesterReleased": "True"}, False),
        (None, {"RequesterReleased": "True"}, False),
    ],
)
def test_conditions_ask_for_a_change_in_live_phases_only(found, conditions, expected):
    shown = tuple(Condition(kind, status) for kind, status in conditions.items())
    assert plan.wants_change(requester_object(found, conditions=shown)) is expected


@pytest.mark.parametrize(
    "found, cluster, finalizers, expected",
    [
        pytest.param(record(), ROME, (), True, id="live"),
        pytest.param(record(), ROME, (RESERVATION_FINALIZER,), False, id="held"),
        pytest.param(OVER, ROME, (), False, id="finished"),
        pytest.param(None, ROME, (), False, id="not shown"),
        pytest.param(record(), PARIS, (), False, id="of the previous cluster"),
    ],
)
def test_live_reservation_needs_the_finalizer(found, cluster, finalizers, expected):
    obj = requester_object(found)
    obj = replace(obj, metadata=replace(obj.metadata, finalizers=finalizers))
    assert plan.needs_finalizer(obj, cluster) is expected


def test_idempotency_key_is_the_annotation_or_the_uid():
    assert plan.idempotency_key(requester_object()) == "k"
    assert plan.idempotency_key(requester_object(annotations={})) == "namespace/u"


@pytest.mark.parametrize(
    "error, phase", [(NoCapacity("none fits"), "Failed"), (NotReady("not yet"), None)]
)
def test_only_a_final_error_ends_the_request(error, phase):
    fields = plan.error_fields(error)
    assert (fields["phase"], fields["reason"]) == (phase, error.code)


def test_status_that_is_as_wanted_is_not_written():
    obj = requester_object(LIVE, message="as it was")
    assert plan.status_patch(obj, {"message": "as it was", "phase": "", "peer": None}, LATER) == {}
    assert plan.status_patch(obj, {"message": "", "phase": "Failed"}, LATER) == {
        "message": "",
        "phase": "Failed",
        "lastUpdateTime": LATER,
    }


def test_instruction_is_replaced_as_a_whole_and_the_reports_fields_stay():
    [part] = streams.instructions_for(BONN, OVER)
    held = provider_object(LIVE)
    held = replace(held, spec=replace(held.spec, peer_handshakes=2, observed_report_time=make.T0))
    change = plan.provider_instruction_patch(held, part, "signed")
    assert change["instruction"]["action"] == "Withdraw"
    assert not change.keys() & {"peerHandshakes", "observedReportTime"}


# -- cache

PENDING = make.reservation(
    "rsv-1", make.request(requester="rome", key="k"), phase=Phase.PENDING, revision=1
)
ID = ReservationId("rsv-1")


def requested(version="1", uid="u", name="ask", *, answered=False, **metadata):
    obj = requester_object(PENDING if answered else None)
    known = replace(obj.metadata, name=name, uid=uid, resource_version=version, **metadata)
    return replace(obj, metadata=known)


def named(name, **fields):
    return requested(uid=f"u-{name}", name=name, **fields)


@pytest.fixture
def cache():
    return NamespaceCache()


def test_object_is_pending_once_in_its_newest_version(cache):
    newest = requested("10", answered=True)
    for version, expected in (("10", [newest]), ("9", []), ("10", [])):
        assert cache.handle(requested(version, answered=True)) is bool(expected)
        assert cache.pop_pending().objects == expected
    cache.enqueue_all()
    assert cache.pop_pending() == ([newest], [ID])


def test_object_is_found_by_key_and_then_by_its_reservation(cache):
    assert cache.requester_object(ID, PENDING) is None
    cache.handle(requested())
    assert cache.requester_object(ID, PENDING) == requested()
    other = replace(PENDING, request=make.request(requester="rome", key="other"))
    assert cache.requester_object(ReservationId("rsv-2"), other) is None
    assert not cache.shows(ID)
    cache.handle(requested("2", answered=True))
    assert cache.requester_object(ID, None) == requested("2", answered=True)
    assert cache.shows(ID)


def test_request_that_is_being_deleted_is_not_found_by_key(cache):
    cache.handle(being_deleted(requested()))
    assert cache.requester_object(ID, PENDING) is None


@pytest.mark.parametrize("answered", [False, True], ids=["requested", "shown"])
@pytest.mark.parametrize("is_first", [False, True], ids=["seen last", "seen first"])
def test_object_that_is_being_deleted_does_not_hide_its_successor(cache, answered, is_first):
    old = being_deleted(named("old", answered=answered))
    new = named("new", answered=answered)
    for one in (old, new) if is_first else (new, old):
        cache.handle(one)
    for _ in ("while it is deleted", "afterwards"):
        assert cache.requester_object(ID, PENDING) == new
        cache.on_delete(old)


@pytest.mark.parametrize(
    "others, has_other",
    [
        pytest.param([], False, id="none"),
        pytest.param([named("other")], True, id="same key"),
        pytest.param([named("other", answered=True)], True, id="shows it"),
        pytest.param([being_deleted(named("other", answered=True))], False, id="being deleted"),
        pytest.param([named("rsv-1", labels=MANAGED, annotations={})], True, id="will show it"),
        pytest.param([named("rsv-2", labels=MANAGED, annotations={})], False, id="shows another"),
    ],
)
def test_reservation_has_other_objects(cache, others, has_other):
    for one in (requested(), *others):
        cache.handle(one)
    assert cache.has_other_object(PENDING, requested()) is has_other


def test_deleted_object_makes_its_reservation_pending(cache):
    cache.handle(requested(answered=True))
    cache.pop_pending()
    cache.on_delete(requested(answered=True))
    assert cache.pop_pending() == ([], [ID])
    assert cache.requester_object(ID, PENDING) is None


def test_late_deletion_does_not_affect_a_new_object(cache):
    cache.handle(requested("5", uid="new"))
    cache.on_delete(requested("4", uid="old"))
    assert cache.all() == [requested("5", uid="new")]
    cache.on_list("Reservation", {"new"})
    assert cache.all() == [requested("5", uid="new")]
    cache.on_list("Reservation", set())
    assert cache.all() == []
