"""A reservation is renewed while its object lives and says so, and its end is the broker's word."""

import pytest

import make
from kubelend.core import errors
from kubelend.core.lifecycle import Reason
from kubelend.core.models import ReservationId
from requesters import GONE, away, passed, running
from virtual_time import in_virtual_time, now

CLOCKS = pytest.mark.parametrize(
    "off", [0 * make.HOUR, make.HOUR, -make.HOUR], ids=["right", "an hour ahead", "an hour behind"]
)


@in_virtual_time
async def test_one_that_says_so_is_renewed_when_a_third_is_left_again_and_again():
    async with running() as rig:
        key = await rig.create_request(renew=True)
        await passed(39 * 60)
        assert rig.broker.named("renew") == []
        await passed(10 * 3600)
        assert [call.at for call in rig.broker.named("renew")][:3] == [2400, 4800, 7200]
        status = await rig.status(key)
        assert status.phase == "Reserved"
        assert status.expires_at is not None
        assert status.expires_at > now()


@in_virtual_time
async def test_those_made_together_are_not_renewed_together():
    async with running(chance=1.0) as rig:
        await rig.create_request(renew=True)
        await passed(3600)
        assert [call.at for call in rig.broker.named("renew")] == [2280]


@CLOCKS
@in_virtual_time
async def test_one_that_does_not_say_so_ends_without_being_told_whatever_the_clock_says(off):
    async with running(clock=away(off)) as rig:
        key = await rig.create_request()
        await passed(3599)
        assert (await rig.status(key)).phase == "Reserved"
        await passed(1)
        status = await rig.status(key)
        assert (status.phase, status.reason) == ("Expired", "Expired")
        assert status.message == "Duration elapsed"
        assert rig.broker.named("renew") == []
        assert len(rig.broker.named("find")) == 1


@CLOCKS
@in_virtual_time
async def test_a_clock_that_is_wrong_neither_ends_nor_loses_one_that_is_renewed(off):
    async with running(clock=away(off)) as rig:
        key = await rig.create_request(renew=True)
        await passed(24 * 3600)
        assert (await rig.status(key)).phase == "Reserved"
        assert len(rig.broker.named("renew")) == 36


@CLOCKS
@in_virtual_time
async def test_an_agent_that_starts_with_a_wrong_clock_loses_nothing_that_is_renewed(off):
    async with running() as first:
        key = await first.create_request(renew=True, duration="2h")
        await passed(70 * 60)
    async with running(objects=first.objects, broker=first.broker, clock=away(off)) as rig:
        await passed(10 * 3600)
        assert (await rig.status(key)).phase == "Reserved"
        assert len(rig.broker.named("renew")) < 10


@pytest.mark.parametrize(
    "off, latest",
    [(make.HOUR, 3660), (-make.HOUR, 5400), (0 * make.HOUR, 3600)],
    ids=["an hour ahead", "an hour behind", "right"],
)
@in_virtual_time
async def test_an_agent_that_starts_with_a_wrong_clock_asks_instead_of_ending_it_by_itself(
    off, latest
):
    async with running() as first:
        key = await first.create_request()
        await passed(1800)
    async with running(objects=first.objects, broker=first.broker, clock=away(off)) as rig:
        await passed(1799)
        assert (await rig.status(key)).phase == "Reserved"
        await passed(latest - 3599)
        assert (await rig.status(key)).phase == "Expired"
        assert len(rig.broker.named("find")) <= 33


@in_virtual_time
async def test_the_brokers_word_ends_it_at_once():
    async with running() as rig:
        key = await rig.create_request()
        await passed(60)
        rig.broker.desk.now = make.T0 + 2 * make.HOUR
        rig.broker.desk.expire()
        await rig.hear("rsv-1")
        assert (await rig.status(key)).phase == "Expired"
        assert rig.broker.named("find") == []


@in_virtual_time
async def test_a_broker_that_is_away_at_the_end_is_waited_for():
    async with running() as rig:
        key = await rig.create_request()
        rig.broker.trouble = GONE
        await passed(2 * 3600)
        assert (await rig.status(key)).phase == "Reserved"
        rig.broker.trouble = None
        await passed(61)
        assert (await rig.status(key)).phase == "Expired"


