"""The broker's word on one reservation, and how long one waits for it."""

import asyncio

import pytest
from msgspec.structs import replace

import make
from desk_broker import DeskBroker
from kubelend.agent import reservation_cache
from kubelend.agent.reservation_cache import ReservationCache
from kubelend.core.errors import BrokerUnreachable, NotFound
from virtual_time import in_virtual_time, now, settled


def asked():
    broker = DeskBroker("me", make.desk(me="cpu=4,memory=8Gi"))
    return broker, ReservationCache(), broker.desk.reserve("cpu=1,memory=1Gi")


@in_virtual_time
async def test_what_the_broker_says_is_known_then():
    broker, reservations, found = asked()
    assert await reservation_cache.fetch_latest(broker, reservations, found) == broker.body(found)
    assert reservations.find(found) == broker.body(found)


@in_virtual_time
async def test_what_was_heard_since_is_newer_than_the_answer():
    broker, reservations, found = asked()
    newer = replace(broker.body(found), revision=1000)
    broker.seconds["find"] = 1
    answer = asyncio.create_task(reservation_cache.fetch_latest(broker, reservations, found))
    await settled()
    reservations.put(newer)
    assert await answer == newer


@in_virtual_time
async def test_what_the_broker_does_not_know_is_forgotten():
    broker, reservations, found = asked()
    reservations.put(broker.body(found))
    broker.refused["find"] = NotFound("none")
    assert await reservation_cache.fetch_latest(broker, reservations, found) is None
    assert reservations.find(found) is None


@in_virtual_time
async def test_a_broker_that_hangs_is_out_of_reach_and_what_is_known_stays():
    broker, reservations, found = asked()
    reservations.put(broker.body(found))
    broker.seconds["find"] = 1000
    with pytest.raises(BrokerUnreachable, match="within 10s"):
        await reservation_cache.fetch_latest(broker, reservations, found)
    assert now() - make.T0 == reservation_cache.CALL_TIMEOUT
    assert reservations.find(found) is not None
