"""A ResourceRequest as a reservation request: its key, its validation, its state, transient errors."""

import pytest
from msgspec.structs import replace

from kubelend.agent import resource_requests
from kubelend.agent.resource_requests import RequestState
from kubelend.core import errors
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
SENT = SentRequest(1, resource_requests.request_from_spec(SPEC))


def resource_request(generation=1, spec=SPEC, **status):
    metadata = Metadata("w", uid="u", generation=generation)
    return ResourceRequest(metadata, spec, ResourceRequestStatus(**status))


def test_request_has_all_fields_of_the_spec():
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
    request = resource_requests.request_from_spec(spec)
    amounts = bodies.Quantities("500m", "256Mi", "2", "10Gi", {"example.com/fpga": "1"})
    assert request.requested_resources == amounts
    for field in ("priority", "duration", "wait", "policy", "weights", "target_cluster_id"):
        assert getattr(request, field) == getattr(spec, field)
    assert request.constraints == spec.constraints


@pytest.mark.parametrize(
    "fields, message",
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
def test_invalid_field_is_named(fields, message):
    with pytest.raises(InvalidInput) as refused:
        resource_requests.request_from_spec(replace(SPEC, **fields))
    assert refused.value.message.startswith(message)


def test_wait_of_zero_is_valid():
    assert resource_requests.request_from_spec(replace(SPEC, wait="0s")).wait == "0s"


def test_idempotency_key_is_the_same_for_one_generation_of_one_object_only():
    key = resource_requests.idempotency_key
    others = [("you", "u", 1), ("me", "v", 1), ("me", "u", 2), ("m", "eu", 1), ("me", "u1", 1)]
    others += [("me", "u", 11), ("m\u00e9\n", "u" * 5000, 1)]
    keys = {key(*identity) for identity in [("me", "u", 1), *others]}
    assert key("me", "u", 1) == key("me", "u", 1)
    assert len(keys) == 1 + len(others)
    assert all(len(each) <= route.MAX_KEY_LENGTH and each.isascii() for each in keys)
    assert all(each.isprintable() for each in keys)


BOUND, FINISHED = {"reservation_name": "r"}, {"observed_generation": 1}


@pytest.mark.parametrize(
    "generation, status, state",
    [
        (1, {}, RequestState.NEW),
        (1, {"phase": "Pending", "asked": SENT}, RequestState.REQUESTED),
        (1, {"phase": "Pending", **BOUND, "asked": SENT}, RequestState.BOUND),
        (1, {"phase": "Reserved", **BOUND, "asked": SENT}, RequestState.BOUND),
        (1, {"phase": "Active", **BOUND}, RequestState.BOUND),
        (2, {"phase": "Reserved", **BOUND, **FINISHED}, RequestState.BOUND),
        (1, {"phase": "Failed", **FINISHED}, RequestState.DONE),
        (1, {"phase": "Released", **FINISHED, **BOUND}, RequestState.DONE),
        (1, {"phase": "Expired", **FINISHED, **BOUND}, RequestState.DONE),
        (2, {"phase": "Failed", **FINISHED, "asked": SENT}, RequestState.DONE),
        (2, {"phase": "Expired", **FINISHED, **BOUND}, RequestState.DONE),
    ],
)
def test_state_is_derived_from_the_object(generation, status, state):
    assert resource_requests.request_state(resource_request(generation, **status)) is state


def subclasses(kind):
    return {kind}.union(*(subclasses(child) for child in kind.__subclasses__()))


TRANSIENT = {
    errors.KubelendError,
    errors.Conflict,
    errors.TooSlow,
    errors.IdentityInUse,
    errors.LimitExceeded,
    errors.RateLimited,
    errors.QueueFull,
    errors.Unavailable,
    errors.StoreFailed,
    errors.NotReady,
    errors.NotLeader,
    errors.BrokerUnreachable,
    errors.CertificateRefused,
    errors.UnexpectedAnswer,
}


def test_transient_errors_are_those_that_are_no_decision_of_the_broker():
    ours = {kind for kind in subclasses(errors.KubelendError) if kind.__module__ == errors.__name__}
    assert {kind for kind in ours if resource_requests.is_transient(kind("why"))} == TRANSIENT
