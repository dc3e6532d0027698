"""Reservations leave an unreachable provider; a provider that may be reachable is not given up."""

import pytest

import make
from kubelend.core import enrolment, failover
from kubelend.core.lifecycle import Role
from kubelend.core.models import ClusterId

WANTED = "cpu=1,memory=1Gi"
LOST_AFTER = 5 * make.MINUTE
SHORT = {"valid_for": make.MINUTE}


@pytest.fixture
def runner():
    """`a` is the best of three, and the only one that does not speak again."""
    made = make.runner(b="cpu=4,memory=4Gi", c="cpu=2,memory=2Gi")
    made.advertise("a", "cpu=8,memory=8Gi", **SHORT)
    for name in "bc":
        made.advertise(name, made.ledger.cluster(ClusterId(name)).advertisement)
    return made


@pytest.fixture
def monitor(runner):
    return runner.monitor(LOST_AFTER)


def keep_speaking(runner, *names):
    for name in names:
        runner.advertise(name, runner.ledger.clusters[name].advertisement)


def fall_silent(runner, monitor):
    """Until the very moment in which `a` is given up."""
    return runner.run_failover(monitor, make.MINUTE + LOST_AFTER)


def test_what_it_lends_moves_in_the_moment_it_is_given_up(runner, monitor):
    held = runner.reserve(WANTED, duration=make.HOUR)
    assert runner.target(held) == "a"
    assert runner.run_failover(monitor, make.MINUTE + LOST_AFTER - 5 * make.SECOND) == []
    assert runner.target(held) == "a"
    (lost,) = runner.run_failover(monitor, 5 * make.SECOND)
    assert lost.id == "a"
    moved = runner[held]
    assert (moved.phase, moved.reason, moved.target) == ("Reserved", "Moved", "b")
    assert moved.left == ("a",)
    assert moved.expires_at == make.T0 + make.HOUR, "the promised end stays"
    assert moved.message == (
        "Resources locked in cluster b. Moved from a, unreachable since 12:00:00 UTC"
    )
    assert not runner.reserved("a")
    assert runner.reserved("b") == make.resources(WANTED)


def test_without_failover_it_fails_in_that_moment_and_nothing_is_reserved(runner, monitor):
    """Though another cluster has room. What its other reservations want makes no difference."""
    lost, moved = runner.reserve(WANTED, failover=False), runner.reserve(WANTED)
    fall_silent(runner, monitor)
    found = runner[lost]
    assert (found.phase, found.reason) == ("Failed", "ProviderUnreachable")
    assert found.message == "Lost cluster a, unreachable since 12:00:00 UTC; failover is off"
    assert runner.target(moved) == "b"
    assert not runner.reserved("a")


def test_how_far_it_had_come_makes_no_difference(runner, monitor):
    held = runner.reserve(WANTED)
    runner.acknowledge(held, "a")
    runner.activate(held)
    fall_silent(runner, monitor)
    moved = runner[held]
    assert (moved.phase, moved.target) == ("Reserved", "b")
    assert moved.acknowledged_at is moved.activated_at is None


def test_nobody_is_given_up_who_lends_nothing_or_if_failover_is_off(runner, monitor):
    assert fall_silent(runner, monitor) == []
    assert fall_silent(runner, runner.monitor(make.NO_TIME)) == []
    empty = make.CommandRunner()
    assert empty.run_failover(empty.monitor(make.SECOND), make.MINUTE) == []


def test_the_oldest_go_first_and_what_does_not_fit_stays(runner, monitor):
    """Two of them fit on b and one on c."""
    for name in "bc":
        runner.cordon(name)
    held = [runner.reserve("cpu=1500m,memory=1Gi") for _ in range(5)]
    for name in "bc":
        runner.uncordon(name)
    fall_silent(runner, monitor)
    assert [runner.target(one) for one in held] == ["b", "b", "c", "a", "a"]
    reasons = ["Moved"] * 3 + ["ProviderUnreachable"] * 2
    assert [runner[one].reason for one in held] == reasons


@pytest.fixture
def stuck(runner, monitor):
    """One that only `a` has room for."""
    found = runner.reserve("cpu=5,memory=1Gi")
    fall_silent(runner, monitor)
    return found


