"""A reservation is renewed while its request wants it, ends when the broker says so, and is released."""

import pytest

import make
import requesters
from fake_broker import UNREACHABLE
from kubelend.core import errors
from kubelend.core.lifecycle import Reason
from kubelend.core.models import ReservationId
from kubelend.wire.objects import ResourceRequest
from requesters import requester
from virtual_time import in_virtual_time, now, passed

HELD = {"p1": "1 CPU / 1Gi Memory"}
RESERVED = "Resources reserved in cluster p1"
RSV = ReservationId("rsv-1")

CLOCKS = pytest.mark.parametrize(
    "off", [0 * make.HOUR, make.HOUR, -make.HOUR], ids=["right", "an hour ahead", "an hour behind"]
)


def renewals(rig):
    return [call.at for call in rig.broker.named("renew")]


# -- renewal


@requester()
async def test_reservation_is_renewed_whenever_a_third_is_left(rig):
    key = await rig.create_request(renew=True)
    await passed(39 * 60)
    assert renewals(rig) == []
    await passed(10 * 3600)
    assert renewals(rig)[:3] == [2400, 4800, 7200]
    assert (await rig.expect(key, "Reserved")).expires_at > now()
    rig.broker.runner.activate(RSV)
    await rig.notify("rsv-1")
    await passed(3601)
    await rig.expect(key, "Active")


@requester(chance=1.0)
async def test_renewals_have_jitter(rig):
    await rig.create_request(renew=True)
    await passed(3600)
    assert renewals(rig) == [2280]


@CLOCKS
@requester()
async def test_restart_with_a_wrong_clock_loses_no_renewed_reservation(rig, off):
    key = await rig.create_request(renew=True, duration="2h")
    await passed(70 * 60)
    rig.skew = off
    await rig.restart()
    await passed(10 * 3600)
    await rig.expect(key, "Reserved")
    assert len(renewals(rig)) < 10


@pytest.mark.parametrize(
    "error", [UNREACHABLE, errors.QuotaExceeded("budget is spent")], ids=["transient", "permanent"]
)
@requester()
async def test_failed_renewal_is_reported_and_retried(rig, error):
    key = await rig.create_request(renew=True)
    rig.broker.error = error
    await passed(45 * 60)
    message = f"{RESERVED}; renewal failed: {error}"
    await rig.expect(key, "Reserved", reason=error.code, message=message)
    writes = await rig.writes(key)
    await passed(10 * 60)
    assert await rig.writes(key) == writes
    rig.broker.error = None
    await passed(61)
    await rig.expect(key, "Reserved", reason="Locked", message=RESERVED)
    assert renewals(rig)[-1] < 3600


@requester()
async def test_reservation_that_could_not_be_renewed_is_expired_and_says_why(rig):
    key = await rig.create_request(renew=True)
    rig.broker.error = UNREACHABLE
    await passed(2 * 3600)
    await rig.expect(key, "Reserved")
    rig.broker.error = None
    await passed(61)
    status = await rig.expect(key, "Expired", reason="Expired")
    assert status.message.startswith("Duration elapsed; renewal failed: ")


@requester()
async def test_renew_can_be_turned_on_and_off(rig):
    key = await rig.create_request()
    await rig.change(key, renew=True)
    await rig.expect(key, "Reserved", message=RESERVED)
    await passed(3 * 3600)
    rig.broker.error = UNREACHABLE
    await passed(45 * 60)
    assert "renewal failed" in (await rig.expect(key, "Reserved")).message
    await rig.change(key, renew=False)
    await rig.expect(key, "Reserved", reason="Locked", message=RESERVED)
    rig.broker.error = None
    attempts = len(renewals(rig))
    await passed(3601)
    await rig.expect(key, "Expired")
    assert len(renewals(rig)) == attempts


@requester()
async def test_reservation_whose_response_was_late_is_renewed_in_time(rig):
    rig.skew = -make.HOUR
    rig.broker.loses_responses = True
    key = await rig.create_request(renew=True)
    await passed(50 * 60)
    rig.broker.loses_responses = False
    await passed(3600)
    await rig.expect(key, "Reserved")
    assert len(rig.broker.runner.ledger.reservations) == 1


@requester()
async def test_reservation_that_the_stream_delivered_before_the_response_is_renewed(rig):
    rig.broker.response_delay = 5
    await rig.create_request(renew=True)
    await rig.notify("rsv-1")
    rig.broker.response_delay = 0
    await passed(3600)
    assert len(renewals(rig)) == 1


@requester()
async def test_renewal_learns_that_the_reservation_has_ended(rig):
    key = await rig.create_request(renew=True)
    rig.broker.runner.release(RSV, Reason.BY_ADMIN)
    await passed(2401)
    await rig.expect(key, "Released")


# -- expiry


