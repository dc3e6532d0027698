"""Who speaks for a cluster: work waits until nobody else does, and ends when another one does instead."""

import asyncio
from contextlib import suppress

import pytest

from kubelend.agent.health import ActiveAgentGate
from kubelend.communicators.middleware import SessionMiddleware
from kubelend.core.errors import BrokerUnreachable, IdentityInUse
from kubelend.wire import bodies
from scripted_communicator import ScriptedCommunicator
from virtual_time import in_virtual_time, now, settled, stopped

OFFER = bodies.Advertisement("a", bodies.Metrics(bodies.Quantities("1", "1Gi")))
TAKEN, GONE = IdentityInUse("another agent is active for a"), BrokerUnreachable("gone")


class Rig:
    """A place, and a broker that has its own view of whose it is."""

    def __init__(self):
        self.broker, self.place = ScriptedCommunicator(now), ActiveAgentGate()

    async def advertise(self, problem=None, seconds=0.0):
        """With what comes of it, and how long that takes; nobody waits for longer than a second."""
        self.broker.trouble = None if problem is None else lambda: problem
        self.broker.seconds = seconds
        with suppress(IdentityInUse, BrokerUnreachable, TimeoutError):
            async with asyncio.timeout(1):
                await SessionMiddleware(self.broker, self.place).publish(OFFER)

    async def is_ours(self):
        waiting = asyncio.create_task(self.place.wait())
        await settled()
        is_ours = waiting.done()
        await stopped(waiting)
        return is_ours


@in_virtual_time
async def test_nothing_may_begin_before_the_broker_was_told():
    assert not await Rig().is_ours()


@pytest.mark.parametrize(
    "problem, seconds",
    [(None, 0.0), (GONE, 0.0), (None, 5.0)],
    ids=["heard", "unreachable", "silent"],
)
@in_virtual_time
async def test_work_begins_unless_the_broker_refuses(problem, seconds):
    rig = Rig()
    await rig.advertise(problem, seconds)
    assert await rig.is_ours()


@in_virtual_time
async def test_work_waits_for_its_turn():
    rig = Rig()
    await rig.advertise(TAKEN)
    await rig.advertise(TAKEN)
    assert not await rig.is_ours()
    await rig.advertise()
    assert await rig.is_ours()


@in_virtual_time
async def test_the_answer_passes_as_it_is():
    rig = Rig()
    way = SessionMiddleware(rig.broker, rig.place)
    assert (await way.publish(OFFER)).advertisement == OFFER
    rig.broker.trouble = lambda: TAKEN
    with pytest.raises(IdentityInUse) as refused:
        await way.publish(OFFER)
    assert refused.value is TAKEN


@in_virtual_time
async def test_who_has_lost_its_place_ends_with_the_reason():
    rig = Rig()
    watching = asyncio.create_task(rig.place.run())
    for problem in (TAKEN, None, GONE, None):
        await rig.advertise(problem)
    await settled()
    assert not watching.done(), "to wait for it, or to be alone, is no loss"
    await rig.advertise(TAKEN)
    with pytest.raises(IdentityInUse, match="another agent is active for a"):
        await watching
