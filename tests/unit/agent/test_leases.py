"""How long a reservation lasts by our own count, and when it is time to renew it."""

import asyncio
from datetime import timedelta

import pytest
from msgspec.structs import replace

import make
from kubelend.agent.instructions import RECHECK_INTERVAL, ExpiryTracker, renewal_margin
from kubelend.wire import bodies
from requesters import away
from virtual_time import in_virtual_time, now

HOUR, MINUTE = make.HOUR, make.MINUTE


def body(expires_at=make.T0 + HOUR, wait_until=None, duration="1h", phase="Reserved"):
    status = bodies.ReservationStatus(phase, "", expires_at=expires_at, wait_until=wait_until)
    return bodies.Reservation(
        "r", "me", "p", bodies.Quantities("1", "1Gi"), status, make.T0, 0, duration
    )


def leases(off=timedelta(), chance=0.0):
    return ExpiryTracker(away(off), lambda: chance)


@pytest.mark.parametrize(
    "chance, left", [(0.0, 20 * MINUTE), (0.5, 21 * MINUTE), (1.0, 22 * MINUTE)]
)
def test_a_third_is_left_for_renewing_and_a_little_more_by_chance(chance, left):
    assert renewal_margin(HOUR, chance) == left


@pytest.mark.parametrize("off", [timedelta(), HOUR, -HOUR])
@in_virtual_time
async def test_what_the_broker_has_just_counted_needs_no_clock(off):
    known = leases(off)
    known.confirm(body())
    assert known.remaining("r") == HOUR
    assert known.time_to_renewal("r") == 40 * MINUTE


@in_virtual_time
async def test_the_count_goes_on_with_the_loop_whatever_the_clock_does():
    off = [timedelta()]
    known = ExpiryTracker(lambda: now() + off[0], lambda: 0.0)
    known.confirm(body())
    await asyncio.sleep(1800)
    off[0] = 5 * HOUR
    known.observe(body())
    assert known.remaining("r") == 30 * MINUTE
    assert known.time_to_renewal("r") == 10 * MINUTE
    await asyncio.sleep(7200)
    assert known.remaining("r") == known.time_to_renewal("r") == timedelta()


@pytest.mark.parametrize(
    "off, left",
    [(timedelta(), HOUR), (HOUR, timedelta()), (2 * HOUR, timedelta()), (-HOUR, HOUR)],
    ids=["right", "ahead", "far ahead", "behind"],
)
@in_virtual_time
async def test_of_one_made_before_the_clock_is_asked_and_never_more_is_left_than_it_lasts(
    off, left
):
    known = leases(off)
    known.observe(body())
    assert known.remaining("r") == left
    assert known.time_to_renewal("r") == timedelta(), "who is not sure renews"


@in_virtual_time
async def test_a_later_end_moves_ours_by_as_much():
    known = leases(HOUR)
    known.confirm(body())
    known.observe(body(make.T0 + 3 * HOUR))
    assert known.remaining("r") == 3 * HOUR


@in_virtual_time
async def test_one_that_waits_has_the_end_of_its_wait_and_nothing_to_renew():
    known = leases()
    waiting = body(None, make.T0 + 10 * MINUTE, phase="Pending")
    known.confirm(waiting)
    known.observe(waiting)
    assert known.remaining("r") == 10 * MINUTE
    assert known.time_to_renewal("r") is None
    known.observe(body())
    assert known.remaining("r") == HOUR
    assert known.time_to_renewal("r") == timedelta()


@in_virtual_time
async def test_one_without_an_end_has_none():
    known = leases()
    known.observe(body(None))
    known.confirm(body(None))
    assert known.remaining("r") is None
    assert known.time_to_renewal("r") is None


@in_virtual_time
async def test_one_that_lives_against_our_count_is_asked_after_again_later():
    known = leases(2 * HOUR)
    known.observe(body())
    known.recheck("r")
    assert known.remaining("r") == RECHECK_INTERVAL
    known.observe(body())
    assert known.remaining("r") == RECHECK_INTERVAL
    known.recheck("never heard of")
    assert known.remaining("never heard of") is None


@in_virtual_time
async def test_without_a_readable_duration_it_is_what_it_was_given_at_first():
    known = leases()
    told = body(duration="")
    known.confirm(replace(told, status=replace(told.status, reserved_at=make.T0 + 30 * MINUTE)))
    assert known.remaining("r") == 30 * MINUTE


@in_virtual_time
async def test_what_is_forgotten_is_heard_of_as_new():
    known = leases()
    known.confirm(body())
    known.forget("r")
    assert known.remaining("r") is None