@CLOCKS
@requester()
async def test_reservation_expires_in_time_without_an_instruction_by_any_clock(rig, off):
    rig.skew = off
    key = await rig.create_request()
    await passed(3599)
    await rig.expect(key, "Reserved")
    await passed(1)
    await rig.expect(key, "Expired", reason="Expired", message="Duration elapsed")
    assert (renewals(rig), len(rig.broker.named("find"))) == ([], 1)


@pytest.mark.parametrize(
    "off, latest",
    [(make.HOUR, 3660), (-make.HOUR, 5400), (0 * make.HOUR, 3600)],
    ids=["an hour ahead", "an hour behind", "right"],
)
@requester()
async def test_restart_with_a_wrong_clock_asks_the_broker_for_the_expiry(rig, off, latest):
    key = await rig.create_request()
    await passed(1800)
    rig.skew = off
    await rig.restart()
    await passed(1799)
    await rig.expect(key, "Reserved")
    await passed(latest - 3599)
    await rig.expect(key, "Expired")
    assert len(rig.broker.named("find")) <= 33


@requester()
async def test_reservation_that_others_renewed_is_not_fetched_before_its_new_expiry(rig):
    key = await rig.create_request()
    await rig.broker.renew("rsv-1", "5h")
    await rig.notify("rsv-1")
    await passed(5 * 3600 - 1)
    assert rig.broker.named("find") == []
    await rig.expect(key, "Reserved", expires_at=make.T0 + 5 * make.HOUR)
    await passed(1)
    await rig.expect(key, "Expired")


@requester()
async def test_expired_request_stays_so_when_it_is_to_be_renewed_too_late(rig):
    key = await rig.create_request()
    await passed(3600)
    await rig.expect(key, "Expired")
    await rig.change(key, renew=True)
    await passed(3600)
    await rig.expect(key, "Expired", reservation_name="rsv-1", observed_generation=2)
    assert len(rig.broker.keys) == 1


# -- states that the broker reports


def expire(runner):
    runner.now = make.T0 + 2 * make.HOUR
    runner.expire()


def refuse_everywhere(runner):
    for provider in ("p1", "p2"):
        runner.refuse(RSV, provider, "full")


@pytest.mark.parametrize(
    "change, phase, reason, message",
    [
        (expire, "Expired", "Expired", "Duration elapsed"),
        (lambda runner: runner.activate(RSV), "Active", "InUse", "Resources in use in cluster p1"),
        (
            lambda runner: runner.refuse(RSV, "p1"),
            "Reserved",
            "Moved",
            "Resources reserved in cluster p2, moved there from cluster p1",
        ),
        (
            lambda runner: runner.release(RSV, Reason.BY_ADMIN),
            "Released",
            "ReleasedByAdmin",
            "Released by an administrator",
        ),
        (refuse_everywhere, "Failed", "ProviderRefused", ""),
    ],
    ids=["expired", "active", "moved", "released", "refused"],
)
@requester()
async def test_state_of_the_reservation_is_reported_at_once(rig, change, phase, reason, message):
    key = await rig.create_request()
    change(rig.broker.runner)
    await rig.notify("rsv-1")
    status = await rig.expect(key, phase, reason=reason)
    assert status.message.startswith(message)
    await passed(1800)
    assert len(rig.broker.keys) == 1, "it is not requested again"
    assert rig.broker.named("find") == []


@requester()
async def test_state_that_arrives_before_the_response_is_newer(rig):
    rig.broker.response_delay = 5
    key = await rig.create_request()
    rig.broker.runner.refuse(RSV, "p1")
    await rig.notify("rsv-1")
    await passed(5)
    await rig.expect(key, "Reserved", target_cluster_id="p2")
    assert await rig.writes(key) == 4, "created, finalizer, requesting, reserved"
    assert (await rig.instruction("default/rsv-1")).spec.target_cluster_id == "p2"


@requester()
async def test_reservation_that_the_broker_does_not_know_is_failed(rig):
    key = await rig.create_request()
    await rig.stop()
    rig.broker.archive("rsv-1")
    await rig.start()
    message = "Reservation rsv-1 not found on the broker"
    await rig.expect(key, "Failed", reason="ReservationLost", message=message)


@requester()
async def test_restart_without_a_broker_changes_nothing(rig):
    key = await rig.create_request(renew=True)
    await rig.stop()
    rig.broker.error = UNREACHABLE
    await rig.start()
    writes = await rig.writes(key)
    await passed(600)
    assert await rig.writes(key) == writes
    rig.broker.error = None
    await passed(61)
    await rig.expect(key, "Reserved")
    assert len(rig.broker.keys) == 1


# -- deletion


@requester()
async def test_deleted_request_stays_until_its_reservation_is_released(rig):
    key = await rig.create_request()
    rig.broker.seconds["release"] = 5
    await rig.delete(key)
    assert await rig.is_there(key)
    await passed(5)
    assert not await rig.is_there(key)
    assert rig.broker.reserved == {}
    await passed(3600)
    assert len(rig.broker.named("release")) == 1


