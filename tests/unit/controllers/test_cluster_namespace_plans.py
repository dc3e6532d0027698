"""What is written into the namespace of a cluster, for each relation between its objects and the ledger."""

import msgspec
import pytest

import make
from kubelend.broker import authorization, streams
from kubelend.broker.streams import Action, Side
from kubelend.controllers.cluster_namespaces import plan
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
from kubelend.core.models import ClusterId
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
    Condition,
    Reservation,
    ReservationSpec,
    ReservationStatus,
)
from kubelend.wire.objects import AgentRequest, BrokerResponse, Metadata, ProviderInstructionStatus

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


def told(cluster, found, **fields):
    """The broker's words of it, with a grant."""
    [part] = streams.instructions_for(cluster, found)
    return BrokerResponse(
        body=cluster_namespaces.body_text(authorization.instruction_body(part, "signed")), **fields
    )


def own(found=None, *, annotations=None, question=None, reply=None, conditions=()):
    """An object that an agent of rome has made."""
    said = reply if found is None else told(ROME, found, request_id="q-1")
    key = {cluster_namespaces.IDEMPOTENCY_ANNOTATION: "k"} if annotations is None else annotations
    return Reservation(
        Metadata("ask-1", "mail", uid="u", annotations=key),
        ReservationSpec(SOME, request=question),
        ReservationStatus(response=said, conditions=conditions),
    )


def lent(found):
    [part] = streams.instructions_for(BONN, found)
    return plan.provider_instruction_object(part, told(BONN, found), "mail")


def steps(cluster, found, own=None, lent=None):
    return [
        (type(step).__name__, getattr(getattr(step, "instruction", None), "action", None))
        for step in plan.plan_reservation_objects(cluster, found, own, lent)
    ]


@pytest.mark.parametrize(
    "cluster, found, own, lent, expected",
    [
        pytest.param(
            ROME, record(), None, None, [("WriteInstruction", Action.USE)], id="asked elsewhere"
        ),
        pytest.param(
            ROME, record(), own(), None, [("WriteInstruction", Action.USE)], id="not told yet"
        ),
        pytest.param(ROME, record(), own(record()), None, [], id="told"),
        pytest.param(
            ROME, OVER, own(record()), None, [("WriteInstruction", Action.STOP)], id="over"
        ),
        pytest.param(ROME, OVER, own(OVER), None, [], id="told that it is over"),
        pytest.param(ROME, OVER, None, None, [], id="over before it was told"),
        pytest.param(ROME, None, own(OVER), None, [("DeleteObject", None)], id="forgotten"),
        pytest.param(ROME, None, own(OVER, annotations={}), None, [], id="a person's stays"),
        pytest.param(BONN, record(), None, None, [("WriteInstruction", Action.HOLD)], id="to hold"),
        pytest.param(BONN, record(), None, lent(record()), [], id="held"),
        pytest.param(
            BONN,
            OVER,
            None,
            lent(record()),
            [("WriteInstruction", Action.WITHDRAW)],
            id="withdrawn",
        ),
        pytest.param(
            BONN,
            record(target=PARIS, left=(BONN,), revision=8),
            None,
            lent(record()),
            [("WriteInstruction", Action.WITHDRAW)],
            id="moved away",
        ),
        pytest.param(
            BONN, None, None, lent(OVER), [("DeleteObject", None)], id="withdrawn long ago"
        ),
        pytest.param(PARIS, record(), None, None, [], id="a stranger"),
    ],
)
def test_objects_show_what_the_ledger_has(cluster, found, own, lent, expected):
    assert steps(cluster, found, own, lent) == expected


def refused(kind):
    return own(
        question=ASKED, reply=BrokerResponse("q-1", error=cluster_namespaces.error_text(kind("no")))
    )


ASKED = AgentRequest("q-1", "reserve")


@pytest.mark.parametrize(
    "seen, stands",
    [
        pytest.param(own(record()), True, id="tells of it"),
        pytest.param(own(msgspec.structs.replace(record(), id="rsv-2")), False, id="of another"),
        pytest.param(own(question=ASKED), True, id="not answered"),
        pytest.param(own(question=ASKED, reply=BrokerResponse("q-0")), True, id="asked again"),
        pytest.param(own(reply=BrokerResponse(body="nonsense")), True, id="spoilt"),
        pytest.param(
            own(annotations={cluster_namespaces.IDEMPOTENCY_ANNOTATION: "other"}),
            False,
            id="another key",
        ),
        pytest.param(own(annotations={}), False, id="no key"),
        pytest.param(refused(StoreFailed), True, id="the store failed"),
        pytest.param(refused(NotReady), True, id="the broker stopped"),
        *(
            pytest.param(refused(kind), False, id=kind.code)
            for kind in (
                *(IdentityInUse, KeyReused, Revoked, Forbidden, QuotaExceeded),
                *(NoCapacity, InvalidInput, RateLimited, QueueFull),
            )
        ),
    ],
)
def test_only_a_question_without_a_decision_stands_for_its_keys_reservation(seen, stands):
    assert plan.is_object_of(seen, record()) is stands


