"""A promise follows what becomes of its reservation, and only the broker's word ends it."""

from asyncio import sleep

import pytest
from msgspec.structs import replace

import make
from kubelend.core.errors import BrokerUnreachable
from kubelend.wire.objects import Metadata, ProviderInstruction
from lenders import EIGHT, FINISHED_FOR, House
from make import HOUR, MINUTE
from virtual_time import in_virtual_time, settled

THREE = make.resources("cpu=3,memory=1Gi")
GONE = BrokerUnreachable("gone")


@in_virtual_time
async def test_renewal_changes_the_object():
    house = House()
    async with house.lending():
        found = await house.lend()
        house.broker.desk.renew(found, 2 * HOUR)
        await house.tell(found)
        instruction = await house.instruction(found)
        assert instruction is not None
        assert instruction.spec.expires_at == make.T0 + 2 * HOUR
        assert instruction.status.phase == "Held"
        assert len(house.on_holds) == 1


def released(house, found):
    house.release(found)


def expired(house, found):
    house.broker.desk.pass_time(HOUR)
    house.broker.desk.expire()


def drained(house, found):
    house.broker.desk.drain("me")


@pytest.mark.parametrize(
    "end, message",
    [
        (released, "Released by requester r"),
        (expired, "Duration elapsed"),
        (drained, "Cluster me was drained: maintenance; then 0/2 clusters fit: 1 LeftBefore"),
    ],
)
@in_virtual_time
async def test_what_is_over_is_withdrawn_and_cleaned_up_after_a_while(end, message):
    house = House()
    async with house.lending():
        found = await house.lend()
        end(house, found)
        await house.tell(found)
        instruction = await house.instruction(found)
        assert house.holds() == {}
        assert instruction is not None
        assert (instruction.status.phase, instruction.status.enforced) == ("Withdrawn", False)
        assert instruction.status.message.startswith(message)
        assert instruction.status.finished_at == house.now()
        await sleep(FINISHED_FOR.total_seconds() - 1)
        assert await house.phase(found) == "Withdrawn"
        await sleep(2)
        assert await house.instruction(found) is None
        assert house.reservations.find(found) is None


@in_virtual_time
async def test_what_moved_elsewhere_is_withdrawn():
    house = House()
    async with house.lending():
        found = house.broker.desk.reserve("cpu=3,memory=1Gi")
        await house.tell(found)
        assert house.holds() == {found: THREE}
        house.broker.desk.drain("me")
        await house.tell(found)
        instruction = await house.instruction(found)
        assert instruction is not None
        assert instruction.status.message == "Moved to cluster other"
        assert house.holds() == {}
        assert house.reservations.find(found) is None


@in_virtual_time
async def test_what_moved_elsewhere_is_not_remembered_for_its_renewals_there():
    house = House()
    async with house.lending():
        found = house.broker.desk.reserve("cpu=3,memory=1Gi")
        await house.tell(found)
        house.broker.desk.drain("me")
        await house.tell(found)
        for phase in ["Withdrawn", None]:
            house.broker.desk.renew(found, 2 * HOUR)
            await house.tell(found)
            assert house.reservations.find(found) is None
            assert await house.phase(found) == phase
            await sleep(FINISHED_FOR.total_seconds() + 1)
        assert house.broker.named("find") == []


@in_virtual_time
async def test_what_the_broker_does_not_know_any_more_is_withdrawn():
    house = House()
    async with house.lending():
        found = await house.lend()
        house.broker.forget(found)
        await sleep(3)
        house.reservations.remove(found)
        await settled()
        instruction = await house.instruction(found)
        assert house.holds() == {}
        assert instruction is not None
        assert instruction.status.message == "Reservation not found on the broker"


@in_virtual_time
async def test_what_is_deleted_by_hand_comes_back_without_a_new_decision():
    house = House()
    async with house.lending():
        found = await house.lend()
        house.measure(pods=EIGHT)  # by now it would be refused
        instruction = await house.instruction(found)
        assert instruction is not None
        await house.objects.delete(type(instruction), instruction.key)
        await settled()
        anew = await house.instruction(found)
        assert anew is not None
        assert anew.metadata.uid != instruction.metadata.uid
        assert anew.status.phase == "Held"
        assert house.holds() == {found: THREE}


@in_virtual_time
async def test_what_is_changed_by_hand_is_put_right():
    house = House()
    async with house.lending():
        found = await house.lend()
        instruction = await house.instruction(found)
        assert instruction is not None
        spoilt = replace(instruction, spec=replace(instruction.spec, requested_cpu="100"))
        await house.objects.apply(spoilt)
        await settled()
        again = await house.instruction(found)
        assert again is not None
        assert again.spec == instruction.spec
        assert house.holds() == {found: THREE}