@requester()
async def test_deleted_request_says_why_it_waits_and_is_retried(rig):
    key = await rig.create_request()
    rig.broker.error = UNREACHABLE
    await rig.delete(key)
    message = "Deletion waits until the reservation is released: no route"
    await rig.expect(key, "Reserved", reason="BrokerUnreachable", message=message)
    writes = await rig.writes(key)
    await passed(1800)
    assert await rig.writes(key) == writes
    rig.broker.error = None
    await passed(61)
    assert not await rig.is_there(key)
    assert rig.broker.reserved == {}


@pytest.mark.parametrize("cpu", ["1", "99", "none", "released"])
@requester()
async def test_request_that_holds_nothing_is_deleted_without_a_call(rig, cpu):
    key = await rig.create_request(cpu="1" if cpu == "released" else cpu)
    if cpu == "released":
        rig.broker.runner.release(RSV)
        await rig.notify("rsv-1")
    else:
        await passed(3700)
    rig.broker.calls.clear()
    await rig.delete(key)
    assert not await rig.is_there(key)
    await passed(60)
    assert rig.broker.calls == []


@pytest.mark.parametrize("is_known", [False, True], ids=["not found", "revoked"])
@requester()
async def test_request_whose_release_fails_permanently_is_deleted(rig, is_known):
    key = await rig.create_request()
    if is_known:
        rig.broker.error = errors.Revoked("this certificate is revoked")
    else:
        rig.broker.archive("rsv-1")
    await rig.delete(key)
    assert not await rig.is_there(key)
    if not is_known:
        assert (await rig.instruction("default/rsv-1")).status.phase == "Finished"


@requester()
async def test_deleted_request_leaves_the_wait_queue(rig):
    await rig.create_request("big", cpu="8", requested_gpu="2")
    key = await rig.create_request("waits", cpu="5", wait="10m")
    await rig.delete(key)
    assert not await rig.is_there(key)
    assert rig.broker.runner.waiting() == []


@pytest.mark.parametrize("when", ["response lost", "agent down", "during the call"])
@requester()
async def test_reservation_without_a_known_response_is_released(rig, when):
    is_lost = when == "response lost"
    rig.broker.loses_responses, rig.broker.response_delay = is_lost, 0 if is_lost else 5
    key = await rig.create_request()
    await passed(1)
    if when == "agent down":
        await rig.stop()
    await rig.delete(key)
    assert rig.broker.reserved == HELD
    assert await rig.is_there(key)
    rig.broker.loses_responses, rig.broker.response_delay = False, 0
    if when == "agent down":
        await rig.start()
    await passed(61)
    assert not await rig.is_there(key)
    assert rig.broker.reserved == {}
    assert len(rig.broker.runner.ledger.reservations) == 1


@requester()
async def test_request_that_would_be_rejected_now_is_deleted(rig):
    rig.broker.error = UNREACHABLE
    key = await rig.create_request(cpu="99")
    await rig.delete(key)
    assert await rig.is_there(key)
    rig.broker.error = None
    rig.broker.keys.clear()
    await passed(600)
    assert not await rig.is_there(key)
    assert len(rig.broker.keys) == 1


@requester()
async def test_reservation_is_released_though_another_client_removed_the_finalizer(rig):
    key = await rig.create_request()
    await rig.set_finalizers(key)
    await rig.delete(key)
    assert not await rig.is_there(key)
    assert rig.broker.reserved == {}
    await passed(3600)
    assert len(rig.broker.named("release")) == 1


@requester()
async def test_recreated_request_does_not_inherit_the_reservation(rig):
    rig.broker.error = UNREACHABLE
    key = await rig.create_request(cpu="2")
    await rig.set_finalizers(key)
    await rig.objects.delete(ResourceRequest, key)
    await rig.create_request(cpu="1")
    rig.broker.error = None
    await passed(61)
    await rig.expect(key, "Reserved")
    assert rig.broker.reserved == HELD
    await rig.change(key, renew=True)
    assert len(rig.broker.named("release")) == 1


@requester()
async def test_finalizer_that_cannot_be_removed_is_retried(rig):
    key = await rig.create_request()
    rig.objects.error = errors.Unavailable("no API server")
    await rig.delete(key)
    await passed(60)
    assert await rig.is_there(key)
    assert rig.broker.reserved == {}
    rig.objects.error = None
    await passed(61)
    assert not await rig.is_there(key)
    assert len(rig.broker.named("release")) == 1


@in_virtual_time
async def test_nothing_is_requested_for_an_object_that_is_being_deleted():
    rig = requesters.Rig()
    key = await rig.create_request()
    await rig.set_finalizers(key, "example.com/theirs")
    await rig.delete(key)
    async with rig.running():
        await passed(60)
        assert rig.broker.calls == []
        assert (await rig.found(key)).metadata.finalizers == ("example.com/theirs",)
