"""A provider that was killed, or whose broker or cluster is away, gives away nothing and forgets nothing."""

from asyncio import sleep

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

import make
from kubelend.core.errors import BrokerUnreachable, Unavailable, WrongPhase
from kubelend.core.lifecycle import Phase
from lenders import EIGHT, FINISHED_FOR, House
from virtual_time import in_virtual_time, settled

THREE = make.resources("cpu=3,memory=1Gi")
GONE = BrokerUnreachable("gone")


@in_virtual_time
async def test_after_a_restart_holds_are_there_before_anything_else():
    house = House()
    async with house.lending():
        found = await house.lend()
    house.start_anew()
    house.broker.trouble = GONE
    await house.provider.restore()
    assert house.holds() == {found: THREE}
    async with house.lending():
        await sleep(600)
        assert house.holds() == {found: THREE}
        assert len(house.on_holds) == 1


@in_virtual_time
async def test_after_a_restart_what_is_over_by_then_is_withdrawn_at_the_brokers_word():
    house = House()
    async with house.lending():
        over, live = await house.lend(), await house.lend()
    house.start_anew()
    house.release(over)
    async with house.lending():
        await house.tell(live)  # as the broker's list does
        await sleep(5)
        assert house.holds() == {live: THREE}
        assert await house.phase(over) == "Withdrawn"
        assert [call.reservation for call in house.broker.named("find")] == [over]


@in_virtual_time
async def test_what_was_held_before_a_restart_is_not_decided_anew():
    house = House()
    async with house.lending():
        found = await house.lend()
    house.start_anew()
    house.measure(pods=EIGHT)
    async with house.lending():
        await house.tell(found)
        assert house.holds() == {found: THREE}
        assert house.broker.reasons == {}


@in_virtual_time
async def test_killed_between_the_object_and_the_acknowledgement_it_goes_on_from_there():
    house = House()
    house.broker.seconds["acknowledge"] = 10
    async with house.lending():
        found = await house.lend()
        assert await house.phase(found) == ""
    house.start_anew()
    house.measure()
    house.broker.seconds = {}
    async with house.lending():
        await house.tell(found)
        assert await house.phase(found) == "Held"
        assert house.holds() == {found: THREE}


@in_virtual_time
async def test_finished_objects_are_cleaned_up_after_a_restart_too():
    house = House()
    async with house.lending():
        found = await house.lend()
        house.release(found)
        await house.tell(found)
    house.start_anew()
    async with house.lending():
        assert house.holds() == {}
        await sleep(FINISHED_FOR.total_seconds() + 1)
        assert await house.instruction(found) is None
        assert house.broker.named("find") == []


@in_virtual_time
async def test_an_object_that_somebody_has_spoilt_waits_for_the_brokers_word():
    house = House()
    async with house.lending():
        found = await house.lend()
    instruction = await house.instruction(found)
    assert instruction is not None
    spoilt = replace(instruction, spec=replace(instruction.spec, requested_cpu="much"))
    await house.objects.apply(spoilt)
    house.start_anew()
    async with house.lending():
        assert house.holds() == {}
        await sleep(3)
        assert house.holds() == {found: THREE}


@in_virtual_time
async def test_enforcement_that_is_turned_off_leaves_what_was_promised_promised():
    house = House()
    async with house.lending():
        found = await house.lend()
    house.enforce = False
    house.start_anew()
    async with house.lending():
        await house.tell(found)
        instruction = await house.instruction(found)
        assert house.holds() == {found: THREE}
        assert instruction is not None
        assert (instruction.status.phase, instruction.status.enforced) == ("Held", False)


@in_virtual_time
async def test_without_enforcement_holds_are_there_after_a_restart_as_well():
    house = House(enforce=False)
    async with house.lending():
        found = await house.lend()
    house.start_anew()
    await house.provider.restore()
    assert house.holds() == {found: THREE}


# -- faults


@in_virtual_time
async def test_a_status_is_set_though_somebody_changes_the_object_in_that_moment():
    house = House()
    house.objects.meddling = True
    async with house.lending():
        with capture_logs() as lines:
            found = await house.lend()
        instruction = await house.instruction(found)
        assert instruction is not None
        assert (instruction.status.phase, instruction.metadata.labels) == ("Held", {"team": "a"})
        assert [line["event"] for line in lines] == ["Reservation held"]


