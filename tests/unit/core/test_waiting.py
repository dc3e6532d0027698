"""The wait queue: who is served when, and which cluster is nominated.

That nobody waits for what is there, and that a cluster is kept exactly where it could serve, whatever frees
or closes it, are invariants of test_ledger_machine.py.
"""

import inspect
import sys

import pytest

import make
from kubelend.core import audit, errors
from kubelend.core.events import Advertised
from kubelend.core.ledger import Ledger

WAIT = {"wait": 30 * make.MINUTE}


class FullCluster(make.CommandRunner):
    """Its clusters are lent out completely, each by one hold."""

    def __init__(self, **clusters):
        super().__init__()
        for name, offer in clusters.items():
            self.advertise(name, offer)
        self.holds = {name: self.reserve(offer, pinned=name) for name, offer in clusters.items()}


def test_request_that_waits_is_pending_and_says_why_until_capacity_comes_free():
    runner = FullCluster(a="cpu=4,memory=8Gi")
    asked = runner.reserve("cpu=2,memory=1Gi", duration=make.HOUR, **WAIT)
    waiter = runner[asked]
    assert (waiter.phase, waiter.reason) == ("Pending", "Waiting")
    assert waiter.message == "Waiting: 0/1 cluster fits: 1 InsufficientCPU"
    assert waiter.wait_until == make.T0 + 30 * make.MINUTE
    assert waiter.target is None
    runner.pass_time(make.MINUTE)
    runner.release(runner.holds["a"])
    placed = runner[asked]
    assert (placed.phase, placed.reason, placed.target) == ("Reserved", "Locked", "a")
    assert placed.expires_at == runner.now + make.HOUR
    assert runner[runner.reserve("cpu=2,memory=1Gi", **WAIT)].phase == "Reserved"


def test_waiters_are_served_by_priority_then_by_age():
    runner = FullCluster(a="cpu=1,memory=1Gi")
    asked = [runner.reserve("cpu=1,memory=1Gi", priority=p, **WAIT) for p in (0, 5, 0, 5)]
    order, holder = [], runner.holds["a"]
    while runner.waiting():
        runner.release(holder)
        (holder,) = [w for w in asked if runner[w].is_live]
        order.append(asked.index(holder))
    assert order == [1, 3, 0, 2]


def test_one_release_may_serve_several():
    runner = FullCluster(a="cpu=4,memory=8Gi")
    waiters = [runner.reserve(f"cpu={n},memory=1Gi", **WAIT) for n in (2, 1, 3, 1)]
    runner.release(runner.holds["a"])
    assert [runner[w].is_live for w in waiters] == [True, True, False, False]
    assert runner.available("a").cpu == 1000


def test_big_waiter_is_not_starved_by_a_stream_of_small_requests():
    runner = make.runner(a="cpu=4,memory=8Gi")
    small = [runner.reserve("cpu=1,memory=1Gi") for _ in range(4)]
    big = runner.reserve("cpu=4,memory=1Gi", **WAIT)
    for held in small:
        runner.release(held)
        if runner[big].phase == "Pending":
            assert runner.refused("cpu=1,memory=1Gi") == "0/1 cluster fits: 1 NominatedForOther"
    assert runner.target(big) == "a"


def test_nearest_cluster_is_kept():
    runner = make.runner(a="cpu=4,memory=8Gi", b="cpu=8,memory=8Gi", c="cpu=3,memory=8Gi")
    runner.reserve("cpu=3,memory=1Gi", pinned="a")
    runner.reserve("cpu=5,memory=1Gi", pinned="b")
    big = runner.reserve("cpu=4,memory=1Gi", **WAIT)
    assert runner.nominations() == {big: "b"}, "c would never fit, a misses more"


def test_higher_waiter_takes_the_nomination_and_the_lower_one_finds_another():
    runner = FullCluster(a="cpu=4,memory=8Gi", b="cpu=4,memory=8Gi")
    low = runner.reserve("cpu=4,memory=1Gi", **WAIT)
    assert runner.nominations() == {low: "a"}
    high = runner.reserve("cpu=4,memory=1Gi", priority=1, **WAIT)
    assert runner.nominations() == {high: "a", low: "b"}
    third = runner.reserve("cpu=4,memory=1Gi", priority=2, **WAIT)
    assert runner.nominations() == {third: "a", high: "b"}
    runner.release(third)
    assert runner.nominations() == {high: "b", low: "a"}


