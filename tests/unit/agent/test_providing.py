"""What the broker promises for a cluster is set aside there, or refused for a reason."""

from asyncio import sleep

import pytest

import make
from kubelend.core.errors import BrokerUnreachable
from kubelend.core.lifecycle import Reason
from kubelend.core.pod_requests import OffloadedFrom, Pod
from kubelend.core.resources import Resources
from kubelend.wire.objects import ProviderInstructionSpec
from lenders import FINISHED_FOR, House
from make import HOUR
from virtual_time import in_virtual_time

THREE = make.resources("cpu=3,memory=1Gi")
GONE = BrokerUnreachable("gone")


@in_virtual_time
async def test_a_reservation_is_held_written_down_and_acknowledged():
    house = House()
    async with house.lending():
        found = await house.lend("cpu=3,memory=1Gi,gpu=0,example.com/fpga=0")
        instruction = await house.instruction(found)
        assert house.holds() == {found: THREE}
        assert house.is_acknowledged(found)
        assert house.reservations.find(found) == house.broker.body(found)
        assert instruction is not None
        assert instruction.spec == ProviderInstructionSpec(
            reservation_name=found,
            requester_cluster_id="r",
            requested_cpu="3",
            requested_memory="1Gi",
            message="Hold 3 CPU / 1Gi Memory for requester r",
            expires_at=house.broker.body(found).status.expires_at,
        )
        assert instruction.status.phase == "Held"
        assert instruction.status.enforced
        assert instruction.status.last_update_time == house.now()


@in_virtual_time
async def test_every_resource_that_was_asked_for_is_written_down():
    wanted = "cpu=3,memory=1Gi,gpu=2,storage=4Gi,example.com/fpga=1"
    house = House(nodes="cpu=8,memory=8Gi,gpu=4,storage=8Gi,example.com/fpga=1")
    house.broker.desk.advertise("me", "cpu=8,memory=8Gi,gpu=4,storage=8Gi,example.com/fpga=1")
    async with house.lending():
        found = await house.lend(wanted)
        instruction = await house.instruction(found)
        assert instruction is not None
        assert instruction.spec.requested_gpu == "2"
        assert instruction.spec.requested_storage == "4Gi"
        assert instruction.spec.extended_resources == {"example.com/fpga": "1"}
        assert house.holds() == {found: make.resources(wanted)}


@in_virtual_time
async def test_the_object_is_there_before_the_broker_hears_of_it_and_says_held_only_after():
    house = House()
    house.broker.seconds["acknowledge"] = 2
    async with house.lending():
        found = await house.lend()
        assert house.holds() == {found: THREE}
        assert await house.phase(found) == ""
        await sleep(3)
        assert await house.phase(found) == "Held"


@in_virtual_time
async def test_the_publisher_hears_of_every_change_of_holds():
    house = House()
    async with house.lending():
        first, second = await house.lend(), await house.lend()
        house.release(first)
        await house.tell(first)
        assert house.on_holds == [{first: THREE}, {first: THREE, second: THREE}, {second: THREE}]


@in_virtual_time
async def test_one_that_does_not_fit_is_refused_with_a_reason_and_goes_elsewhere():
    house = House()
    house.measure(pods="cpu=6,memory=1Gi")
    async with house.lending():
        found = house.broker.desk.reserve("cpu=3,memory=1Gi")
        await house.tell(found)
        assert house.broker.desk.target(found) == "other"
        assert house.broker.reasons == {
            found: "requested 3 CPU / 1Gi Memory, but only 2 CPU / 7Gi Memory is free"
        }
        assert house.holds() == {}
        assert house.on_holds == []
        instruction = await house.instruction(found)
        assert instruction is not None
        assert (instruction.status.phase, instruction.status.enforced) == ("Refused", False)
        assert instruction.status.message == house.broker.reasons[found]
        await sleep(FINISHED_FOR.total_seconds() + 1)
        assert await house.instruction(found) is None


@in_virtual_time
async def test_one_that_nobody_else_takes_fails_and_stays_refused():
    house = House(policy=make.policy(deny=["r"]))
    async with house.lending():
        found = await house.lend()
        assert house.broker.desk[found].reason is Reason.REFUSED
        assert await house.phase(found) == "Refused"