@in_virtual_time
async def test_what_waits_for_another_try_is_tried_as_soon_as_the_broker_is_heard_again():
    house = House()
    house.broker.trouble = GONE
    async with house.lending():
        found = await house.lend()
        await sleep(300)
        house.broker.trouble = None
        house.reservations.notify_reconnected()
        await settled()
        assert house.is_acknowledged(found)


@in_virtual_time
async def test_what_fails_for_now_is_tried_again_and_told_once():
    house = House()
    house.broker.trouble = GONE
    async with house.lending():
        with capture_logs() as lines:
            found = await house.lend()
            await sleep(300)
        assert house.holds() == {found: THREE}
        assert 5 < len(house.broker.named("acknowledge")) < 30
        assert [line["log_level"] for line in lines] == ["warning"]
        house.broker.trouble = None
        await sleep(61)
        assert await house.phase(found) == "Held"


@pytest.mark.parametrize("pods", ["", EIGHT], ids=["acknowledges", "refuses"])
@pytest.mark.parametrize("end", ["released", "forgotten"])
@in_virtual_time
async def test_old_knowledge_is_corrected_when_the_broker_says_so(pods, end):
    house = House()
    house.measure(pods=pods)
    async with house.lending():
        found = house.reserve()
        old = house.broker.body(found)
        house.release(found) if end == "released" else house.broker.forget(found)
        house.reservations.put(old)
        await sleep(3)
        assert house.holds() == {}
        assert await house.phase(found) in ("Withdrawn", None)
        known = house.reservations.find(found)
        assert known is None or known.status.phase == Phase.RELEASED
        assert len(house.broker.calls) <= 3


@in_virtual_time
async def test_one_slow_answer_keeps_no_other_reservation_waiting():
    house = House()
    async with house.lending():
        house.broker.seconds["acknowledge"] = 10
        slow = await house.lend("cpu=1,memory=1Gi")
        house.broker.seconds = {}
        quick = await house.lend("cpu=1,memory=1Gi")
        assert await house.phase(slow) == ""
        assert await house.phase(quick) == "Held"
        await sleep(11)


@in_virtual_time
async def test_objects_that_cannot_be_read_are_reported_and_waited_for():
    house = House()
    async with house.lending():
        found = await house.lend()
    house.start_anew()
    house.health.require("provider")
    house.objects.trouble = Unavailable("no API server")
    async with house.lending():
        await sleep(10)
        assert house.health.errors == {
            "provider": "cannot read ProviderInstructions: no API server"
        }
        house.objects.trouble = None
        await sleep(3)
        assert house.health.not_ready_reason == ""
        assert house.holds() == {found: THREE}


@in_virtual_time
async def test_what_was_deleted_while_nobody_watched_comes_back():
    house = House()
    async with house.lending():
        found = await house.lend()
    instruction = await house.instruction(found)
    assert instruction is not None
    house.start_anew()
    await house.provider.restore()
    await house.objects.delete(type(instruction), instruction.key)
    async with house.lending():
        assert house.holds() == {found: THREE}
        await sleep(3)
        assert house.holds() == {found: THREE}
        assert await house.phase(found) == "Held"


@in_virtual_time
async def test_a_promise_whose_acknowledgement_was_heard_is_kept_though_the_answer_was_lost():
    house = House()
    house.broker.lost.add("acknowledge")
    async with house.lending():
        found = await house.lend()
        house.measure(pods=EIGHT)  # by now it would be refused
        house.broker.lost.clear()
        await sleep(5)
        assert house.broker.named("refuse") == []
        assert house.holds() == {found: THREE}
        assert await house.phase(found) == "Held"


@in_virtual_time
async def test_a_refusal_whose_answer_was_lost_is_repeated_and_stays_one():
    house = House()
    house.measure(pods=EIGHT)
    house.broker.lost.add("refuse")
    async with house.lending():
        found = house.broker.desk.reserve("cpu=3,memory=1Gi")
        await house.tell(found)
        house.broker.lost.clear()
        await sleep(5)
        assert house.broker.desk.target(found) == "other"
        assert await house.phase(found) == "Refused"
        assert house.holds() == {}


@in_virtual_time
async def test_a_broker_that_contradicts_itself_is_asked_again():
    house = House()
    house.broker.refused["acknowledge"] = WrongPhase("not now")
    async with house.lending():
        found = await house.lend()
        await sleep(30)
        assert await house.phase(found) == ""
        assert house.holds() == {found: THREE}
        house.broker.refused.clear()
        await sleep(61)
        assert await house.phase(found) == "Held"