def test_chain_of_displaced_waiters_may_be_as_long_as_the_queue():
    """Each waiter behind moves on by one cluster: that is a loop and no recursion."""
    runner, size = make.CommandRunner(), 200
    runner.max_waiting = 2 * size
    for number in range(size):
        runner.advertise(f"c{number:04}", "cpu=1,memory=1Gi")
        runner.reserve("cpu=1,memory=1Gi")
    for _ in range(size):
        runner.reserve("cpu=1,memory=1Gi", **WAIT)
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + size)
    try:
        high = runner.reserve("cpu=1,memory=1Gi", priority=1, **WAIT)
    finally:
        sys.setrecursionlimit(usual)
    assert runner.nominations()[high] == "c0000"
    assert len(runner.nominations()) == size


def test_cluster_that_comes_back_is_kept_for_who_waits_longest():
    """Somebody may have deleted its object while no broker ran."""
    runner = FullCluster(a="cpu=4,memory=8Gi")
    waiter = runner.reserve("cpu=4,memory=1Gi", **WAIT)
    runner.ledger = make.Recorder.restore(runner.kept()._replace(clusters=[]))
    assert runner.nominations() == {}
    assert audit.invariant_violations(runner.ledger) == []
    runner.advertise("a", "cpu=5,memory=9Gi")
    assert runner.nominations() == {waiter: "a"}
    assert runner.refused("cpu=1,memory=1Gi") == "0/1 cluster fits: 1 NominatedForOther"


def test_repeated_advertisement_takes_nothing_from_the_queue_and_gives_nothing():
    """Ten thousand clusters say "still here" every half minute: that must not walk the queue."""
    runner = FullCluster(a="cpu=4,memory=8Gi")
    runner.reserve("cpu=2,memory=1Gi", **WAIT)
    runner.ledger.apply(Advertised(runner.now, make.advertisement("a"), runner.now + make.HOUR))
    assert runner.ledger.capacity_freed == set()
    bigger = make.advertisement("a", "cpu=5,memory=8Gi")
    runner.ledger.apply(Advertised(runner.now, bigger, runner.now + make.HOUR))
    assert runner.ledger.capacity_freed == {"a"}


def test_wait_that_times_out_fails():
    runner = FullCluster(a="cpu=4,memory=8Gi")
    waiter = runner.reserve("cpu=2,memory=1Gi", wait=30 * make.SECOND)
    behind = runner.reserve("cpu=2,memory=1Gi", wait=make.HOUR)
    runner.pass_time(30 * make.SECOND - make.MOMENT)
    runner.expire()
    assert runner[waiter].phase == "Pending"
    runner.pass_time(make.MOMENT)
    runner.expire()
    failed = runner[waiter]
    assert (failed.phase, failed.reason) == ("Failed", "WaitTimedOut")
    assert failed.message == "No cluster fitted in time: 0/1 cluster fits: 1 InsufficientCPU"
    assert failed.finished_at == runner.now
    assert runner.waiting() == [behind]
    assert runner.nominations() == {behind: "a"}, "handed over at once"


def test_capacity_that_came_free_before_the_wait_was_over_is_not_missed():
    """The sweep may be late, after a restart for example: both deadlines are then past."""
    runner = make.runner(a="cpu=4,memory=8Gi")
    runner.reserve("cpu=4,memory=8Gi", duration=make.MINUTE)
    waiter = runner.reserve("cpu=2,memory=1Gi", wait=2 * make.MINUTE)
    runner.pass_time(3 * make.MINUTE)
    runner.expire()
    assert runner.target(waiter) == "a"


def test_full_queue_refuses_and_changes_nothing():
    runner = FullCluster(a="cpu=4,memory=8Gi")
    runner.max_waiting = 2
    waiters = [runner.reserve("cpu=2,memory=1Gi", **WAIT) for _ in range(2)]
    before = make.state(runner.ledger)
    with pytest.raises(errors.QueueFull, match="2 requests are already waiting"):
        runner.reserve("cpu=2,memory=1Gi", priority=9, **WAIT)
    assert make.state(runner.ledger) == before
    runner.release(waiters[0])
    runner.reserve("cpu=2,memory=1Gi", **WAIT)


