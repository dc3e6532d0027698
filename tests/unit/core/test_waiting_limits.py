"""Who waits is served when a limit lets it be, and keeps no cluster that its limits keep from it."""

import pytest

import make
from kubelend.core.ledger import Ledger

WAIT = {"wait": 3 * make.HOUR}


def desk_with(**fields):
    """One provider whose administrator says this of it."""
    desk = make.desk(a="cpu=4,memory=8Gi")
    desk.limit("a", **fields)
    return desk


EASED = {
    "allowed": ({"allow": ["s"]}, {"allow": ["r"]}),
    "not denied any more": ({"deny": ["r"]}, {}),
    "less kept back": ({"keep_back": "cpu=3"}, {"keep_back": "cpu=1"}),
    "lending more": ({"max_lent": "cpu=1"}, {"max_lent": "cpu=3"}),
    "lending more to each": ({"max_per_requester": "cpu=1"}, {"max_per_requester": "cpu=2"}),
    "open": ({"hours": ["13:00-14:00"]}, {"hours": ["12:00-14:00"]}),
}


@pytest.mark.parametrize("before, after", EASED.values(), ids=EASED)
@pytest.mark.parametrize("by", ["an administrator", "the cluster itself"])
def test_limit_that_is_eased_serves_the_waiter(before, after, by):
    desk = make.Desk()

    def say(policy):
        own = make.policy(**policy) if by == "the cluster itself" else None
        desk.advertise("a", "cpu=4,memory=8Gi", policy=own)
        if by == "an administrator":
            desk.limit("a", **policy)

    say(before)
    waiter = desk.reserve("cpu=2,memory=1Gi", **WAIT)
    assert desk[waiter].phase == "Pending"
    say(after)
    assert desk.target(waiter) == "a"


def test_cluster_that_opens_serves_the_waiter_when_the_time_has_come():
    desk = desk_with(hours=["12:05-18:00"])
    waiter = desk.reserve("cpu=2,memory=1Gi", **WAIT)
    desk.expire()
    opens = make.T0 + 5 * make.MINUTE
    assert desk.ledger.next_deadline() == opens, "the broker sleeps until then"
    desk.pass_time(5 * make.MINUTE - make.MOMENT)
    desk.expire()
    assert desk[waiter].phase == "Pending"
    desk.pass_time(make.MOMENT)
    desk.expire()
    assert (desk.target(waiter), desk[waiter].reserved_at) == ("a", opens)
    assert desk.ledger.next_deadline() == desk[waiter].expires_at


def test_cluster_that_opened_while_nobody_looked_serves_the_waiter():
    desk = desk_with(hours=["12:05-18:00"])
    waiter = desk.reserve("cpu=2,memory=1Gi", **WAIT)
    restored = make.Desk(make.Recorder.restore(desk.kept()), desk.now + 7 * make.MINUTE)
    due = restored.ledger.next_deadline()
    assert due is not None
    assert due <= restored.now
    restored.expire()
    assert restored.target(waiter) == "a"


def test_opening_that_a_decision_noticed_first_is_not_lost():
    desk = desk_with(hours=["12:05-18:00"])
    waiter = desk.reserve("cpu=2,memory=1Gi", **WAIT)
    desk.expire()
    desk.pass_time(5 * make.MINUTE)
    desk.refused("cpu=9,memory=1Gi")
    desk.expire()
    assert desk.target(waiter) == "a"


def test_nobody_waits_for_an_opening_if_nobody_waits():
    desk = desk_with(hours=["13:00-14:00"])
    desk.expire()
    assert desk.ledger.next_deadline() is None
    assert Ledger().next_deadline() is None


def test_hours_that_are_lifted_leave_nothing_due():
    desk = desk_with(hours=["13:00-14:00"])
    waiter = desk.reserve("cpu=9,memory=1Gi", **WAIT)
    desk.limit("a", keep_back="cpu=1")
    desk.expire()
    assert desk.ledger.next_deadline() == desk[waiter].wait_until


def test_closed_cluster_is_kept_for_nobody():
    desk = make.desk(a="cpu=4,memory=8Gi", b="cpu=4,memory=8Gi")
    for name in "ab":
        desk.reserve("cpu=3,memory=1Gi", pinned=name)
    desk.limit("a", hours=["13:00-14:00"])
    waiter = desk.reserve("cpu=4,memory=1Gi", **WAIT)
    assert desk.nominations() == {waiter: "b"}


def test_nomination_moves_on_when_its_cluster_closes_and_something_comes_free():
    desk = make.Desk()
    desk.advertise("a", "cpu=4,memory=8Gi", policy=make.policy(hours=["08:00-12:05"]))
    desk.advertise("b", "cpu=4,memory=8Gi")
    desk.reserve("cpu=1,memory=1Gi", pinned="a")
    small, large = (desk.reserve(f"cpu={n},memory=1Gi", pinned="b") for n in (1, 3))
    waiter = desk.reserve("cpu=4,memory=1Gi", **WAIT)
    assert desk.nominations() == {waiter: "a"}
    desk.pass_time(5 * make.MINUTE)
    desk.release(small)
    assert desk.nominations() == {waiter: "b"}
    desk.release(large)
    assert desk.target(waiter) == "b"


def test_who_has_its_share_keeps_the_cluster_from_nobody():
    desk = desk_with(max_per_requester="cpu=2")
    held = desk.reserve("cpu=2,memory=1Gi")
    waiter = desk.reserve("cpu=1,memory=1Gi", **WAIT)
    assert desk.nominations() == {}
    desk.reserve("cpu=1,memory=1Gi", requester="other")
    desk.release(held)
    assert desk.target(waiter) == "a"


def test_who_has_its_share_of_a_full_cluster_keeps_it_from_nobody():
    desk = desk_with(max_per_requester="cpu=2")
    desk.reserve("cpu=2,memory=1Gi")
    others = [desk.reserve("cpu=1,memory=1Gi", requester="other") for _ in range(2)]
    desk.reserve("cpu=1,memory=1Gi", **WAIT)
    assert desk.nominations() == {}
    desk.release(others[0])
    desk.reserve("cpu=1,memory=1Gi", requester="another")


def test_who_takes_its_own_share_keeps_the_cluster_no_more():
    desk = desk_with(max_per_requester="cpu=2")
    for requester, cpu in (("s", 2), ("t", 1)):
        desk.reserve(f"cpu={cpu},memory=1Gi", requester=requester)
    waiter = desk.reserve("cpu=2,memory=1Gi", **WAIT)
    assert desk.nominations() == {waiter: "a"}
    desk.reserve("cpu=1,memory=1Gi", priority=1)
    assert desk.nominations() == {}


@pytest.mark.parametrize("policy", [{"keep_back": "cpu=1"}, {"max_lent": "cpu=3"}], ids=str)
def test_big_waiter_is_not_starved_on_a_cluster_that_lends_less_than_it_has(policy):
    desk = desk_with(**policy)
    small = [desk.reserve("cpu=1,memory=1Gi") for _ in range(3)]
    big = desk.reserve("cpu=3,memory=1Gi", **WAIT)
    for held in small:
        desk.release(held)
        if desk[big].phase == "Pending":
            assert desk.refused("cpu=1,memory=1Gi") == "0/1 cluster fits: 1 HeldForWaiter"
    assert desk.target(big) == "a"


def test_request_for_more_than_a_cluster_ever_lends_keeps_it_from_nobody():
    desk = desk_with(max_lent="cpu=3")
    desk.reserve("cpu=1,memory=1Gi")
    desk.reserve("cpu=4,memory=1Gi", **WAIT)
    assert desk.nominations() == {}
