"""Who waits is served by priority and age, and a big request is not starved by small ones."""

import pytest

import make
import reference
from kubelend.core import audit, errors, quotas, waiting
from kubelend.core.events import Advertised
from kubelend.core.ledger import Ledger

WAIT = {"wait": 30 * make.MINUTE}


class FullDesk(make.Desk):
    """Its clusters are lent out completely, each by one hold."""

    def __init__(self, **clusters):
        super().__init__()
        for name, offer in clusters.items():
            self.advertise(name, offer)
        self.holds = {name: self.reserve(offer, pinned=name) for name, offer in clusters.items()}


def test_request_that_waits_is_pending_and_says_why():
    desk = FullDesk(a="cpu=4,memory=8Gi")
    waiter = desk[desk.reserve("cpu=2,memory=1Gi", **WAIT)]
    assert (waiter.phase, waiter.reason) == ("Pending", "Waiting")
    assert waiter.message == "Waiting: 0/1 cluster fits: 1 InsufficientCPU"
    assert waiter.wait_until == make.T0 + 30 * make.MINUTE
    assert waiter.target is None


def test_request_that_fits_does_not_wait():
    desk = make.desk(a="cpu=4,memory=8Gi")
    assert desk[desk.reserve("cpu=2,memory=1Gi", **WAIT)].phase == "Reserved"


def test_waiters_are_served_by_priority_then_by_age():
    desk = FullDesk(a="cpu=1,memory=1Gi")
    asked = [desk.reserve("cpu=1,memory=1Gi", priority=p, **WAIT) for p in (0, 5, 0, 5)]
    order, holder = [], desk.holds["a"]
    while desk.waiting():
        desk.release(holder)
        (holder,) = [w for w in asked if desk[w].is_live]
        order.append(asked.index(holder))
    assert order == [1, 3, 0, 2]


FREEING = {
    "release": lambda desk: desk.release(desk.holds["a"]),
    "expiry": lambda desk: (desk.pass_time(make.HOUR), desk.advertise("a"), desk.expire()),
    "a new cluster": lambda desk: desk.advertise("b"),
    "a larger advertisement": lambda desk: desk.advertise("a", "cpu=8,memory=16Gi"),
    "refusal": lambda desk: desk.refuse(desk.holds["a"], "a"),
}


@pytest.mark.parametrize("free", FREEING.values(), ids=FREEING)
def test_capacity_that_appears_serves_the_waiter(free):
    desk = FullDesk(a="cpu=4,memory=8Gi")
    waiter = desk.reserve("cpu=2,memory=1Gi", duration=make.HOUR, wait=2 * make.HOUR)
    free(desk)
    placed = desk[waiter]
    assert (placed.phase, placed.reason) == ("Reserved", "Locked")
    assert placed.expires_at == desk.now + make.HOUR
    assert desk.waiting() == []


def test_uncordoned_cluster_serves_the_waiter():
    desk = make.desk(a="cpu=4,memory=8Gi")
    desk.cordon("a")
    waiter = desk.reserve("cpu=2,memory=1Gi", **WAIT)
    desk.uncordon("a")
    assert desk.target(waiter) == "a"


def test_cluster_that_advertises_again_serves_the_waiter():
    desk = make.desk(a="cpu=4,memory=8Gi")
    desk.pass_time(make.STALE_AFTER)
    waiter = desk.reserve("cpu=2,memory=1Gi", **WAIT)
    desk.advertise("a")
    assert desk.target(waiter) == "a"


def test_one_release_may_serve_several():
    desk = FullDesk(a="cpu=4,memory=8Gi")
    waiters = [desk.reserve(f"cpu={n},memory=1Gi", **WAIT) for n in (2, 1, 3, 1)]
    desk.release(desk.holds["a"])
    assert [desk[w].is_live for w in waiters] == [True, True, False, False]
    assert desk.available("a").cpu == 1000


def test_big_waiter_is_not_starved_by_a_stream_of_small_requests():
    desk = make.desk(a="cpu=4,memory=8Gi")
    small = [desk.reserve("cpu=1,memory=1Gi") for _ in range(4)]
    big = desk.reserve("cpu=4,memory=1Gi", **WAIT)
    for held in small:
        desk.release(held)
        if desk[big].phase == "Pending":
            assert desk.refused("cpu=1,memory=1Gi") == "0/1 cluster fits: 1 HeldForWaiter"
    assert desk.target(big) == "a"