def test_what_fits_nowhere_else_stays_and_says_so_once_and_is_retried(runner, monitor, stuck):
    kept = runner[stuck]
    assert (kept.phase, kept.reason, kept.target) == ("Reserved", "ProviderUnreachable", "a")
    assert kept.message == (
        "Stays in cluster a, unreachable since 12:00:00 UTC; no other cluster fits yet"
    )
    assert runner.reserved("a") == kept.request.resources
    revision = runner.ledger.revision
    runner.run_failover(monitor, 3 * failover.RETRY_INTERVAL)
    assert runner.ledger.revision == revision
    runner.advertise("b", "cpu=16,memory=16Gi")
    runner.pass_time(make.SECOND)
    runner.fail_over(monitor)
    assert runner.target(stuck) == "a"
    runner.run_failover(monitor, failover.RETRY_INTERVAL)
    assert (runner.target(stuck), runner[stuck].reason) == ("b", "Moved")


@pytest.mark.parametrize("use, reason", [("in use", "InUse"), ("locked", "Locked")])
def test_provider_that_comes_back_has_what_was_kept_there(runner, monitor, use, reason):
    stuck = runner.reserve("cpu=5,memory=1Gi")
    if use == "in use":
        runner.activate(stuck)
    before = runner[stuck]
    fall_silent(runner, monitor)
    assert (runner[stuck].phase, runner[stuck].reason) == (before.phase, "ProviderUnreachable")
    runner.advertise("a", "cpu=8,memory=8Gi")
    runner.run_failover(monitor, make.SECOND)
    after = runner[stuck]
    assert (after.phase, after.expires_at) == (before.phase, before.expires_at)
    assert (after.reason, after.message) == (reason, f"Resources {use} in cluster a")


def test_one_that_moved_there_before_says_so_again(runner, monitor):
    held = runner.reserve("cpu=3,memory=1Gi")
    runner.refuse(held, "a")
    runner.advertise("b", "cpu=4,memory=4Gi", **SHORT)
    fall_silent(runner, monitor)
    assert (runner.target(held), runner[held].reason) == ("b", "ProviderUnreachable")
    keep_speaking(runner, "b")
    runner.run_failover(monitor, make.SECOND)
    assert (runner.target(held), runner[held].reason) == ("b", "Moved")


def test_restart_remembers_what_is_stranded(runner, stuck):
    runner.ledger = type(runner.ledger).restore(runner.kept())
    monitor = runner.monitor(LOST_AFTER)
    runner.run_failover(monitor, make.SECOND)
    assert runner[stuck].reason == "ProviderUnreachable", "it has not come back yet"
    runner.advertise("a", "cpu=8,memory=8Gi")
    runner.run_failover(monitor, make.SECOND)
    assert runner[stuck].reason == "Locked"


def test_many_are_moved_in_portions_whether_or_not_the_first_fit_elsewhere(runner, monitor):
    count = 2 * failover.MAX_ATTEMPTS_PER_RUN + 1
    stuck = [runner.reserve("cpu=1m,memory=1Mi", pinned="a") for _ in range(10)]
    held = [runner.reserve("cpu=1m,memory=1Mi", excluded="bc") for _ in range(count)]
    runner.advertise("d", "cpu=64,memory=512Gi")
    fall_silent(runner, monitor)
    assert sum(runner.target(one) == "d" for one in held) == failover.MAX_ATTEMPTS_PER_RUN - 10
    assert monitor.is_busy
    runner.pass_time(make.MOMENT)
    runner.fail_over(monitor)
    runner.fail_over(monitor)
    assert {runner.target(one) for one in held} == {"d"}
    assert {runner[one].reason for one in stuck} == {"ProviderUnreachable"}
    assert not monitor.is_busy


@pytest.mark.parametrize("end", ["release", "drain"])
def test_what_ended_or_was_moved_meanwhile_is_left_alone(runner, monitor, end):
    few = failover.MAX_ATTEMPTS_PER_RUN + 2
    held = [runner.reserve("cpu=1m,memory=1Mi", excluded="bc") for _ in range(few)]
    fall_silent(runner, monitor)
    runner.advertise("d", "cpu=8,memory=8Gi")
    if end == "drain":
        runner.drain("a")
    else:
        for one in held[-2:]:
            runner.release(one)
    revision = runner.ledger.revision
    runner.fail_over(monitor)
    assert runner.ledger.revision == revision


