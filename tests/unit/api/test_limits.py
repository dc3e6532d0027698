"""How often a caller may call: a burst at once, then as many as time brings."""

import tracemalloc

import pytest

from clocks import Seconds
from kubelend.core.errors import RateLimited
from kubelend.kits.ratelimit import RateLimiter


@pytest.fixture
def time():
    return Seconds()


def admitted(limiter, caller, times):
    """How many of so many calls in one moment pass."""
    passed = 0
    for _ in range(times):
        try:
            limiter.admit(caller)
        except RateLimited:
            continue
        passed += 1
    return passed


def test_burst_passes_at_once_and_no_more(time):
    limiter = RateLimiter(10, 5, time)
    assert admitted(limiter, "a", 20) == 5


def test_time_brings_more_but_never_more_than_a_burst(time):
    limiter = RateLimiter(8, 5, time)
    admitted(limiter, "a", 5)
    time.now += 0.375
    assert admitted(limiter, "a", 20) == 3
    time.now += 3600
    assert admitted(limiter, "a", 20) == 5


def test_rate_holds_over_a_long_time(time):
    limiter = RateLimiter(10, 5, time)
    passed = 0
    for _ in range(1000):
        time.now += 0.02
        passed += admitted(limiter, "a", 1)
    assert passed == pytest.approx(205, abs=2)


def test_callers_are_counted_apart(time):
    limiter = RateLimiter(10, 5, time)
    admitted(limiter, "a", 50)
    assert admitted(limiter, "b", 20) == 5


def test_refused_is_told_how_long_to_wait_and_then_passes(time):
    limiter = RateLimiter(4, 1, time)
    limiter.admit("a")
    with pytest.raises(RateLimited) as refused:
        limiter.admit("a")
    assert refused.value.retry_after == pytest.approx(0.25)
    assert refused.value.hint == "wait 0.25s"
    time.now += refused.value.retry_after
    limiter.admit("a")


def test_refused_calls_cost_nothing(time):
    limiter = RateLimiter(10, 1, time)
    admitted(limiter, "a", 1000)
    time.now += 0.1
    assert admitted(limiter, "a", 1) == 1


def test_no_limit_is_none(time):
    assert admitted(RateLimiter(0, 1, time), "a", 10_000) == 10_000


def test_callers_that_have_been_quiet_are_forgotten_and_others_are_not(time):
    limiter = RateLimiter(1, 2, time)
    admitted(limiter, "loud", 2)
    for number in range(10_000):
        limiter.admit(f"caller-{number}")
    time.now += 1.5
    limiter.admit("one more")
    assert admitted(limiter, "loud", 5) == 1


@pytest.mark.timeout(20)
def test_many_callers_that_are_not_quiet_cost_no_call_much(time):
    """Looking at all of 40,000 buckets with each call would take minutes."""
    limiter = RateLimiter(1, 2, time)
    for number in range(40_000):
        limiter.admit(f"caller-{number}")
    for _ in range(50_000):
        time.now += 0.001
        admitted(limiter, "loud", 1)


def test_many_callers_that_became_quiet_are_forgotten_at_last(time):
    limiter = RateLimiter(1, 2, time)
    tracemalloc.start()
    try:
        for number in range(60_000):
            time.now += 0.001
            limiter.admit(f"caller-{number}")
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 4 * 2**20  # all of them would take four times as much


def test_clock_that_stands_still_refills_nothing(time):
    limiter = RateLimiter(10, 3, time)
    assert admitted(limiter, "a", 10) == 3
    assert admitted(limiter, "a", 10) == 0


def test_what_is_given_back_can_be_taken_again_but_no_more(time):
    limiter = RateLimiter(1, 2, time)
    assert admitted(limiter, "a", 5) == 2
    limiter.refund("a")
    assert admitted(limiter, "a", 5) == 1
    time.now += 100
    for _ in range(5):
        limiter.refund("a")
    limiter.refund("unknown")
    assert admitted(limiter, "a", 5) == 2
