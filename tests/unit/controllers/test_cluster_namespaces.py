"""The objects of a cluster namespace: which writes they need, which requests are pending, and their cache."""

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
    ClusterSessionSpec,
    Reservation,
    ReservationSpec,
    ReservationStatus,
)
from kubelend.wire.objects import (
    AgentRequest,
    BrokerResponse,
    Condition,
    Metadata,
    ProviderInstructionStatus,
)

ROME, BONN, PARIS = ClusterId("rome"), ClusterId("bonn"), ClusterId("paris")
SOME = bodies.Quantities("1", "1Gi")


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


def response_for(cluster, found, **fields):
    """The broker's response, with a grant."""
    [part] = streams.instructions_for(cluster, found)
    return BrokerResponse(
        body=cluster_namespaces.body_text(authorization.instruction_body(part, "signed")), **fields
    )


def requester_object(found=None, *, annotations=None, request=None, response=None, conditions=()):
    """An object that an agent of rome has made."""
    shown = response if found is None else response_for(ROME, found, request_id="q-1")
    key = {cluster_namespaces.IDEMPOTENCY_ANNOTATION: "k"} if annotations is None else annotations
    return Reservation(
        Metadata("ask-1", "ns", uid="u", annotations=key),
        ReservationSpec(SOME, request=request),
        ReservationStatus(response=shown, conditions=conditions),
    )


def provider_object(found):
    [part] = streams.instructions_for(BONN, found)
    return plan.provider_instruction_object(part, response_for(BONN, found), "ns")


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


REQUEST = AgentRequest("q-1", "reserve")
OTHER_KEY = {cluster_namespaces.IDEMPOTENCY_ANNOTATION: "other"}
CORRUPT = requester_object(response=BrokerResponse(body="nonsense"))
RETRYABLE = (StoreFailed, NotReady)
FINAL = (
    *(IdentityInUse, KeyReused, Revoked, Forbidden, QuotaExceeded),
    *(NoCapacity, InvalidInput, RateLimited, QueueFull),
)


def rejected(kind):
    response = BrokerResponse("q-1", error=cluster_namespaces.error_text(kind("no")))
    return requester_object(request=REQUEST, response=response)


REPEATED = requester_object(request=REQUEST, response=BrokerResponse("q-0"))
OF_RECORD = {
    "shows it": (requester_object(LIVE), True),
    "shows another": (requester_object(replace(LIVE, id="rsv-2")), False),
    "not answered": (requester_object(request=REQUEST), True),
    "repeated": (REPEATED, True),
    "corrupt": (CORRUPT, True),
    "another key": (requester_object(annotations=OTHER_KEY), False),
    "no key": (requester_object(annotations={}), False),
    **{kind.code: (rejected(kind), kind in RETRYABLE) for kind in (*RETRYABLE, *FINAL)},
}


@pytest.mark.parametrize("obj, is_object", OF_RECORD.values(), ids=OF_RECORD)
def test_request_without_a_decision_is_the_object_of_its_keys_reservation(obj, is_object):
    assert plan.is_object_of(obj, LIVE) is is_object


def test_object_that_is_being_deleted_is_not_deleted_again():
    finished = requester_object(OVER)
    assert steps(ROME, None, being_deleted(finished)) == []


def test_undecodable_response_is_written_again():
    assert steps(ROME, LIVE, CORRUPT) == [InstructionAction.USE]


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


# -- requests


def advertised(request=None, generation=1, **status):
    amounts = AdvertisedResources(SOME, SOME, SOME)
    return ClusterAdvertisement(
        Metadata("bonn-adv", "ns", generation=generation),
        ClusterAdvertisementSpec("bonn", amounts, request=request),
        ClusterAdvertisementStatus(**status),
    )


ACTIVATION = AgentRequest("q-2", "activate")

PING = AgentRequest("q", "ping")
PLACEHOLDER = Metadata("rsv-1", labels=objects.ledger_record_labels(""))
REJECTED = requester_object(request=ACTIVATION, response=BrokerResponse("q-2", error="{}"))
PUBLISHED = advertised(ACTIVATION, observed_generation=1, response=BrokerResponse("q-1"))
ACKNOWLEDGED = replace(provider_object(LIVE), status=ProviderInstructionStatus(request=ACTIVATION))
REQUESTS = {
    "request of a user": (requester_object(), AgentRequest("", "reserve")),
    "answered": (requester_object(LIVE), None),
    "placeholder of the broker": (Reservation(PLACEHOLDER, ReservationSpec(SOME)), None),
    "repeated": (requester_object(LIVE, request=ACTIVATION), ACTIVATION),
    "rejected": (REJECTED, None),
    "advertisement of a user": (advertised(), AgentRequest("", "publish")),
    "observed": (advertised(observed_generation=1), None),
    "published again": (PUBLISHED, ACTIVATION),
    "no request": (ClusterSession(Metadata("session")), None),
    "a ping": (ClusterSession(Metadata("session"), ClusterSessionSpec(PING)), PING),
    "an instruction": (provider_object(LIVE), None),
    "an acknowledgement": (ACKNOWLEDGED, ACTIVATION),
}