def test_what_is_being_deleted_is_not_deleted_again():
    leaving = own(OVER)
    metadata = msgspec.structs.replace(leaving.metadata, deletion_timestamp=make.T0)
    assert steps(ROME, None, msgspec.structs.replace(leaving, metadata=metadata)) == []


def test_undecodable_response_is_written_again():
    assert steps(ROME, record(), own(reply=BrokerResponse(body="nonsense"))) == [
        ("WriteInstruction", Action.USE)
    ]


def test_reservation_that_is_shown_is_what_was_asked_for():
    made = plan.reservation_object(record(), "mail")
    assert (made.metadata.name, made.spec["requesterID"]) == ("rsv-1", "rome")
    assert plan.provider_instruction_object(
        next(streams.instructions_for(BONN, record())), BrokerResponse(), "mail"
    ).key == ("mail/rsv-1-provider")


def test_reservation_with_more_labels_than_a_spec_takes_is_shown_all_the_same():
    labels = {f"label-{number}": "yes" for number in range(65)}
    request = make.request(requester="rome", key="k", labels=labels)
    found = msgspec.structs.replace(record(), request=request)
    assert plan.reservation_object(found, "mail").spec["constraints"] == {"labels": labels}
    assert "constraints" not in plan.reservation_object(found, "mail", in_full=False).spec


# -- questions


def advertised(question=None, generation=1, **status):
    amounts = AdvertisedResources(SOME, SOME, SOME)
    return ClusterAdvertisement(
        Metadata("bonn-adv", "mail", generation=generation),
        ClusterAdvertisementSpec("bonn", amounts, request=question),
        ClusterAdvertisementStatus(**status),
    )


ASKED = AgentRequest("q-2", "activate")


@pytest.mark.parametrize(
    "seen, expected",
    [
        pytest.param(own(), AgentRequest("", "reserve"), id="a person's request"),
        pytest.param(own(record()), None, id="answered"),
        pytest.param(
            Reservation(
                Metadata("rsv-1", labels=objects.ledger_record_labels("")),
                ReservationSpec(SOME),
            ),
            None,
            id="shown by the broker, and not filled yet",
        ),
        pytest.param(own(record(), question=ASKED), ASKED, id="asked again"),
        pytest.param(
            own(question=ASKED, reply=BrokerResponse("q-2", error="{}")),
            None,
            id="refused is answered",
        ),
        pytest.param(advertised(), AgentRequest("", "publish"), id="a person's advertisement"),
        pytest.param(advertised(observed_generation=1), None, id="taken in"),
        pytest.param(
            advertised(ASKED, observed_generation=1, response=BrokerResponse("q-1")),
            ASKED,
            id="published again",
        ),
        pytest.param(ClusterSession(Metadata("session")), None, id="an empty namespace"),
        pytest.param(
            ClusterSession(Metadata("session"), ClusterSessionSpec(AgentRequest("q", "ping"))),
            AgentRequest("q", "ping"),
            id="a ping",
        ),
        pytest.param(lent(record()), None, id="an instruction"),
        pytest.param(
            msgspec.structs.replace(
                lent(record()), status=ProviderInstructionStatus(request=ASKED)
            ),
            ASKED,
            id="an acknowledgement",
        ),
    ],
)
def test_question_is_open_until_its_reply_names_it(seen, expected):
    assert plan.pending_request(seen) == expected


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
def test_conditions_ask_in_every_live_phase_and_only_then(found, conditions, call):
    said = tuple(Condition(kind, status) for kind, status in conditions.items())
    assert plan.verb_from_conditions(own(found, conditions=said)) == call


@pytest.mark.parametrize(
    "found, cluster, finalizers, expected",
    [
        pytest.param(record(), ROME, (), True, id="live"),
        pytest.param(record(), ROME, (RESERVATION_FINALIZER,), False, id="held"),
        pytest.param(OVER, ROME, (), False, id="over"),
        pytest.param(None, ROME, (), False, id="not told"),
        pytest.param(record(), PARIS, (), False, id="of whose namespace it was before"),
    ],
)
def test_what_is_live_is_held_on_to(found, cluster, finalizers, expected):
    seen = own(found)
    metadata = msgspec.structs.replace(seen.metadata, finalizers=finalizers)
    assert (
        plan.needs_finalizer(msgspec.structs.replace(seen, metadata=metadata), cluster) is expected
    )


def test_key_is_the_agents_or_of_the_object_itself():
    assert plan.idempotency_key(own()) == "k"
    assert plan.idempotency_key(own(annotations={})) == "namespace/u"


@pytest.mark.parametrize(
    "error, phase", [(NoCapacity("none fits"), "Failed"), (NotReady("not yet"), None)]
)
def test_refusal_is_final_only_if_it_is(error, phase):
    status = plan.error_status_patch(own(), error, BrokerResponse(), make.T0)
    assert (status["phase"], status["reason"]) == (phase, error.code)


def test_each_cluster_is_told_its_side():
    sides = {
        cluster: next(streams.instructions_for(cluster, record())).side for cluster in (ROME, BONN)
    }
    assert sides == {ROME: Side.REQUESTER, BONN: Side.PROVIDER}