@in_virtual_time
async def test_nothing_is_written_or_asked_while_nothing_changes():
    house = House()
    async with house.lending():
        found = await house.lend()
        instruction, calls = await house.instruction(found), len(house.broker.calls)
        await sleep(50 * 60)
        house.reservations.put(house.broker.body(found))
        await settled()
        assert await house.instruction(found) == instruction
        assert len(house.broker.calls) == calls


# -- clocks


@in_virtual_time
async def test_a_clock_that_is_an_hour_ahead_withdraws_nothing():
    house = House(offset=HOUR + MINUTE)
    async with house.lending():
        found = await house.lend()
        assert house.holds() == {found: THREE}
        await sleep(59 * 60)
        assert house.holds() == {found: THREE}
        assert await house.phase(found) == "Held"
        assert len(house.broker.named("find")) < 65


@in_virtual_time
async def test_when_it_is_over_by_the_own_clock_the_broker_is_asked():
    house = House()
    async with house.lending():
        found = await house.lend()
        house.broker.desk.pass_time(HOUR)
        house.broker.desk.expire()
        await sleep(HOUR.total_seconds() - 1)
        assert house.holds() == {found: THREE}  # it has not heard of it
        await sleep(3)
        assert house.holds() == {}
        assert await house.phase(found) == "Withdrawn"


@in_virtual_time
async def test_while_the_broker_is_away_even_what_is_overdue_stays_held():
    house = House()
    async with house.lending():
        found = await house.lend()
        house.broker.trouble = GONE
        await sleep(2 * HOUR.total_seconds())
        assert house.holds() == {found: THREE}
        house.broker.trouble = None
        house.broker.desk.pass_time(2 * HOUR)
        house.broker.desk.expire()
        await house.tell(found)
        assert house.holds() == {}


# -- memory, and other people's objects


@in_virtual_time
async def test_what_was_over_before_it_was_seen_is_forgotten_after_a_while():
    house = House()
    async with house.lending():
        found = house.reserve()
        house.release(found)
        await house.tell(found)
        assert await house.instruction(found) is None
        assert house.reservations.find(found) is not None
        await sleep(FINISHED_FOR.total_seconds() + 1)
        assert house.reservations.find(found) is None


@in_virtual_time
async def test_what_ends_long_after_it_moved_elsewhere_is_forgotten_too():
    house = House()
    async with house.lending():
        found = house.broker.desk.reserve("cpu=3,memory=1Gi")
        await house.tell(found)
        house.broker.desk.drain("me")
        await house.tell(found)
        await sleep(2 * FINISHED_FOR.total_seconds())
        assert await house.instruction(found) is None
        house.release(found)
        await house.tell(found)
        await sleep(FINISHED_FOR.total_seconds() + 1)
        assert house.reservations.find(found) is None


@in_virtual_time
async def test_labels_that_somebody_put_on_an_object_stay():
    house = House()
    async with house.lending():
        found = await house.lend()
        instruction = await house.instruction(found)
        assert instruction is not None
        labelled = replace(instruction.metadata, labels={"team": "a"})
        await house.objects.apply(replace(instruction, metadata=labelled))
        house.broker.desk.renew(found, 2 * HOUR)
        await house.tell(found)
        again = await house.instruction(found)
        assert again is not None
        assert again.metadata.labels == {"team": "a"}
        assert again.spec.expires_at == make.T0 + 2 * HOUR


@pytest.mark.parametrize("name, namespace", [("by-hand", "lending"), ("rsv-9-provider", "else")])
@in_virtual_time
async def test_objects_that_are_not_its_own_are_left_alone(name, namespace):
    house = House()
    async with house.lending():
        found = await house.lend()
    instruction = await house.instruction(found)
    assert instruction is not None
    other = replace(instruction, metadata=Metadata(name, namespace))
    kept = await house.objects.apply(other)
    kept = await house.objects.set_status(replace(kept, status=instruction.status)) or kept
    house.start_anew()
    async with house.lending():
        assert list(house.holds()) == [found]
        await sleep(2 * FINISHED_FOR.total_seconds())
        assert await house.objects.find(ProviderInstruction, other.key) == kept


@in_virtual_time
async def test_an_object_that_was_ended_by_hand_without_a_time_goes_as_well():
    house = House()
    async with house.lending():
        found = await house.lend()
        house.release(found)
        await house.tell(found)
        instruction = await house.instruction(found)
        assert instruction is not None
        timeless = replace(instruction.status, finished_at=None)
        await house.objects.set_status(replace(instruction, status=timeless))
        await sleep(2 * FINISHED_FOR.total_seconds())
        assert await house.instruction(found) is None