@pytest.mark.parametrize("obj, expected", REQUESTS.values(), ids=REQUESTS)
def test_request_is_pending_until_the_response_has_its_id(obj, expected):
    assert plan.pending_request(obj) == expected


@pytest.mark.parametrize(
    "found, conditions, call",
    [
        (record(), {}, ""),
        (record(), {"RequesterActive": "True"}, "activate"),
        (record(), {"RequesterActive": "False"}, ""),
        (record(Phase.ACTIVE), {"RequesterActive": "True"}, ""),
        (record(Phase.ACTIVE), {"RequesterActive": "True", "RequesterReleased": "True"}, "release"),
        (OVER, {"RequesterReleased": "True"}, ""),
        (None, {"RequesterReleased": "True"}, ""),
    ],
)
def test_conditions_request_a_verb_in_live_phases_only(found, conditions, call):
    shown = tuple(Condition(kind, status) for kind, status in conditions.items())
    assert plan.verb_from_conditions(requester_object(found, conditions=shown)) == call


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
    status = plan.error_status_patch(requester_object(), error, BrokerResponse(), make.T0)
    assert (status["phase"], status["reason"]) == (phase, error.code)


# -- cache

PENDING = make.reservation(
    "rsv-1", make.request(requester="rome", key="k"), phase=Phase.PENDING, revision=1
)
ID = ReservationId("rsv-1")
MANAGED = {objects.MANAGED_BY: objects.MANAGED_BY_BROKER}


def requested(version="1", uid="u", name="ask", *, answered=False, **metadata):
    obj = requester_object(PENDING if answered else None)
    known = replace(obj.metadata, name=name, uid=uid, resource_version=version, **metadata)
    return replace(obj, metadata=known)


def named(name, **fields):
    return requested(uid=f"u-{name}", name=name, **fields)


@pytest.fixture
def cache():
    return NamespaceCache()


def test_handled_object_is_pending_once(cache):
    assert cache.handle(requested())
    assert cache.pop_pending().objects == [requested()]
    assert cache.pop_pending() == ([], [])


def test_older_version_is_ignored(cache):
    cache.handle(requested("10"))
    cache.pop_pending()
    assert not cache.handle(requested("9"))
    assert not cache.handle(requested("10"))
    assert cache.pop_pending().objects == []


def test_object_is_found_by_key_and_then_by_its_response(cache):
    assert cache.requester_object(ID, PENDING) is None
    cache.handle(requested())
    assert cache.requester_object(ID, PENDING) == requested()
    assert not cache.shows(ID)
    cache.handle(requested("2", answered=True))
    assert cache.requester_object(ID, None) == requested("2", answered=True)
    assert cache.shows(ID)


def test_request_that_is_being_deleted_is_not_found_by_key(cache):
    cache.handle(being_deleted(requested()))
    assert cache.requester_object(ID, PENDING) is None


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


def test_object_of_another_reservation_is_not_found(cache):
    cache.handle(requested())
    other = replace(PENDING, request=make.request(requester="rome", key="other"))
    assert cache.requester_object(ReservationId("rsv-2"), other) is None


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


# -- lists beside the watch


def test_list_adds_to_what_the_watch_has_delivered(cache):
    cache.handle(requested("5"))
    cache.add_list(
        "Reservation", [requested("4"), replace(requested("3"), metadata=Metadata("b", uid="b"))]
    )
    assert [one.metadata.resource_version for one in cache.all()] == ["5", ""]
    assert not cache.awaits_list("Reservation")
    assert cache.awaits_list("ClusterSession")


def test_object_deleted_during_a_list_is_not_added(cache):
    cache.on_delete(requested("5"))
    cache.add_list("Reservation", [requested("4")])
    assert cache.all() == []


def test_list_that_is_older_than_the_watch_is_ignored(cache):
    cache.on_list("Reservation", set())
    cache.add_list("Reservation", [requested("4")])
    assert cache.all() == []


def test_enqueue_all_makes_everything_pending(cache):
    cache.handle(requested(answered=True))
    cache.pop_pending()
    cache.enqueue_all()
    assert cache.pop_pending() == ([requested(answered=True)], [ID])
