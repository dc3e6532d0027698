"""Reservations leave an unreachable provider; a provider that may be reachable is not given up."""

import pytest

import make
from kubelend.core import commands, enrolment, failover
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import Role
from kubelend.core.models import ClusterId

WANTED = "cpu=1,memory=1Gi"
LOST_AFTER = 5 * make.MINUTE
SHORT = {"valid_for": make.MINUTE}


@pytest.fixture
def desk():
    """`a` is the best of three, and the only one that does not speak again."""
    made = make.desk(b="cpu=4,memory=4Gi", c="cpu=2,memory=2Gi")
    made.advertise("a", "cpu=8,memory=8Gi", **SHORT)
    for name in "bc":
        made.advertise(name, made.ledger.cluster(ClusterId(name)).advertisement)
    return made


@pytest.fixture
def monitor(desk):
    return desk.monitor(LOST_AFTER)


def keep_speaking(desk, *names):
    for name in names:
        desk.advertise(name, desk.ledger.clusters[name].advertisement)


def fall_silent(desk, monitor):
    """Until the very moment in which `a` is given up."""
    return desk.run_failover(monitor, make.MINUTE + LOST_AFTER)


def test_what_it_lends_moves_in_the_moment_it_is_given_up(desk, monitor):
    held = desk.reserve(WANTED, duration=make.HOUR)
    assert desk.target(held) == "a"
    assert desk.run_failover(monitor, make.MINUTE + LOST_AFTER - 5 * make.SECOND) == []
    assert desk.target(held) == "a"
    (lost,) = desk.run_failover(monitor, 5 * make.SECOND)
    assert lost.id == "a"
    moved = desk[held]
    assert (moved.phase, moved.reason, moved.target) == ("Reserved", "Moved", "b")
    assert moved.left == ("a",)
    assert moved.expires_at == make.T0 + make.HOUR, "the promised end stays"
    assert moved.message == (
        "Resources locked in cluster b. Moved from a, unreachable since 12:00:00 UTC"
    )
    assert not desk.reserved("a")
    assert desk.reserved("b") == make.resources(WANTED)


@pytest.mark.parametrize("command", ["acknowledge", "activate"])
def test_how_far_it_had_come_makes_no_difference(desk, monitor, command):
    held = desk.reserve(WANTED)
    getattr(desk, command)(held, *(["a"] if command == "acknowledge" else []))
    fall_silent(desk, monitor)
    moved = desk[held]
    assert (moved.phase, moved.target) == ("Reserved", "b")
    assert moved.acknowledged_at is moved.activated_at is None


def test_price_is_agreed_anew(desk, monitor):
    desk.advertise("b", "cpu=4,memory=4Gi", prices=make.price_list(cpu="0.2"))
    held = desk.reserve(WANTED)
    assert desk[held].hourly == 0
    fall_silent(desk, monitor)
    assert desk[held].hourly == 200_000_000
    assert desk[held].currency == "USD"


def test_provider_that_speaks_in_time_keeps_what_it_lends(desk, monitor):
    held = desk.reserve(WANTED)
    desk.run_failover(monitor, make.MINUTE + LOST_AFTER - 5 * make.SECOND)
    desk.advertise("a", "cpu=8,memory=8Gi", **SHORT)
    keep_speaking(desk, "b", "c")
    assert desk.run_failover(monitor, LOST_AFTER) == []
    assert desk.target(held) == "a"
    desk.run_failover(monitor, make.MINUTE)
    assert desk.target(held) == "b"


def test_zero_gives_nobody_up(desk):
    held = desk.reserve(WANTED)
    assert desk.run_failover(desk.monitor(make.NO_TIME), make.STALE_AFTER - make.SECOND) == []
    assert desk.target(held) == "a"


def test_nobody_who_lends_nothing_is_given_up(desk, monitor):
    assert fall_silent(desk, monitor) == []


def test_same_capacity_is_not_promised_to_two(desk, monitor):
    """Two of them fit on b and one on c: the oldest go first, and the others stay."""
    desk.cordon("b")
    desk.cordon("c")
    held = [desk.reserve("cpu=1500m,memory=1Gi") for _ in range(5)]
    desk.uncordon("b")
    desk.uncordon("c")
    fall_silent(desk, monitor)
    assert [desk.target(one) for one in held] == ["b", "b", "c", "a", "a"]
    assert [desk[one].reason for one in held][2:] == ["Moved", "ProviderSilent", "ProviderSilent"]


# -- what fits nowhere else


@pytest.fixture
def stuck(desk, monitor):
    """One that only `a` has room for."""
    found = desk.reserve("cpu=5,memory=1Gi")
    fall_silent(desk, monitor)
    return found


def test_what_fits_nowhere_else_stays_and_says_so(desk, stuck):
    kept = desk[stuck]
    assert (kept.phase, kept.reason, kept.target) == ("Reserved", "ProviderSilent", "a")
    assert kept.message == (
        "Stays in cluster a, unreachable since 12:00:00 UTC; no other cluster fits yet"
    )
    assert desk.reserved("a") == kept.request.resources