def test_moved_reservation_keeps_its_rank_against_waiters():
    """Refused by its provider, it is older than who waits: the capacity kept for them is open to it."""
    runner = make.runner(a="cpu=2,memory=8Gi")
    held = runner.reserve("cpu=2,memory=1Gi")
    runner.advertise("b", "cpu=4,memory=8Gi")
    runner.reserve("cpu=2,memory=1Gi", pinned="b")
    waiter = runner.reserve("cpu=4,memory=1Gi", **WAIT)
    assert runner.nominations() == {waiter: "b"}
    runner.refuse(held, "a")
    assert runner.target(held) == "b"


def runner_with(**fields):
    """One provider whose administrator says this of it."""
    runner = make.runner(a="cpu=4,memory=8Gi")
    runner.limit("a", **fields)
    return runner


def test_cluster_that_opens_serves_the_waiter_when_the_time_has_come():
    runner = runner_with(hours=["12:05-18:00"])
    waiter = runner.reserve("cpu=2,memory=1Gi", wait=3 * make.HOUR)
    runner.expire()
    opens = make.T0 + 5 * make.MINUTE
    assert runner.ledger.next_deadline() == opens, "the broker sleeps until then"
    runner.pass_time(5 * make.MINUTE - make.MOMENT)
    runner.expire()
    assert runner[waiter].phase == "Pending"
    runner.pass_time(make.MOMENT)
    runner.expire()
    assert (runner.target(waiter), runner[waiter].reserved_at) == ("a", opens)
    assert runner.ledger.next_deadline() == runner[waiter].expires_at


def test_cluster_that_opened_while_nobody_looked_serves_the_waiter():
    runner = runner_with(hours=["12:05-18:00"])
    waiter = runner.reserve("cpu=2,memory=1Gi", wait=3 * make.HOUR)
    restored = make.CommandRunner(
        make.Recorder.restore(runner.kept()), runner.now + 7 * make.MINUTE
    )
    due = restored.ledger.next_deadline()
    assert due is not None
    assert due <= restored.now
    restored.expire()
    assert restored.target(waiter) == "a"


def test_opening_that_a_decision_noticed_first_is_not_lost():
    runner = runner_with(hours=["12:05-18:00"])
    waiter = runner.reserve("cpu=2,memory=1Gi", wait=3 * make.HOUR)
    runner.expire()
    runner.pass_time(5 * make.MINUTE)
    runner.refused("cpu=9,memory=1Gi")
    runner.expire()
    assert runner.target(waiter) == "a"


def test_nobody_waits_for_an_opening_if_nobody_waits():
    runner = runner_with(hours=["13:00-14:00"])
    runner.expire()
    assert runner.ledger.next_deadline() is None
    assert Ledger().next_deadline() is None


def test_hours_that_are_lifted_leave_nothing_due():
    runner = runner_with(hours=["13:00-14:00"])
    waiter = runner.reserve("cpu=9,memory=1Gi", wait=3 * make.HOUR)
    runner.limit("a", keep_back="cpu=1")
    runner.expire()
    assert runner.ledger.next_deadline() == runner[waiter].wait_until


def test_nomination_moves_on_when_its_cluster_closes_and_something_comes_free():
    runner = make.CommandRunner()
    runner.advertise("a", "cpu=4,memory=8Gi", policy=make.policy(hours=["08:00-12:05"]))
    runner.advertise("b", "cpu=4,memory=8Gi")
    runner.reserve("cpu=1,memory=1Gi", pinned="a")
    small, large = (runner.reserve(f"cpu={n},memory=1Gi", pinned="b") for n in (1, 3))
    waiter = runner.reserve("cpu=4,memory=1Gi", wait=3 * make.HOUR)
    assert runner.nominations() == {waiter: "a"}
    runner.pass_time(5 * make.MINUTE)
    runner.release(small)
    assert runner.nominations() == {waiter: "b"}
    runner.release(large)
    assert runner.target(waiter) == "b"
