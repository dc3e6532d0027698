"""A ResourceRequest becomes one reservation, whatever fails on the way."""

import asyncio

import pytest
from msgspec.structs import replace

import make
import requesters
from failing_objects import FailingObjects
from fake_broker import LIMITS, UNREACHABLE
from kubelend.agent import requester as agent_requester
from kubelend.agent import resource_requests
from kubelend.core import errors
from kubelend.core.models import ClusterId, ReservationId
from kubelend.wire import bodies, conversion, route
from kubelend.wire.objects import (
    Metadata,
    ResourceRequest,
    ResourceRequestSpec,
)
from requesters import requester
from virtual_time import in_virtual_time, passed, settled

FOREVER = 1e6
RESERVED = "Resources reserved in cluster p1"


# -- requesting


@requester()
async def test_request_is_reserved_and_its_status_says_where_and_until_when(rig):
    key = await rig.create_request(cpu="2")
    await rig.expect(
        key,
        "Reserved",
        reason="Locked",
        message=RESERVED,
        target_cluster_id="p1",
        reservation_name="rsv-1",
        expires_at=make.T0 + make.HOUR,
        last_update_time=make.T0,
        observed_generation=1,
    )
    assert rig.broker.reserved == {"p1": "2 CPU / 1Gi Memory"}


@requester()
async def test_finalizer_and_request_are_written_before_the_broker_is_called(rig):
    rig.broker.seconds["request"] = 5
    key = await rig.create_request()
    found = await rig.found(key)
    assert found.metadata.finalizers == ("resourcerequest.rear.fluidos.eu/finalizer",)
    assert (await rig.expect(key, "Pending", reason="Asking")).sent_request is not None
    await rig.set_finalizers(key, "example.com/theirs", *found.metadata.finalizers)
    await passed(5)
    await rig.expect(key, "Reserved")
    await rig.delete(key)
    assert (await rig.found(key)).metadata.finalizers == ("example.com/theirs",)


@requester()
async def test_request_that_is_watched_is_not_read_again(rig):
    key = await rig.create_request()
    await passed(5)
    assert ResourceRequest not in rig.objects.reads
    await rig.expect(key, "Reserved")


@requester()
async def test_invalid_spec_fails_without_a_call_and_names_the_field(rig):
    key = await rig.create_request(cpu="two")
    status = await rig.expect(key, "Failed", reason="InvalidQuantity")
    assert status.message.startswith("spec.requestedCPU: 'two' is not a quantity")
    assert rig.broker.calls == []
    assert (await rig.found(key)).metadata.finalizers == ()


@requester()
async def test_rejected_request_fails_and_is_not_repeated(rig):
    key = await rig.create_request(cpu="9")
    message = (
        "no suitable cluster: 0/2 clusters fit: 2 InsufficientCPU; "
        "p1 fits if you request 1 cpu less"
    )
    await rig.expect(key, "Failed", reason="NoCapacity", message=message)
    await passed(3600)
    await rig.change(key, renew=True)
    await rig.expect(key, "Failed", observed_generation=2)
    assert len(rig.broker.keys) == 1


# -- the wait queue


async def queue(rig, **spec):
    """A request that waits behind one which takes all."""
    await rig.create_request("big", cpu="8", requested_gpu="2", **spec)
    return await rig.create_request("waits", cpu="5", wait="10m")


@requester()
async def test_queued_request_says_so_and_is_reserved_when_it_is_served(rig):
    key = await queue(rig)
    status = await rig.expect(key, "Pending", reason="Waiting", reservation_name="rsv-2")
    assert status.message.endswith("; queued until 2026-01-01T12:10:00Z")
    assert await rig.instructions() == ["default/rsv-1"]
    await rig.delete("default/big")
    await rig.notify("rsv-2")
    await rig.expect(key, "Reserved")
    assert len(rig.broker.keys) == 2


@requester()
async def test_queued_request_fails_when_its_time_is_over_without_an_instruction(rig):
    key = await queue(rig, duration="5h")
    await passed(601)
    await rig.expect(key, "Failed", reason="WaitTimedOut")


# -- failures of the broker


@pytest.mark.parametrize("is_killed", [False, True], ids=["response is lost", "agent is killed"])
@requester()
async def test_request_without_a_known_response_reserves_nothing_twice(rig, is_killed):
    rig.broker.loses_responses, rig.broker.response_delay = not is_killed, 5 * is_killed
    key = await rig.create_request(cpu="2")
    await passed(1)
    await rig.expect(key, "Pending")
    assert rig.broker.reserved == {"p1": "2 CPU / 1Gi Memory"}
    if is_killed:
        await rig.restart()
    rig.broker.loses_responses, rig.broker.response_delay = False, 0
    await passed(20)
    await rig.expect(key, "Reserved", reservation_name="rsv-1")
    assert len(rig.broker.keys) > 1
    assert len(set(rig.broker.keys)) == 1
    assert rig.broker.reserved == {"p1": "2 CPU / 1Gi Memory"}