def test_small_waiters_do_not_pass_a_big_one_of_their_priority():
    desk = make.desk(a="cpu=4,memory=8Gi")
    held = [desk.reserve("cpu=1,memory=1Gi") for _ in range(4)]
    big = desk.reserve("cpu=2,memory=1Gi", **WAIT)
    small = desk.reserve("cpu=1,memory=1Gi", **WAIT)
    desk.release(held[0])
    assert desk.waiting() == [big, small]
    desk.release(held[1])
    assert desk.waiting() == [small]


def test_higher_priority_passes_the_nomination():
    desk = make.desk(a="cpu=4,memory=8Gi")
    desk.reserve("cpu=3,memory=1Gi")
    desk.reserve("cpu=4,memory=1Gi", **WAIT)
    desk.refused("cpu=1,memory=1Gi")
    assert desk.target(desk.reserve("cpu=1,memory=1Gi", priority=1)) == "a"


def test_only_one_cluster_is_kept_so_that_others_go_on_lending():
    desk = make.desk(a="cpu=4,memory=8Gi", b="cpu=4,memory=8Gi")
    for name in "ab":
        desk.reserve("cpu=2,memory=1Gi", pinned=name)
    big = desk.reserve("cpu=4,memory=1Gi", **WAIT)
    assert desk.nominations() == {big: "a"}
    assert [desk.target(desk.reserve("cpu=1,memory=1Gi")) for _ in range(2)] == ["b", "b"]


def test_nearest_cluster_is_kept():
    desk = make.desk(a="cpu=4,memory=8Gi", b="cpu=8,memory=8Gi", c="cpu=3,memory=8Gi")
    desk.reserve("cpu=3,memory=1Gi", pinned="a")
    desk.reserve("cpu=5,memory=1Gi", pinned="b")
    big = desk.reserve("cpu=4,memory=1Gi", **WAIT)
    assert desk.nominations() == {big: "b"}, "c would never fit, a misses more"


def test_request_that_no_cluster_could_ever_serve_keeps_none():
    desk = make.desk(a="cpu=4,memory=8Gi")
    desk.reserve("cpu=5,memory=1Gi", **WAIT)
    desk.reserve("cpu=1,memory=1Gi,example.com/unknown=1", **WAIT)
    assert desk.nominations() == {}
    desk.reserve("cpu=4,memory=8Gi")


def test_higher_waiter_takes_the_nomination_and_the_lower_one_finds_another():
    desk = FullDesk(a="cpu=4,memory=8Gi", b="cpu=4,memory=8Gi")
    low = desk.reserve("cpu=4,memory=1Gi", **WAIT)
    assert desk.nominations() == {low: "a"}
    high = desk.reserve("cpu=4,memory=1Gi", priority=1, **WAIT)
    assert desk.nominations() == {high: "a", low: "b"}
    third = desk.reserve("cpu=4,memory=1Gi", priority=2, **WAIT)
    assert desk.nominations() == {third: "a", high: "b"}
    desk.release(third)
    assert desk.nominations() == {high: "b", low: "a"}


def test_chain_of_displaced_waiters_may_be_as_long_as_the_queue():
    """Each waiter behind moves on by one cluster; a thousand of them are a loop and no recursion."""
    desk, size = make.Desk(), 1200
    desk.max_waiting = 2 * size
    for number in range(size):
        desk.advertise(f"c{number:04}", "cpu=1,memory=1Gi")
        desk.reserve("cpu=1,memory=1Gi")
    for _ in range(size):
        desk.reserve("cpu=1,memory=1Gi", **WAIT)
    high = desk.reserve("cpu=1,memory=1Gi", priority=1, **WAIT)
    assert desk.nominations()[high] == "c0000"
    assert len(desk.nominations()) == size


LOSING = {
    "cordoned": lambda desk: desk.cordon("a"),
    "drained": lambda desk: desk.drain("a"),
    "too small": lambda desk: desk.advertise("a", "cpu=3,memory=8Gi"),
    "fuller": lambda desk: desk.advertise("a", "cpu=4,memory=8Gi", allocated="cpu=1"),
    "without its label": lambda desk: desk.advertise("a", labels={"zone": "y"}),
    "too expensive": lambda desk: desk.advertise(
        "a", labels={"zone": "x"}, prices=make.price_list(cpu="1")
    ),
    "stale": lambda desk: (
        desk.pass_time(make.STALE_AFTER),
        desk.advertise("b", labels={"zone": "x"}),
    ),
}