@pytest.mark.parametrize("pause", ["the broker was down", "its clock jumped, or it slept"])
def test_after_a_pause_of_the_broker_everybody_has_the_time_anew(runner, monitor, pause):
    """`b` and `c` advertise just before, and would fit."""
    held = runner.reserve(WANTED)
    runner.run_failover(monitor, make.MINUTE)
    keep_speaking(runner, "b", "c")
    runner.pass_time(make.STALE_AFTER - make.SECOND)
    if pause == "the broker was down":
        monitor = runner.monitor(LOST_AFTER)
    assert runner.fail_over(monitor) == []
    keep_speaking(runner, "b", "c")
    assert runner.run_failover(monitor, LOST_AFTER - 5 * make.SECOND) == []
    assert runner.target(held) == "a"
    assert [lost.id for lost in runner.run_failover(monitor, 5 * make.SECOND)] == ["a"]


def test_clock_that_goes_back_does_not_put_anything_off(runner, monitor):
    runner.pass_time(-make.HOUR)
    runner.fail_over(monitor)
    keep_speaking(runner, "a", "b", "c")
    held = runner.reserve(WANTED)
    fall_silent(runner, monitor)
    assert runner.target(held) == "b"


def test_looks_follow_each_other_at_a_distance(runner, monitor):
    """Expiries may wake the broker a thousand times a second."""
    held = runner.reserve(WANTED)
    runner.run_failover(monitor, make.MINUTE + LOST_AFTER - make.MOMENT)
    runner.pass_time(make.MOMENT)
    runner.fail_over(monitor)
    assert runner.target(held) == "a"
    runner.pass_time(failover.CHECK_INTERVAL)
    runner.fail_over(monitor)
    assert runner.target(held) == "b"


def test_where_no_provider_is_reachable_it_may_be_the_broker_that_is_cut_off(runner, monitor):
    held = runner.reserve(WANTED)
    for name in "bc":
        runner.advertise(name, "cpu=4,memory=4Gi", **SHORT)
    assert runner.run_failover(monitor, 3 * LOST_AFTER) == []
    keep_speaking(runner, "b")
    assert runner.run_failover(monitor, make.MINUTE - make.SECOND) == []
    assert runner.target(held) == "a", "the others have not had the time to speak"
    for _ in range(5):
        keep_speaking(runner, "b")
        runner.run_failover(monitor, make.MINUTE - make.SECOND)
    assert runner.target(held) == "b"


def test_revoked_provider_is_silent_by_order(runner, monitor):
    """What becomes of its loans was decided when it was revoked: without a release they stay."""
    held = runner.reserve(WANTED)
    fields = {"reason": "", "by": "alice", "release": False, "now": runner.now}
    runner.run(enrolment.revoke_member(runner.ledger, Role.CLUSTER, "a", **fields))
    assert fall_silent(runner, monitor) == []
    assert runner.target(held) == "a"
    assert runner[held].reason == "Locked"


@pytest.mark.parametrize("meanwhile", ["comes back", "sleeps", "withdrawn"])
def test_what_is_left_stays_if_the_provider_returns_or_the_broker_slept(runner, monitor, meanwhile):
    moved = failover.MAX_ATTEMPTS_PER_RUN
    held = [runner.reserve("cpu=1m,memory=1Mi", excluded="bc") for _ in range(moved + 3)]
    runner.advertise("d", "cpu=8,memory=8Gi")
    fall_silent(runner, monitor)
    assert monitor.is_busy
    if meanwhile == "comes back":
        keep_speaking(runner, "a")
    elif meanwhile == "sleeps":
        runner.pass_time(2 * failover.MAX_CHECK_GAP)
    else:
        runner.withdraw("a")
    runner.fail_over(monitor)
    assert [runner.target(one) for one in held] == ["d"] * moved + ["a"] * 3