@in_virtual_time
async def test_a_renewal_that_fails_is_told_and_tried_again():
    async with running() as rig:
        key = await rig.create_request(renew=True)
        rig.broker.trouble = GONE
        await passed(45 * 60)
        status = await rig.status(key)
        assert (status.phase, status.reason) == ("Reserved", "BrokerUnreachable")
        assert status.message == (
            "Resources reserved in cluster p1; renewal failed: nobody answers"
        )
        writes = await rig.writes(key)
        await passed(10 * 60)
        assert await rig.writes(key) == writes
        rig.broker.trouble = None
        await passed(61)
        status = await rig.status(key)
        assert (status.reason, status.message) == ("Locked", "Resources reserved in cluster p1")
        assert rig.broker.named("renew")[-1].at < 3600


@in_virtual_time
async def test_one_that_could_not_be_renewed_in_time_is_expired_and_says_why():
    async with running() as rig:
        key = await rig.create_request(renew=True)
        rig.broker.trouble = GONE
        await passed(3700)
        rig.broker.trouble = None
        await passed(61)
        status = await rig.status(key)
        assert (status.phase, status.reason) == ("Expired", "Expired")
        assert status.message.startswith("Duration elapsed; renewal failed: ")


@in_virtual_time
async def test_a_renewal_that_is_refused_is_tried_again_too():
    async with running() as rig:
        key = await rig.create_request(renew=True)
        rig.broker.trouble = errors.QuotaExceeded("budget is spent")
        await passed(45 * 60)
        assert "renewal failed: budget is spent" in (await rig.status(key)).message
        rig.broker.trouble = None
        await passed(61)
        assert (await rig.status(key)).reason == "Locked"


@in_virtual_time
async def test_one_that_is_not_to_be_renewed_any_more_forgets_that_it_could_not_be():
    async with running() as rig:
        key = await rig.create_request(renew=True)
        rig.broker.trouble = GONE
        await passed(45 * 60)
        await rig.change(key, renew=False)
        status = await rig.status(key)
        assert (status.reason, status.message) == ("Locked", "Resources reserved in cluster p1")
        tried = len(rig.broker.named("renew"))
        await passed(600)
        assert len(rig.broker.named("renew")) == tried


@in_virtual_time
async def test_one_whose_answer_came_late_is_renewed_in_time_all_the_same():
    async with running(clock=away(-make.HOUR)) as rig:
        rig.broker.loses_answers = True
        key = await rig.create_request(renew=True)
        await passed(50 * 60)
        rig.broker.loses_answers = False
        await passed(3600)
        assert (await rig.status(key)).phase == "Reserved"
        assert len(rig.broker.desk.ledger.reservations) == 1


@in_virtual_time
async def test_one_that_the_stream_told_of_before_the_answer_came_is_renewed():
    async with running() as rig:
        rig.broker.takes_after = 5
        await rig.create_request(renew=True)
        await rig.hear("rsv-1")
        rig.broker.takes_after = 0
        await passed(3600)
        assert len(rig.broker.named("renew")) == 1


@in_virtual_time
async def test_renew_can_change_while_it_lives():
    async with running() as rig:
        key = await rig.create_request()
        await rig.change(key, renew=True)
        assert (await rig.status(key)).message == "Resources reserved in cluster p1"
        await passed(3 * 3600)
        assert (await rig.status(key)).phase == "Reserved"
        await rig.change(key, renew=False)
        renewed = len(rig.broker.named("renew"))
        await passed(3601)
        assert (await rig.status(key)).phase == "Expired"
        assert len(rig.broker.named("renew")) == renewed


@in_virtual_time
async def test_one_that_others_made_longer_is_not_asked_after_before_its_new_end():
    async with running() as rig:
        key = await rig.create_request()
        await rig.broker.renew("rsv-1", "5h")
        await rig.hear("rsv-1")
        await passed(5 * 3600 - 1)
        assert rig.broker.named("find") == []
        assert (await rig.status(key)).expires_at == make.T0 + 5 * make.HOUR
        await passed(1)
        assert (await rig.status(key)).phase == "Expired"


@in_virtual_time
async def test_one_in_use_is_active_and_still_renewed():
    async with running() as rig:
        key = await rig.create_request(renew=True)
        rig.broker.desk.activate(ReservationId("rsv-1"))
        await rig.hear("rsv-1")
        status = await rig.status(key)
        assert (status.phase, status.reason) == ("Active", "InUse")
        assert status.message == "Resources in use in cluster p1"
        await passed(3601)
        assert (await rig.status(key)).phase == "Active"