def test_it_is_said_once(desk, monitor, stuck):
    revision = desk.ledger.revision
    desk.run_failover(monitor, 3 * failover.RETRY_INTERVAL)
    assert desk.ledger.revision == revision


def test_it_moves_when_another_has_room(desk, monitor, stuck):
    desk.advertise("b", "cpu=16,memory=16Gi")
    desk.run_failover(monitor, failover.RETRY_INTERVAL)
    assert (desk.target(stuck), desk[stuck].reason) == ("b", "Moved")


def test_it_is_not_tried_all_the_time(desk, monitor, stuck):
    desk.advertise("b", "cpu=16,memory=16Gi")
    desk.pass_time(make.SECOND)
    desk.fail_over(monitor)
    assert desk.target(stuck) == "a"


@pytest.mark.parametrize(
    "is_used, reason, message",
    [
        (False, "Locked", "Resources locked in cluster a"),
        (True, "InUse", "Resources in use in cluster a"),
    ],
)
def test_provider_that_comes_back_has_what_was_kept_there(desk, monitor, is_used, reason, message):
    stuck = desk.reserve("cpu=5,memory=1Gi")
    if is_used:
        desk.activate(stuck)
    before = desk[stuck]
    fall_silent(desk, monitor)
    assert (desk[stuck].phase, desk[stuck].reason) == (before.phase, "ProviderSilent")
    desk.advertise("a", "cpu=8,memory=8Gi")
    desk.run_failover(monitor, make.SECOND)
    after = desk[stuck]
    assert (after.phase, after.reason, after.message) == (before.phase, reason, message)
    assert after.expires_at == before.expires_at


def test_one_that_moved_there_before_says_so_again(desk, monitor):
    held = desk.reserve("cpu=3,memory=1Gi")
    desk.refuse(held, "a")
    desk.advertise("b", "cpu=4,memory=4Gi", **SHORT)
    fall_silent(desk, monitor)
    assert (desk.target(held), desk[held].reason) == ("b", "ProviderSilent")
    keep_speaking(desk, "b")
    desk.run_failover(monitor, make.SECOND)
    assert (desk.target(held), desk[held].reason) == ("b", "Moved")


def test_restart_remembers_what_is_stranded(desk, stuck):
    desk.ledger = type(desk.ledger).restore(desk.kept())
    monitor = desk.monitor(LOST_AFTER)
    desk.run_failover(monitor, make.SECOND)
    assert desk[stuck].reason == "ProviderSilent", "it has not come back yet"
    desk.advertise("a", "cpu=8,memory=8Gi")
    desk.run_failover(monitor, make.SECOND)
    assert desk[stuck].reason == "Locked"


def test_many_are_moved_in_portions(desk, monitor):
    count = 2 * failover.MAX_ATTEMPTS_PER_RUN + 1
    held = [desk.reserve("cpu=1m,memory=1Mi", excluded="bc") for _ in range(count)]
    desk.advertise("d", "cpu=64,memory=512Gi")
    fall_silent(desk, monitor)
    assert sum(desk.target(one) == "d" for one in held) == failover.MAX_ATTEMPTS_PER_RUN
    assert monitor.is_busy
    desk.pass_time(make.MOMENT)
    desk.fail_over(monitor)
    desk.fail_over(monitor)
    assert {desk.target(one) for one in held} == {"d"}
    assert not monitor.is_busy


def test_those_that_fit_nowhere_do_not_keep_the_others_waiting(desk, monitor):
    """However many are stuck, each has its turn."""
    stuck = [
        desk.reserve("cpu=1m,memory=1Mi", pinned="a")
        for _ in range(failover.MAX_ATTEMPTS_PER_RUN + 10)
    ]
    free = desk.reserve(WANTED)
    fall_silent(desk, monitor)
    desk.run_failover(monitor, 5 * make.SECOND)
    assert desk.target(free) == "b"
    assert {desk[one].reason for one in stuck} == {"ProviderSilent"}


@pytest.mark.parametrize("end", ["release", "drain"])
def test_what_ended_or_was_moved_meanwhile_is_left_alone(desk, monitor, end):
    few = failover.MAX_ATTEMPTS_PER_RUN + 2
    held = [desk.reserve("cpu=1m,memory=1Mi", excluded="bc") for _ in range(few)]
    fall_silent(desk, monitor)
    desk.advertise("d", "cpu=8,memory=8Gi")
    if end == "drain":
        desk.drain("a")
    else:
        for one in held[-2:]:
            desk.release(one)
    revision = desk.ledger.revision
    desk.fail_over(monitor)
    assert desk.ledger.revision == revision


# -- silence that counts for nothing


def test_broker_that_was_down_gives_everybody_the_time_anew(desk, monitor):
    held = desk.reserve(WANTED)
    desk.pass_time(make.HOUR)
    keep_speaking(desk, "b", "c")
    monitor = desk.monitor(LOST_AFTER)
    assert desk.run_failover(monitor, LOST_AFTER - 5 * make.SECOND) == []
    assert desk.target(held) == "a"
    assert [lost.id for lost in desk.run_failover(monitor, 5 * make.SECOND)] == ["a"]


