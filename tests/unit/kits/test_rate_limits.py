"""Rate limits per caller, throttled log lines, coalesced actions."""

import asyncio
import tracemalloc
from functools import partial

import pytest

from clocks import Seconds
from kubelend.core.errors import RateLimited
from kubelend.kits import ratelimit
from kubelend.kits.ratelimit import CoalescingTimer, LogThrottle, RateLimiter
from virtual_time import in_virtual_time


@pytest.fixture
def time():
    return Seconds()


def admitted(limiter, caller, times):
    """Number of the calls in one moment that are admitted."""
    return sum(not limiter.take(caller) for _ in range(times))


# -- the token bucket


def test_burst_is_admitted_and_refills_with_time_up_to_a_burst(time):
    limiter = RateLimiter(8, 5, time)
    assert admitted(limiter, "a", 20) == 5
    assert admitted(limiter, "a", 20) == 0  # the clock stands still
    time.now += 0.375
    assert admitted(limiter, "a", 20) == 3
    time.now += 3600
    assert admitted(limiter, "a", 20) == 5
    assert admitted(limiter, "b", 20) == 5  # callers are counted apart
    assert admitted(RateLimiter(0, 1, time), "a", 10_000) == 10_000, "a rate of 0 is unlimited"


def test_rate_holds_over_a_long_time_and_rejected_calls_cost_nothing(time):
    limiter = RateLimiter(10, 5, time)
    passed = 0
    for _ in range(1000):
        time.now += 0.02
        passed += admitted(limiter, "a", 1)
    assert passed == pytest.approx(205, abs=2)
    admitted(limiter, "a", 1000)
    time.now += 0.1
    assert admitted(limiter, "a", 2) == 1


def test_calls_cost_what_they_cost(time):
    """Before, if that is known; else afterwards, as a debt of a burst at most."""
    limiter = RateLimiter(10, 20, time)
    assert [limiter.take("a", 15), limiter.take("a", 15)] == [0, pytest.approx(1.0)]
    time.now += 1.5
    assert limiter.take("a", 100) == 0, "more than a burst needs a full bucket"
    assert limiter.take("a") == pytest.approx(8.1)
    limiter.charge("b", 1000)
    assert limiter.take("b") == pytest.approx(2.1)
    limiter.charge("a", 1)
    assert limiter.take("a") == pytest.approx(8.1), "a larger debt is not forgiven"


def test_error_has_the_time_after_which_a_call_is_admitted(time):
    limiter = RateLimiter(4, 1, time)
    limiter.admit("a")
    with pytest.raises(RateLimited) as rejected:
        limiter.admit("a")
    assert str(rejected.value) == "a exceeds 4 requests per second; wait 0.25s"
    assert rejected.value.retry_after == pytest.approx(0.25)
    time.now += rejected.value.retry_after
    limiter.admit("a")


def test_refunded_token_can_be_taken_again_but_a_burst_is_the_maximum(time):
    limiter = RateLimiter(1, 2, time)
    assert admitted(limiter, "a", 5) == 2
    limiter.refund("a")
    assert admitted(limiter, "a", 5) == 1
    time.now += 100
    for _ in range(5):
        limiter.refund("a")
    limiter.refund("unknown")
    assert admitted(limiter, "a", 5) == 2


def test_eviction_of_quiet_callers_does_not_refill_the_others(time):
    limiter = RateLimiter(1, 2, time)
    admitted(limiter, "loud", 2)
    for number in range(10_000):
        limiter.admit(f"caller-{number}")
    time.now += 1.5
    limiter.admit("one more")
    assert admitted(limiter, "loud", 5) == 1


@pytest.mark.timeout(20)
def test_many_active_callers_do_not_make_a_call_expensive(time):
    """Looking at all of 40,000 buckets with each call would take minutes."""
    limiter = RateLimiter(1, 2, time)
    for number in range(40_000):
        limiter.admit(f"caller-{number}")
    for _ in range(50_000):
        time.now += 0.001
        limiter.take("loud")


def test_many_quiet_callers_are_evicted(time):
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


@pytest.mark.parametrize(
    "remote, key",
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
        ("", ""),
        ("no address", "no address"),
    ],
)
def test_addresses_of_one_ipv6_network_share_a_key(remote, key):
    assert ratelimit.rate_limit_key(remote) == key


# -- the throttle of log lines


def test_first_line_of_an_interval_has_the_number_of_suppressed_ones(time):
    lines = LogThrottle(10, time)
    assert [lines.suppressed("a") for _ in range(5)] == [0, None, None, None, None]
    assert lines.suppressed("b") == 0  # keys are counted apart
    time.now += 10
    assert [lines.suppressed("a") for _ in range(2)] == [4, None]
    time.now += 10
    assert lines.suppressed("a") == 1


def test_of_many_keys_the_one_logged_longest_ago_is_evicted(time):
    lines = LogThrottle(10, time)
    for number in range(ratelimit.MAX_LOG_KEYS):
        lines.suppressed(number)
    time.now += 10
    lines.suppressed(0)
    lines.suppressed("one more")
    assert lines.suppressed(0) is None
    time.now -= 10  # within the first interval of the others
    assert lines.suppressed(2) is None
    assert lines.suppressed(1) == 0


# -- coalesced actions


@in_virtual_time
async def test_rare_action_runs_now_and_frequent_ones_together():
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    done: list[str] = []
    timer, immediate = CoalescingTimer(0.05), CoalescingTimer(0.0)
    for turn in range(3):
        for name in "abc":
            timer.schedule(partial(done.append, name))
        timer.schedule(partial([].pop, 0))  # which fails, and affects no other
        timer.schedule(partial(done.append, "d"))
        assert done == list("abcd" * turn + "a")
        await asyncio.sleep(0.1)
    assert done == list("abcd" * 3)
    for name in "efg":
        immediate.schedule(partial(done.append, name))
    assert done == list("abcd" * 3 + "efg")


@in_virtual_time
async def test_actions_are_batched_from_a_rate_on():
    done: list[int] = []
    timer = CoalescingTimer(0.2, rate=20)
    for number in range(30):
        timer.schedule(partial(done.append, number))
        await asyncio.sleep(0.1)
    assert done == list(range(30)), "ten per second"
    for number in range(30, 60):
        timer.schedule(partial(done.append, number))
    assert len(done) < 60
    await asyncio.sleep(0.3)
    assert done == list(range(60))
