"""A broker that takes calls and never answers: everybody can see that, and nobody waits for another."""

import asyncio

import pytest

from kubelend.agent import requester
from requesters import GONE, passed, running
from virtual_time import in_virtual_time, settled

FOR_EVER = 1e6


@pytest.mark.parametrize("count", [8, 5 * requester.MAX_CONCURRENT_REQUESTS])
def test_however_many_ask_all_say_so_at_once(count):
    @in_virtual_time
    async def test():
        async with running() as rig:
            rig.broker.seconds["request"] = FOR_EVER
            keys = [await rig.create_request(f"w{number}") for number in range(count)]
            assert asyncio.get_running_loop().time() == 0
            for key in keys:
                status = await rig.status(key)
                assert (status.phase, status.reason) == ("Pending", "Asking")

    test()


@in_virtual_time
async def test_after_a_few_seconds_they_say_that_nobody_answers():
    async with running() as rig:
        rig.broker.seconds["request"] = FOR_EVER
        keys = [await rig.create_request(f"w{number}") for number in range(8)]
        await passed(10)
        for key in keys:
            status = await rig.status(key)
            assert (status.phase, status.reason) == ("Pending", "BrokerUnreachable")
            assert "did not answer within 10s" in status.message
        rig.broker.seconds.clear()
        await passed(61)
        assert {(await rig.status(key)).phase for key in keys} == {"Reserved"}
        assert len(set(rig.broker.keys)) == 8


@in_virtual_time
async def test_those_that_wait_for_their_turn_get_it():
    async with running() as rig:
        rig.broker.seconds["request"] = FOR_EVER
        count = 2 * requester.MAX_CONCURRENT_REQUESTS
        keys = [
            await rig.create_request(f"w{number}", cpu="10m", requested_memory="1Mi")
            for number in range(count)
        ]
        assert len(rig.broker.keys) == requester.MAX_CONCURRENT_REQUESTS
        await passed(10)
        rig.broker.seconds.clear()
        await passed(61)
        assert {(await rig.status(key)).phase for key in keys} == {"Reserved"}


@pytest.mark.parametrize("count", [8, 5 * requester.MAX_CONCURRENT_REQUESTS])
def test_one_that_is_deleted_does_not_wait_for_those_that_ask(count):
    @in_virtual_time
    async def test():
        async with running() as rig:
            held = await rig.create_request("held")
            rig.broker.trouble = GONE
            never_heard = await rig.create_request("never-heard")
            rig.broker.trouble = None
            rig.broker.seconds["request"] = FOR_EVER
            for number in range(count):
                await rig.create_request(f"w{number}")
            await rig.delete(held)
            assert not await rig.is_there(held)
            rig.broker.seconds.clear()
            await rig.delete(never_heard)
            assert not await rig.is_there(never_heard)
            assert asyncio.get_running_loop().time() == 0
            assert rig.broker.reserved == {}

    test()


@pytest.mark.parametrize("call", ["release", "renew", "find"])
def test_no_call_is_waited_for_for_ever(call):
    @in_virtual_time
    async def test():
        async with running() as rig:
            key = await rig.create_request(renew=True, duration="3m")
            rig.broker.seconds[call] = FOR_EVER
            if call == "release":
                await rig.delete(key)
            elif call == "find":
                rig.reservations.remove("rsv-1")
            await passed(150)
            rig.broker.seconds.clear()
            assert len(rig.broker.named(call)) > 1
            await passed(61)
            assert await rig.is_there(key) == (call != "release")

    test()


@in_virtual_time
async def test_when_the_broker_is_heard_again_nobody_waits_any_longer():
    async with running() as rig:
        rig.broker.trouble = GONE
        keys = [await rig.create_request(f"w{number}") for number in range(4)]
        await passed(605)
        rig.broker.trouble = None
        rig.reservations.notify_reconnected()
        await settled()
        assert {(await rig.status(key)).phase for key in keys} == {"Reserved"}


@in_virtual_time
async def test_a_spec_that_changes_while_the_status_is_written_is_no_fault():
    async with running() as rig:
        rig.broker.seconds["request"] = 1
        key = await rig.create_request(cpu="1")
        await rig.change(key, renew=True)
        await passed(1)
        status = await rig.status(key)
        assert (status.phase, status.reservation_name) == ("Reserved", "rsv-1")
        assert len(rig.broker.keys) == 1
