"""What a ResourceRequest means, under which key, and how far it has come by what is written at it."""

import pytest
from msgspec.structs import replace

from kubelend.agent import resource_requests
from kubelend.agent.resource_requests import RequestState
from kubelend.core.errors import InvalidInput
from kubelend.wire import bodies, route
from kubelend.wire.objects import (
    Metadata,
    ResourceRequest,
    ResourceRequestSpec,
    ResourceRequestStatus,
    SentRequest,
)

SPEC = ResourceRequestSpec(requested_cpu="1", requested_memory="1Gi")
ASKED = SentRequest(1, resource_requests.request_from_spec(SPEC))


def resource_request(generation=1, spec=SPEC, **status):
    metadata = Metadata("w", uid="u", generation=generation)
    return ResourceRequest(metadata, spec, ResourceRequestStatus(**status))


def test_a_full_spec_becomes_a_full_request():
    spec = ResourceRequestSpec(
        requested_cpu="500m",
        requested_memory="256Mi",
        requested_gpu="2",
        requested_storage="10Gi",
        extended_resources={"example.com/fpga": "1"},
        priority=3,
        duration="1h30m",
        wait="5m",
        policy="cost",
        weights={"price": 2.0},
        target_cluster_id="p1",
        constraints=bodies.Constraints(labels={"zone": "a"}, region="eu", exclude=["p2"]),
        renew=True,
    )
    assert resource_requests.request_from_spec(spec) == bodies.ReservationRequest(
        requested_resources=bodies.Quantities(
            "500m", "256Mi", "2", "10Gi", {"example.com/fpga": "1"}
        ),
        priority=3,
        duration="1h30m",
        wait="5m",
        policy="cost",
        weights={"price": 2.0},
        target_cluster_id="p1",
        constraints=bodies.Constraints(labels={"zone": "a"}, region="eu", exclude=["p2"]),
    )


@pytest.mark.parametrize(
    "fields, problem",
    [
        ({"requested_cpu": "two"}, "spec.requestedCPU: 'two' is not a quantity"),
        ({"requested_cpu": ""}, "spec.requestedCPU: '' is not a quantity"),
        ({"requested_cpu": "0"}, "spec.requestedCPU: must be greater than zero"),
        ({"requested_memory": "-1Gi"}, "spec.requestedMemory: '-1Gi' is negative"),
        ({"requested_memory": "0"}, "spec.requestedMemory: must be greater than zero"),
        ({"requested_gpu": "x"}, "spec.requestedGPU: 'x' is not a quantity"),
        ({"requested_storage": "1Qi"}, "spec.requestedStorage: '1Qi' has the unknown suffix 'Qi'"),
        (
            {"extended_resources": {"a.b/c": "?"}},
            "spec.extendedResources.a.b/c: '?' is not a quantity",
        ),
        ({"extended_resources": {"!": "1"}}, "spec.extendedResources.!: "),
        ({"duration": "1"}, "spec.duration: '1' has a number without a unit"),
        ({"duration": "0s"}, "spec.duration: '0s' must be greater than zero"),
        ({"wait": "soon"}, "spec.wait: 'soon' is not a duration"),
        ({"wait": "-1s"}, "spec.wait: '-1s' must not be negative"),
        ({"priority": 2**31}, "spec.priority: must be at most 2147483647"),
        (
            {"target_cluster_id": "x" * 254},
            "spec.targetClusterID: must have at most 253 characters",
        ),
    ],
)
def test_what_cannot_be_read_is_named(fields, problem):
    with pytest.raises(InvalidInput) as refused:
        resource_requests.request_from_spec(replace(SPEC, **fields))
    assert refused.value.message.startswith(problem)


def test_a_wait_of_nothing_is_no_mistake():
    assert resource_requests.request_from_spec(replace(SPEC, wait="0s")).wait == "0s"


def test_a_key_is_the_same_for_the_same_question_and_for_no_other():
    keys = [
        resource_requests.idempotency_key(cluster, uid, generation)
        for cluster, uid, generation in [
            ("me", "u", 1),
            ("me", "u", 1),
            ("you", "u", 1),
            ("me", "v", 1),
            ("me", "u", 2),
            ("m", "eu", 1),
            ("me", "u1", 1),
            ("me", "u", 11),
            ("mé\n", "u" * 5000, 1),
        ]
    ]
    assert keys[0] == keys[1]
    assert len(set(keys)) == len(keys) - 1
    assert all(len(key) <= route.MAX_KEY_LENGTH for key in keys)
    assert all(key.isascii() and key.isprintable() for key in keys)


@pytest.mark.parametrize(
    "found, stage",
    [
        (resource_request(), RequestState.NEW),
        (resource_request(phase="Pending", asked=ASKED), RequestState.REQUESTED),
        (resource_request(phase="Pending", reservation_name="r", asked=ASKED), RequestState.BOUND),
        (resource_request(phase="Reserved", reservation_name="r", asked=ASKED), RequestState.BOUND),
        (resource_request(phase="Active", reservation_name="r"), RequestState.BOUND),
        (resource_request(phase="Failed", observed_generation=1), RequestState.DONE),
        (
            resource_request(phase="Released", observed_generation=1, reservation_name="r"),
            RequestState.DONE,
        ),
        (
            resource_request(phase="Expired", observed_generation=1, reservation_name="r"),
            RequestState.DONE,
        ),
        (resource_request(2, phase="Failed", observed_generation=1, asked=ASKED), RequestState.NEW),
        (
            resource_request(2, phase="Expired", observed_generation=1, reservation_name="r"),
            RequestState.NEW,
        ),
        (
            resource_request(2, phase="Reserved", observed_generation=1, reservation_name="r"),
            RequestState.BOUND,
        ),
    ],
)
def test_how_far_it_has_come(found, stage):
    assert resource_requests.request_state(found) is stage


@pytest.mark.parametrize(
    "found, changed",
    [
        (resource_request(2), False),
        (resource_request(2, asked=ASKED), False),
        (resource_request(2, replace(SPEC, renew=True), asked=ASKED), False),
        (resource_request(2, replace(SPEC, requested_cpu="2"), asked=ASKED), True),
        (resource_request(2, replace(SPEC, requested_cpu="?"), asked=ASKED), True),
        (resource_request(2, replace(SPEC, policy="cost"), asked=ASKED), True),
        (resource_request(1, replace(SPEC, policy="cost"), asked=ASKED), False),
    ],
    ids=["never asked", "back", "only renew", "amount", "unreadable", "policy", "same generation"],
)
def test_only_what_the_broker_hears_of_is_a_change(found, changed):
    assert resource_requests.is_spec_changed(found) is changed