@pytest.mark.parametrize("lose", LOSING.values(), ids=LOSING)
def test_nomination_moves_on_when_its_cluster_cannot_serve_any_more(lose):
    desk = make.Desk()
    desk.advertise("a", "cpu=4,memory=8Gi", labels={"zone": "x"})
    desk.advertise("b", "cpu=4,memory=8Gi", labels={"zone": "x"})
    desk.reserve("cpu=3,memory=1Gi", pinned="b")
    desk.reserve("cpu=1,memory=1Gi", pinned="a")
    asked = {"labels": {"zone": "x"}, "max_price": "0.5", **WAIT}
    waiter = desk.reserve("cpu=4,memory=1Gi", **asked)
    assert desk.nominations() == {waiter: "a"}
    lose(desk)
    assert desk.nominations() == {waiter: "b"}
    assert desk.refused("cpu=1,memory=1Gi", pinned="b") == (
        "0/2 clusters fit: 1 HeldForWaiter, 1 NotPinned"
    )


def test_nomination_moves_on_when_its_cluster_withdraws_what_it_offers():
    desk = FullDesk(a="cpu=4,memory=8Gi", b="cpu=4,memory=8Gi")
    waiter = desk.reserve("cpu=4,memory=1Gi", **WAIT)
    assert desk.nominations() == {waiter: "a"}
    desk.withdraw("a")
    assert desk.nominations() == {waiter: "b"}
    desk.advertise("b", "cpu=5,memory=9Gi")
    assert desk.refused("cpu=1,memory=1Gi") == "0/1 cluster fits: 1 HeldForWaiter"


def test_cluster_that_comes_back_is_kept_for_who_waits_longest():
    desk = FullDesk(a="cpu=4,memory=8Gi")
    waiter = desk.reserve("cpu=4,memory=1Gi", **WAIT)
    desk.withdraw("a")
    assert desk.nominations() == {}
    desk.advertise("a", "cpu=5,memory=9Gi")
    assert desk.nominations() == {waiter: "a"}
    assert desk.refused("cpu=1,memory=1Gi") == "0/1 cluster fits: 1 HeldForWaiter"


def test_cluster_that_went_while_no_broker_looked_is_kept_for_nobody():
    """An object that somebody has deleted, for example. When it is back, it is kept as before."""
    desk = FullDesk(a="cpu=4,memory=8Gi")
    waiter = desk.reserve("cpu=4,memory=1Gi", **WAIT)
    desk.ledger = make.Recorder.restore(desk.kept()._replace(clusters=[]))
    assert desk.nominations() == {}
    assert audit.invariant_violations(desk.ledger) == []
    desk.advertise("a", "cpu=5,memory=9Gi")
    assert desk.nominations() == {waiter: "a"}
    assert desk.refused("cpu=1,memory=1Gi") == "0/1 cluster fits: 1 HeldForWaiter"


def test_nomination_moves_on_before_its_cluster_is_removed():
    """What is kept is also lent, so it must be drained before it can go; that hands the nomination over."""
    desk = FullDesk(a="cpu=4,memory=8Gi", b="cpu=4,memory=8Gi")
    waiter = desk.reserve("cpu=4,memory=1Gi", **WAIT)
    assert desk.nominations() == {waiter: "a"}
    with pytest.raises(errors.Conflict, match="a still lends"):
        desk.remove("a")
    assert desk.nominations() == {waiter: "a"}
    desk.drain("a")
    desk.remove("a")
    assert desk.nominations() == {waiter: "b"}


def test_repeated_advertisement_takes_nothing_from_the_queue_and_gives_nothing():
    """Ten thousand clusters say "still here" every half minute: that must not walk the queue."""
    desk = FullDesk(a="cpu=4,memory=8Gi")
    desk.reserve("cpu=2,memory=1Gi", **WAIT)
    desk.ledger.apply(Advertised(desk.now, make.advertisement("a"), desk.now + make.HOUR))
    assert desk.ledger.capacity_freed == set()
    bigger = make.advertisement("a", "cpu=5,memory=8Gi")
    desk.ledger.apply(Advertised(desk.now, bigger, desk.now + make.HOUR))
    assert desk.ledger.capacity_freed == {"a"}


def test_nomination_ends_with_the_wait():
    desk = FullDesk(a="cpu=4,memory=8Gi")
    waiter = desk.reserve("cpu=4,memory=1Gi", **WAIT)
    desk.release(waiter)
    assert desk[waiter].reason == "ReleasedByRequester"
    assert desk[waiter].nominated_cluster is None
    assert desk.ledger.fleet.nomination_count == 0


def test_nomination_ends_when_the_waiter_is_placed_elsewhere():
    desk = FullDesk(a="cpu=4,memory=8Gi", b="cpu=4,memory=8Gi")
    waiter = desk.reserve("cpu=2,memory=1Gi", **WAIT)
    assert desk.nominations() == {waiter: "a"}
    desk.release(desk.holds["b"])
    assert desk.target(waiter) == "b"
    assert desk.ledger.fleet.nomination_count == 0
    desk.release(desk.holds["a"])
    desk.reserve("cpu=4,memory=8Gi", pinned="a")