@in_virtual_time
async def test_one_that_moves_names_the_old_and_the_new_cluster():
    async with running() as rig:
        key = await rig.create_request()
        rig.broker.desk.refuse(ReservationId("rsv-1"), "p1")
        await rig.hear("rsv-1")
        status = await rig.status(key)
        assert (status.phase, status.reason, status.target_cluster_id) == (
            "Reserved",
            "Moved",
            "p2",
        )
        assert status.message == "Resources reserved in cluster p2, moved there from cluster p1"


@in_virtual_time
async def test_one_that_an_administrator_takes_back_is_released_and_not_asked_for_again():
    async with running() as rig:
        key = await rig.create_request(renew=True)
        rig.broker.desk.release(ReservationId("rsv-1"), Reason.BY_ADMIN)
        await rig.hear("rsv-1")
        status = await rig.status(key)
        assert (status.phase, status.reason) == ("Released", "ReleasedByAdmin")
        assert status.message == "Released by an administrator"
        await passed(3600)
        assert len(rig.broker.keys) == 1


@in_virtual_time
async def test_one_whose_providers_all_refuse_is_failed_with_the_reason():
    async with running() as rig:
        key = await rig.create_request()
        for provider in ("p1", "p2"):
            rig.broker.desk.refuse(ReservationId("rsv-1"), provider, "full")
        await rig.hear("rsv-1")
        status = await rig.status(key)
        assert (status.phase, status.reason) == ("Failed", "ProviderRefused")


@in_virtual_time
async def test_answers_twice_and_out_of_order_change_nothing():
    async with running() as rig:
        key = await rig.create_request()
        old = rig.broker.body("rsv-1")
        rig.broker.desk.refuse(ReservationId("rsv-1"), "p1")
        await rig.hear("rsv-1")
        writes = await rig.writes(key)
        for again in (old, rig.broker.body("rsv-1"), old):
            rig.reservations.put(again)
            await passed(1)
        assert await rig.writes(key) == writes
        assert (await rig.status(key)).target_cluster_id == "p2"


@in_virtual_time
async def test_what_the_stream_told_before_the_answer_came_is_newer_than_the_answer():
    async with running() as rig:
        rig.broker.takes_after = 5
        key = await rig.create_request()
        rig.broker.desk.refuse(ReservationId("rsv-1"), "p1")
        await rig.hear("rsv-1")
        await passed(5)
        assert (await rig.status(key)).target_cluster_id == "p2"
        assert await rig.writes(key) == 4, "made, finalizer, asking, reserved"
        assert (await rig.instruction("default/rsv-1")).spec.target_cluster_id == "p2"


@in_virtual_time
async def test_a_renewal_finds_out_that_it_is_over():
    async with running() as rig:
        key = await rig.create_request(renew=True)
        rig.broker.desk.release(ReservationId("rsv-1"), Reason.BY_ADMIN)
        await passed(2401)
        assert (await rig.status(key)).phase == "Released"


@in_virtual_time
async def test_one_that_the_broker_has_forgotten_is_failed():
    async with running() as first:
        key = await first.create_request()
    first.broker.forget("rsv-1")
    async with running(objects=first.objects, broker=first.broker) as rig:
        status = await rig.status(key)
        assert (status.phase, status.reason) == ("Failed", "ReservationLost")
        assert status.message == "Reservation rsv-1 not found on the broker"


@in_virtual_time
async def test_an_agent_that_starts_without_its_broker_leaves_everything_as_it_was():
    async with running() as first:
        key = await first.create_request(renew=True)
    first.broker.trouble = GONE
    async with running(objects=first.objects, broker=first.broker) as rig:
        writes = await rig.writes(key)
        await passed(600)
        assert await rig.writes(key) == writes
        rig.broker.trouble = None
        await passed(61)
        assert (await rig.status(key)).phase == "Reserved"
        assert len(rig.broker.keys) == 1


@in_virtual_time
async def test_one_that_is_over_is_asked_for_anew_when_its_spec_changes():
    async with running() as rig:
        key = await rig.create_request()
        await passed(3600)
        assert (await rig.status(key)).phase == "Expired"
        await rig.change(key, requested_cpu="2")
        status = await rig.status(key)
        assert (status.phase, status.reservation_name) == ("Reserved", "rsv-2")
        await passed(3600)
        assert (await rig.status(key)).phase == "Expired"
