"""The broker leaves silent providers by itself, and never takes its own absence for the silence of others."""

import asyncio
import contextlib

import pytest

import make
from kubelend.broker.metrics import Metrics
from kubelend.broker.service import Broker, BrokerRules
from kubelend.broker.writer import FAILOVER_PAUSE
from kubelend.core import failover
from kubelend.core.errors import StoreFailed
from kubelend.core.models import ClusterId
from virtual_time import in_virtual_time
from waiting import until

A, B, R = ClusterId("a"), ClusterId("b"), ClusterId("r")
RULES = BrokerRules(stale_after=make.MINUTE, lost_after=make.MINUTE)
STEP = 5 * make.SECOND

pytestmark = pytest.mark.broker(
    "service", rules=RULES, fails=True, offers={"a": ("8", "8Gi"), "b": ("4", "4Gi")}
)


async def opened(store, clock):
    made = Broker(lambda: store, clock, RULES, Metrics())
    await made.load()
    return made


async def fill(broker):
    await broker.advertise(make.advertisement("a", "cpu=8,memory=8Gi"))
    await broker.advertise(make.advertisement("b", "cpu=4,memory=4Gi"))


@contextlib.asynccontextmanager
async def running(store, clock, patience=0.01):
    """A broker that looks around by itself."""
    made = Broker(lambda: store, clock, RULES, Metrics())
    task = asyncio.create_task(made.run(patience))
    try:
        await until(lambda: made.unready is None)
        await fill(made)
        yield made
    finally:
        task.cancel()
        await asyncio.wait([task])
        await made.close()


def targets(store):
    return {found.target for found in store.kept.load().reservations}


async def listen(broker, clock, duration):
    """Time passes, `b` speaks all the while, and the broker looks around."""
    until = clock.now + duration
    while clock.now < until:
        clock.pass_time(STEP)
        await broker.advertise(make.advertisement("b", "cpu=4,memory=4Gi"))
        await broker.expire()


async def target(broker, held):
    return (await broker.reservation(held.id)).target


async def test_both_sides_hear_of_the_move(broker, clock):
    held = await broker.reserve(make.request())
    async with broker.stream(R, None) as requester, broker.stream(B, None) as provider:
        await listen(broker, clock, 2 * make.MINUTE)
        (told,) = await requester.subscription.read(1.0)
        assert (told.id, told.target, told.left) == (held.id, "b", ("a",))
        assert await provider.subscription.read(1.0) == [told]
    async with broker.stream(A, None) as opening:
        assert told in opening.changes, "it hears of it when it comes back"


async def test_nothing_moves_before_its_time(broker, clock):
    held = await broker.reserve(make.request())
    await listen(broker, clock, 2 * make.MINUTE - STEP)
    assert await target(broker, held) == "a"
    await listen(broker, clock, STEP)
    assert await target(broker, held) == "b"


async def test_it_happens_while_nobody_calls(store, clock):
    async with running(store, clock) as broker:
        await broker.reserve(make.request())
        await listen(broker, clock, 2 * make.MINUTE - STEP)
        clock.pass_time(STEP)
        await until(lambda: targets(store) == {"b"})


@in_virtual_time
async def test_many_are_moved_without_the_usual_pause_between_portions(store, clock):
    patience, portions = 2.0, 3
    async with running(store, clock, patience) as broker:
        wanted = make.request("cpu=1m,memory=1Mi")
        many = [
            broker.reserve(wanted)
            for _ in range((portions - 1) * failover.MAX_ATTEMPTS_PER_RUN + 1)
        ]
        await asyncio.gather(*many)
        await listen(broker, clock, 2 * make.MINUTE - STEP)
        clock.pass_time(STEP)
        # The usual pause is over when the first portion moves; the others follow more quickly.
        await until(lambda: targets(store) == {"b"}, patience + 2 * portions * FAILOVER_PAUSE)


async def test_restarted_broker_gives_everybody_the_time_anew(broker, store, clock):
    held = await broker.reserve(make.request(duration=9 * make.HOUR))
    clock.pass_time(make.HOUR)
    heir = await opened(store, clock)
    await listen(heir, clock, make.MINUTE - STEP)
    assert await target(heir, held) == "a"
    await listen(heir, clock, STEP)
    assert await target(heir, held) == "b"
    await heir.close()


async def test_store_that_was_away_is_no_silence_of_others(store, clock):
    async with running(store, clock) as broker:
        held = await broker.reserve(make.request(duration=9 * make.HOUR))
        await listen(broker, clock, 2 * make.MINUTE - STEP)
        store.broken = StoreFailed("for a moment")
        with pytest.raises(StoreFailed):
            await broker.advertise(make.advertisement("b", "cpu=4,memory=4Gi"))
        clock.pass_time(STEP)
        store.broken = None
        await until(lambda: broker.unready is None)
        await listen(broker, clock, make.MINUTE - STEP)
        assert await target(broker, held) == "a"
        await listen(broker, clock, STEP)
        assert await target(broker, held) == "b"