def test_wait_that_times_out_fails():
    desk = FullDesk(a="cpu=4,memory=8Gi")
    waiter = desk.reserve("cpu=2,memory=1Gi", wait=30 * make.SECOND)
    desk.pass_time(30 * make.SECOND - make.MOMENT)
    desk.expire()
    assert desk[waiter].phase == "Pending"
    desk.pass_time(make.MOMENT)
    desk.expire()
    failed = desk[waiter]
    assert (failed.phase, failed.reason) == ("Failed", "WaitTimedOut")
    assert failed.message == "No cluster fitted in time: 0/1 cluster fits: 1 InsufficientCPU"
    assert failed.finished_at == desk.now
    assert desk.ledger.waiting_count == 0
    assert desk.ledger.fleet.nomination_count == 0


def test_capacity_that_came_free_before_the_wait_was_over_is_not_missed():
    """The sweep may be late, after a restart for example: both deadlines are then past."""
    desk = make.desk(a="cpu=4,memory=8Gi")
    desk.reserve("cpu=4,memory=8Gi", duration=make.MINUTE)
    waiter = desk.reserve("cpu=2,memory=1Gi", wait=2 * make.MINUTE)
    desk.pass_time(3 * make.MINUTE)
    desk.expire()
    assert desk.target(waiter) == "a"


def test_nomination_of_a_timed_out_waiter_is_handed_over_at_once():
    desk = FullDesk(a="cpu=4,memory=8Gi")
    first = desk.reserve("cpu=4,memory=1Gi", wait=make.MINUTE)
    second = desk.reserve("cpu=4,memory=1Gi", wait=make.HOUR)
    assert desk.nominations() == {first: "a"}
    desk.pass_time(make.MINUTE)
    desk.expire()
    assert desk.nominations() == {second: "a"}


def test_full_queue_refuses_and_changes_nothing():
    desk = FullDesk(a="cpu=4,memory=8Gi")
    desk.max_waiting = 2
    waiters = [desk.reserve("cpu=2,memory=1Gi", **WAIT) for _ in range(2)]
    before = make.state(desk.ledger)
    with pytest.raises(errors.QueueFull, match="2 requests are already waiting"):
        desk.reserve("cpu=2,memory=1Gi", priority=9, **WAIT)
    assert make.state(desk.ledger) == before
    desk.release(waiters[0])
    desk.reserve("cpu=2,memory=1Gi", **WAIT)


def test_restored_queue_serves_in_the_same_order():
    desk = FullDesk(a="cpu=1,memory=1Gi")
    asked = [desk.reserve("cpu=1,memory=1Gi", priority=p, **WAIT) for p in (1, 0, 2, 1)]
    restored = make.Desk(make.Recorder.restore(desk.kept()), desk.now)
    assert restored.waiting() == desk.waiting() == [asked[2], asked[0], asked[3], asked[1]]
    assert restored.nominations() == desk.nominations()
    for one in (desk, restored):
        one.release(desk.holds["a"])
    assert make.state(restored.ledger) == make.state(desk.ledger)
    assert restored[asked[2]].is_live


def test_moved_reservation_keeps_its_rank_against_waiters():
    """Refused by its provider, it is older than who waits: the capacity kept for them is open to it."""
    desk = make.desk(a="cpu=2,memory=8Gi")
    held = desk.reserve("cpu=2,memory=1Gi")
    desk.advertise("b", "cpu=4,memory=8Gi")
    desk.reserve("cpu=2,memory=1Gi", pinned="b")
    waiter = desk.reserve("cpu=4,memory=1Gi", **WAIT)
    assert desk.nominations() == {waiter: "b"}
    desk.refuse(held, "a")
    assert desk.target(held) == "b"


def test_serving_is_what_the_reference_would_do():
    desk = FullDesk(a="cpu=4,memory=8Gi", b="cpu=4,memory=8Gi", c="cpu=2,memory=8Gi")
    for cpu, priority in ((3, 0), (2, 1), (1, 0), (4, 0)):
        desk.reserve(f"cpu={cpu},memory=1Gi", priority=priority, **WAIT)
    for hold in desk.holds.values():
        desk.release(hold)
        for waiter in desk.ledger.waiting():
            question = quotas.query_for_reservation(desk.ledger, waiter, desk.now)
            assert reference.decide(question, desk.ledger) is None


def test_nobody_waits_in_a_fresh_ledger():
    assert Ledger().waiting() == []
    assert list(waiting.serve_queue(Ledger(), make.T0)) == []