def test_clock_that_jumps_ahead_gives_everybody_the_time_anew(desk, monitor):
    """Or the process slept. `b` and `c` advertise just before, and would fit."""
    held = desk.reserve(WANTED)
    desk.run_failover(monitor, make.MINUTE)
    keep_speaking(desk, "b", "c")
    desk.pass_time(make.STALE_AFTER - make.SECOND)
    assert desk.fail_over(monitor) == []
    keep_speaking(desk, "b", "c")
    assert desk.run_failover(monitor, LOST_AFTER - 5 * make.SECOND) == []
    assert desk.target(held) == "a"
    assert [lost.id for lost in desk.run_failover(monitor, 5 * make.SECOND)] == ["a"]


def test_clock_that_goes_back_does_not_put_anything_off(desk, monitor):
    desk.pass_time(-make.HOUR)
    desk.fail_over(monitor)
    keep_speaking(desk, "a", "b", "c")
    held = desk.reserve(WANTED)
    fall_silent(desk, monitor)
    assert desk.target(held) == "b"


def test_looks_follow_each_other_at_a_distance(desk, monitor):
    """Expiries may wake the broker a thousand times a second."""
    held = desk.reserve(WANTED)
    desk.run_failover(monitor, make.MINUTE + LOST_AFTER - make.MOMENT)
    desk.pass_time(make.MOMENT)
    desk.fail_over(monitor)
    assert desk.target(held) == "a"
    desk.pass_time(failover.CHECK_INTERVAL)
    desk.fail_over(monitor)
    assert desk.target(held) == "b"


def test_where_no_provider_is_reachable_it_may_be_the_broker_that_is_cut_off(desk, monitor):
    held = desk.reserve(WANTED)
    for name in "bc":
        desk.advertise(name, "cpu=4,memory=4Gi", **SHORT)
    assert desk.run_failover(monitor, 3 * LOST_AFTER) == []
    keep_speaking(desk, "b")
    assert desk.run_failover(monitor, make.MINUTE - make.SECOND) == []
    assert desk.target(held) == "a", "the others have not had the time to speak"
    for _ in range(5):
        keep_speaking(desk, "b")
        desk.run_failover(monitor, make.MINUTE - make.SECOND)
    assert desk.target(held) == "b"


def test_revoked_provider_is_silent_by_order(desk, monitor):
    """What becomes of its loans was decided when it was revoked: without a release they stay."""
    held = desk.reserve(WANTED)
    desk.run(
        enrolment.revoke_member(
            desk.ledger, Role.CLUSTER, "a", reason="", by="alice", release=False, now=desk.now
        )
    )
    assert fall_silent(desk, monitor) == []
    assert desk.target(held) == "a"
    assert desk[held].reason == "Locked"


def test_empty_ledger_is_looked_at_like_any_other():
    empty = make.Desk()
    assert empty.run_failover(empty.monitor(make.SECOND), make.MINUTE) == []
    assert isinstance(empty.ledger, Ledger)


def test_provider_that_comes_back_in_the_middle_keeps_the_rest(desk, monitor):
    count = failover.MAX_ATTEMPTS_PER_RUN + 3
    held = [desk.reserve("cpu=1m,memory=1Mi", excluded="bc") for _ in range(count)]
    desk.advertise("d", "cpu=8,memory=8Gi")
    fall_silent(desk, monitor)
    assert monitor.is_busy
    keep_speaking(desk, "a")
    desk.fail_over(monitor)
    assert [desk.target(one) for one in held] == ["d"] * failover.MAX_ATTEMPTS_PER_RUN + ["a"] * 3


def test_broker_that_falls_asleep_in_the_middle_gives_the_rest_the_time_anew(desk, monitor):
    count = failover.MAX_ATTEMPTS_PER_RUN + 3
    held = [desk.reserve("cpu=1m,memory=1Mi", excluded="bc") for _ in range(count)]
    desk.advertise("d", "cpu=8,memory=8Gi")
    fall_silent(desk, monitor)
    desk.pass_time(2 * failover.MAX_CHECK_GAP)
    desk.fail_over(monitor)
    assert sum(desk.target(one) == "a" for one in held) == 3


def test_provider_whose_offer_is_withdrawn_in_the_middle_keeps_the_rest(desk, monitor):
    count = failover.MAX_ATTEMPTS_PER_RUN + 3
    held = [desk.reserve("cpu=1m,memory=1Mi", excluded="bc") for _ in range(count)]
    desk.advertise("d", "cpu=8,memory=8Gi")
    fall_silent(desk, monitor)
    desk.run(commands.withdraw_offer(desk.ledger, ClusterId("a"), desk.now))
    desk.fail_over(monitor)
    assert sum(desk.target(one) == "a" for one in held) == 3