@pytest.mark.parametrize("error", [errors.Forbidden("not you"), errors.QuotaExceeded("no more")])
@requester()
async def test_permanent_error_fails_the_request(rig, error):
    rig.broker.error = error
    key = await rig.create_request()
    await rig.expect(key, "Failed", reason=error.code, message=str(error))
    await passed(3600)
    assert len(rig.broker.keys) == 1


@pytest.mark.parametrize("error", [UNREACHABLE, errors.RateLimited("too many", retry_after=600)])
@requester()
async def test_request_is_pending_during_a_transient_error(rig, error):
    rig.broker.error = error
    key = await rig.create_request()
    assert str(error) in (await rig.expect(key, "Pending", reason=error.code)).message
    await passed(3 * 3600)
    await rig.expect(key, "Pending")
    assert rig.health.errors == {}, "the component itself works"
    rig.broker.error = None
    await passed(601)
    await rig.expect(key, "Reserved")


@requester()
async def test_retries_become_rare_and_start_again_after_a_success(rig):
    rig.broker.error = UNREACHABLE
    key = await rig.create_request()
    writes = await rig.writes(key)
    await passed(3600)
    assert await rig.writes(key) == writes, "the status is written once, not per retry"
    times = [call.at for call in rig.broker.named("request")]
    assert times[:5] == [0, 0.5, 1.5, 3.5, 7.5]
    assert times[-1] - times[-2] == 60
    rig.broker.error = None
    await passed(61)
    rig.broker.error = UNREACHABLE
    began = asyncio.get_running_loop().time()
    await rig.delete(key)
    await passed(3)
    assert [call.at - began for call in rig.broker.named("release")] == [0, 0.5, 1.5]


@requester()
async def test_reconnect_ends_every_backoff(rig):
    rig.broker.error = UNREACHABLE
    keys = [await rig.create_request(f"w{number}") for number in range(4)]
    await passed(605)
    rig.broker.error = None
    rig.reservations.notify_reconnected()
    await settled()
    for key in keys:
        await rig.expect(key, "Reserved")


# -- calls that hang


@requester()
async def test_many_requests_that_hang_say_so_and_block_no_release(rig):
    held = await rig.create_request("held")
    rig.broker.error = UNREACHABLE
    lost = await rig.create_request("lost")
    rig.broker.error = None
    rig.broker.seconds["request"] = FOREVER
    count = 2 * agent_requester.MAX_CONCURRENT_REQUESTS
    keys = [await rig.create_request(f"w{number}") for number in range(count)]
    for key in keys:
        await rig.expect(key, "Pending", reason="Asking")
    await rig.delete(held)
    assert not await rig.is_there(held)
    rig.broker.seconds.clear()
    await rig.delete(lost)
    assert not await rig.is_there(lost)
    assert asyncio.get_running_loop().time() == 0
    assert rig.broker.reserved == {}


@requester()
async def test_calls_that_hang_time_out_and_all_requests_get_their_turn(rig):
    rig.broker.seconds["request"] = FOREVER
    count, limit = 2 * agent_requester.MAX_CONCURRENT_REQUESTS, {"requested_memory": "1Mi"}
    keys = [await rig.create_request(f"w{number}", cpu="10m", **limit) for number in range(count)]
    assert len(rig.broker.keys) == agent_requester.MAX_CONCURRENT_REQUESTS
    await passed(10)
    status = await rig.expect(keys[0], "Pending", reason="BrokerUnreachable")
    assert "did not answer within 10s" in status.message
    rig.broker.seconds.clear()
    await passed(61)
    assert {(await rig.status(key)).phase for key in keys} == {"Reserved"}
    assert len(set(rig.broker.keys)) == count


@pytest.mark.parametrize("call", ["release", "renew", "find"])
@requester()
async def test_every_call_has_a_timeout(rig, call):
    key = await rig.create_request(renew=True, duration="3m")
    rig.broker.seconds[call] = FOREVER
    if call == "release":
        await rig.delete(key)
    elif call == "find":
        rig.reservations.remove("rsv-1")
    await passed(150)
    rig.broker.seconds.clear()
    assert len(rig.broker.named(call)) > 1
    await passed(61)
    assert await rig.is_there(key) == (call != "release")


# -- failures of the cluster's objects


@requester()
async def test_result_that_cannot_be_written_is_retried_and_nothing_is_reserved_twice(rig):
    rig.broker.seconds["request"] = 1
    key = await rig.create_request()
    rig.objects.error = errors.Conflict("it is another one now")
    await passed(30)
    await rig.expect(key, "Pending")
    rig.objects.error = None
    await passed(61)
    await rig.expect(key, "Reserved", reservation_name="rsv-1")
    assert rig.broker.reserved == {"p1": "1 CPU / 1Gi Memory"}


@requester()
async def test_nothing_is_requested_before_it_could_be_written(rig):
    await rig.stop()
    await rig.create_request()
    rig.objects.error = errors.Unavailable("read only")
    await rig.start()
    await passed(600)
    assert rig.broker.calls == []
    rig.objects.error = None
    await passed(61)
    await rig.expect("default/w", "Reserved")