@in_virtual_time
async def test_of_two_that_come_at_once_for_the_last_capacity_the_second_is_refused():
    house = House()
    house.broker.seconds = {"acknowledge": 1, "refuse": 1}
    async with house.lending():
        first, second = house.reserve("cpu=5,memory=1Gi"), house.reserve("cpu=5,memory=1Gi")
        await house.tell(first, second)
        await sleep(2)
        assert house.is_acknowledged(first)
        assert house.holds() == {first: make.resources("cpu=5,memory=1Gi")}
        assert house.broker.reasons[second].endswith("only 3 CPU / 7Gi Memory is free")


@in_virtual_time
async def test_caps_count_what_is_promised_already():
    house = House(policy=make.policy(max_per_requester="cpu=4"))
    async with house.lending():
        first, second, other = (
            await house.lend(),
            await house.lend(),
            await house.lend(requester="x"),
        )
        assert [await house.phase(each) for each in (first, second, other)] == [
            "Held",
            "Refused",
            "Held",
        ]


@in_virtual_time
async def test_opening_hours_count_by_the_time_of_the_brokers_choice():
    """A clock that is hours off refuses nothing, and neither does a word that came late."""
    house = House(policy=make.policy(hours=["11:00-13:00"]), offset=5 * HOUR)
    async with house.lending():
        assert await house.phase(await house.lend()) == "Held"


@in_virtual_time
async def test_before_the_cluster_is_measured_it_waits_rather_than_refuses():
    house = House(nodes="")
    async with house.lending():
        found = await house.lend()
        await sleep(30)
        assert await house.instruction(found) is None
        assert house.broker.desk[found].target == "me"
        house.measure()
        await sleep(1)
        assert await house.phase(found) == "Held"


@pytest.mark.parametrize("word", ["acknowledged", "in use"])
@in_virtual_time
async def test_what_cannot_be_refused_any_more_is_held_whatever_is_free(word):
    house = House(nodes="cpu=1,memory=1Gi")
    found = house.reserve()
    if word == "acknowledged":
        house.broker.desk.acknowledge(found, "me")
    else:
        house.broker.desk.activate(found)
    async with house.lending():
        await house.tell(found)
        assert house.holds() == {found: THREE}
        assert await house.phase(found) == "Held"
        assert house.is_acknowledged(found)


@in_virtual_time
async def test_without_enforcement_it_is_held_whatever_is_free():
    house = House(nodes="", enforce=False)
    async with house.lending():
        found = await house.lend("cpu=50,memory=1Gi")
        instruction = await house.instruction(found)
        assert instruction is not None
        assert (instruction.status.phase, instruction.status.enforced) == ("Held", False)
        assert "enforcement is off" in instruction.status.message
        assert house.is_acknowledged(found)
        assert house.holds() == {found: make.resources("cpu=50,memory=1Gi")}


@pytest.mark.parametrize("enforce", [True, False])
@in_virtual_time
async def test_pods_of_a_reservation_count_once_with_and_without_enforcement(enforce):
    house = House(enforce=enforce)
    async with house.lending():
        found = await house.lend()
        pod = Pod(
            "p", "n", make.resources("cpu=2,memory=1Gi"), offloaded_from=OffloadedFrom("r", found)
        )
        house.inventory.put_pod(pod)
        # The broker, which is told this, subtracts what it has reserved by itself.
        assert house.inventory.totals().allocated == Resources()
        assert house.inventory.free() == make.resources("cpu=5,memory=7Gi")


@in_virtual_time
async def test_without_enforcement_the_policy_still_holds():
    house = House(enforce=False, policy=make.policy(max_lent="cpu=4"))
    async with house.lending():
        first, second = await house.lend(), await house.lend()
        assert [await house.phase(first), await house.phase(second)] == ["Held", "Refused"]


@in_virtual_time
async def test_reservations_of_others_are_none_of_its_business():
    house = House()
    async with house.lending():
        found = house.broker.desk.reserve("cpu=3,memory=1Gi", pinned="other")
        await house.tell(found)
        assert await house.instruction(found) is None
        assert house.broker.calls == []


@in_virtual_time
async def test_what_this_cluster_borrows_itself_is_left_to_others_to_forget():
    house = House()
    async with house.lending():
        found = house.broker.desk.reserve("cpu=3,memory=1Gi", requester="me", pinned="other")
        house.release(found)
        await house.tell(found)
        await sleep(2 * FINISHED_FOR.total_seconds())
        assert house.reservations.find(found) is not None


@in_virtual_time
async def test_a_reason_is_never_longer_than_the_broker_reads():
    house = House(
        policy=make.policy(hours=[f"Mon 00:00-00:{each:02}" for each in range(1, 60)] * 2)
    )
    async with house.lending():
        found = await house.lend()
        assert len(house.broker.reasons[found]) == 1024
