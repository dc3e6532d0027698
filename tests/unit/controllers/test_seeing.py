"""Whether objects can be seen: what is out of sight for a moment is no reason to send callers away."""

import pytest

import make
from clocks import Seconds
from kubelend.kube.informer import WatchHealth


@pytest.fixture
def clock():
    return Seconds(100.0)


@pytest.fixture
def seeing(clock):
    return WatchHealth(("letters", "parcels"), " in boxes", 15 * make.SECOND, clock)


def listed(seeing):
    seeing.listed("letters")
    seeing.listed("parcels")


def test_what_waits_for_the_first_list_is_not_told_beside_a_problem(seeing):
    seeing.report("letters", "forbidden")
    assert seeing.unready == "cannot watch letters in boxes: forbidden"


def test_what_has_never_been_seen_is_told_at_once(seeing):
    seeing.listed("letters")
    assert seeing.unready == "cannot watch parcels in boxes: waiting for the initial list"
    seeing.report("parcels", "forbidden")
    seeing.listed("parcels")  # but whether it is watched is not known yet
    assert seeing.unready == "cannot watch parcels in boxes: forbidden"
    seeing.report("parcels", "")
    assert seeing.unready is None


def test_problem_is_told_after_a_grace(seeing, clock):
    listed(seeing)
    seeing.report("letters", "cut off")
    clock.now += 14
    seeing.report("letters", "refused")
    assert seeing.unready is None
    clock.now += 1
    assert seeing.unready == "cannot watch letters in boxes: refused"


def test_problem_that_has_passed_begins_anew(seeing, clock):
    listed(seeing)
    for problem in ("cut off", "", "cut off"):
        seeing.report("letters", problem)
        clock.now += 10
    assert seeing.unready is None


def test_all_problems_are_told(seeing, clock):
    listed(seeing)
    for kind in ("letters", "parcels"):
        seeing.report(kind, "no")
    clock.now += 15
    assert seeing.unready == "cannot watch letters in boxes: no; cannot watch parcels in boxes: no"