class UnwatchableObjects(FailingObjects):
    error: Exception | None = errors.Unavailable("no API server")

    def watch(self, kind):
        if self.error is not None:
            raise self.error
        return super().watch(kind)


@requester(objects=UnwatchableObjects)
async def test_objects_that_cannot_be_watched_make_the_component_unhealthy_and_are_retried(rig):
    await passed(100)
    assert "cannot watch resourcerequests: no API server" in rig.health.not_ready_reason
    rig.objects.error = None
    await passed(31)
    assert rig.health.errors == {}
    await rig.expect(await rig.create_request(), "Reserved")


@in_virtual_time
async def test_bug_ends_the_task_with_its_exception():
    rig = requesters.Rig()
    rig.broker.error = ZeroDivisionError("a bug")  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError, match="a bug"):
        async with rig.running():
            await rig.create_request()


# -- the request of an object: its fields, its key, its state

SPEC = ResourceRequestSpec(requested_cpu="1", requested_memory="1Gi")


@pytest.mark.parametrize("namespaces", [("team-b",), ("team-a", "kube-system")])
@requester()
async def test_only_its_own_namespace_may_be_offloaded(rig, namespaces):
    key = await rig.create_request(namespace="team-a", namespaces=namespaces)
    message = f"spec.namespaces: {namespaces[-1]} is not the namespace of this ResourceRequest"
    status = await rig.expect(key, "Failed", reason="InvalidInput")
    assert status.message == f"{message}; create a ResourceRequest in that namespace"
    assert rig.broker.keys == []
    found = await rig.found(key)
    expected = ("team-a",) if "team-a" in namespaces else ()
    assert resource_requests.allowed_namespaces(found) == expected


@requester()
async def test_all_of_the_spec_reaches_the_broker(rig):
    rig.broker.offers = {"p1": "cpu=8,memory=16Gi,gpu=2,storage=1Ti,example.com/fpga=3"}
    spec = ResourceRequestSpec(
        requested_cpu="1500m",
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
        constraints=bodies.Constraints(labels={}, exclude=["p2"]),
        failover=False,
        renew=True,
    )
    request = resource_requests.request_from_spec(spec)
    amounts = bodies.Quantities("1500m", "256Mi", "2", "10Gi", {"example.com/fpga": "1"})
    assert request.requested_resources == amounts
    names = ("priority", "duration", "wait", "policy", "weights", "target_cluster_id")
    for field in (*names, "constraints", "failover"):
        assert getattr(request, field) == getattr(spec, field)
    await rig.objects.apply(ResourceRequest(Metadata("w"), spec))
    await settled()
    made = rig.broker.runner[ReservationId("rsv-1")].request
    assert made == conversion.to_request(request, ClusterId("me"), rig.broker.keys[0], LIMITS)


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
        ({"extended_resources": {"a.b/c": "?"}}, "spec.extendedResources.a.b/c: '?' is not a"),
        ({"extended_resources": {"!": "1"}}, "spec.extendedResources.!: "),
        ({"duration": "1"}, "spec.duration: '1' has a number without a unit"),
        ({"duration": "0s"}, "spec.duration: '0s' must be greater than zero"),
        ({"wait": "soon"}, "spec.wait: 'soon' is not a duration"),
        ({"wait": "-1s"}, "spec.wait: '-1s' must not be negative"),
        ({"priority": 2**31}, "spec.priority: must be at most 2147483647"),
        ({"target_cluster_id": "x" * 254}, "spec.targetClusterID: must have at most 253 "),
    ],
)
def test_invalid_field_is_named(fields, message):
    assert resource_requests.request_from_spec(replace(SPEC, wait="0s")).wait == "0s"
    with pytest.raises(errors.InvalidInput) as refused:
        resource_requests.request_from_spec(replace(SPEC, **fields))
    assert refused.value.message.startswith(message)


def test_idempotency_key_is_the_same_for_one_generation_of_one_object_only():
    key = resource_requests.idempotency_key
    others = [("you", "u", 1), ("me", "v", 1), ("me", "u", 2), ("m", "eu", 1), ("me", "u1", 1)]
    others += [("me", "u", 11), ("m\u00e9\n", "u" * 5000, 1)]
    keys = {key(*identity) for identity in [("me", "u", 1), *others]}
    assert key("me", "u", 1) == key("me", "u", 1)
    assert len(keys) == 1 + len(others)
    assert all(len(each) <= route.MAX_KEY_LENGTH and each.isascii() for each in keys)
    assert all(each.isprintable() for each in keys)


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
    errors.UnexpectedResponse,
    errors.MissingRoute,
}


def test_transient_errors_are_those_that_are_no_decision_of_the_broker():
    ours = {kind for kind in subclasses(errors.KubelendError) if kind.__module__ == errors.__name__}
    assert {kind for kind in ours if resource_requests.is_transient(kind("why"))} == TRANSIENT
