"""A reservation leaves a provider that fell silent; and nobody is given up who may only be unheard."""

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
def vigil(desk):
    return desk.vigil(LOST_AFTER)


def keep_speaking(desk, *names):
    for name in names:
        desk.advertise(name, desk.ledger.clusters[name].advertisement)


def fall_silent(desk, vigil):
    """Until the very moment in which `a` is given up."""
    return desk.listen(vigil, make.MINUTE + LOST_AFTER)


def test_what_it_lends_moves_in_the_moment_it_is_given_up(desk, vigil):
    held = desk.reserve(WANTED, duration=make.HOUR)
    assert desk.target(held) == "a"
    assert desk.listen(vigil, make.MINUTE + LOST_AFTER - 5 * make.SECOND) == []
    assert desk.target(held) == "a"
    (lost,) = desk.listen(vigil, 5 * make.SECOND)
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
def test_how_far_it_had_come_makes_no_difference(desk, vigil, command):
    held = desk.reserve(WANTED)
    getattr(desk, command)(held, *(["a"] if command == "acknowledge" else []))
    fall_silent(desk, vigil)
    moved = desk[held]
    assert (moved.phase, moved.target) == ("Reserved", "b")
    assert moved.acknowledged_at is moved.activated_at is None


def test_price_is_agreed_anew(desk, vigil):
    desk.advertise("b", "cpu=4,memory=4Gi", prices=make.price_list(cpu="0.2"))
    held = desk.reserve(WANTED)
    assert desk[held].hourly == 0
    fall_silent(desk, vigil)
    assert desk[held].hourly == 200_000_000
    assert desk[held].currency == "USD"


def test_provider_that_speaks_in_time_keeps_what_it_lends(desk, vigil):
    held = desk.reserve(WANTED)
    desk.listen(vigil, make.MINUTE + LOST_AFTER - 5 * make.SECOND)
    desk.advertise("a", "cpu=8,memory=8Gi", **SHORT)
    keep_speaking(desk, "b", "c")
    assert desk.listen(vigil, LOST_AFTER) == []
    assert desk.target(held) == "a"
    desk.listen(vigil, make.MINUTE)
    assert desk.target(held) == "b"


def test_zero_gives_nobody_up(desk):
    held = desk.reserve(WANTED)
    assert desk.listen(desk.vigil(make.NO_TIME), make.STALE_AFTER - make.SECOND) == []
    assert desk.target(held) == "a"


def test_nobody_who_lends_nothing_is_given_up(desk, vigil):
    assert fall_silent(desk, vigil) == []


def test_same_capacity_is_not_promised_to_two(desk, vigil):
    """Two of them fit on b and one on c: the oldest go first, and the others stay."""
    desk.cordon("b")
    desk.cordon("c")
    held = [desk.reserve("cpu=1500m,memory=1Gi") for _ in range(5)]
    desk.uncordon("b")
    desk.uncordon("c")
    fall_silent(desk, vigil)
    assert [desk.target(one) for one in held] == ["b", "b", "c", "a", "a"]
    assert [desk[one].reason for one in held][2:] == ["Moved", "ProviderSilent", "ProviderSilent"]


# -- what fits nowhere else


@pytest.fixture
def stuck(desk, vigil):
    """One that only `a` has room for."""
    found = desk.reserve("cpu=5,memory=1Gi")
    fall_silent(desk, vigil)
    return found


def test_what_fits_nowhere_else_stays_and_says_so(desk, stuck):
    kept = desk[stuck]
    assert (kept.phase, kept.reason, kept.target) == ("Reserved", "ProviderSilent", "a")
    assert kept.message == (
        "Stays in cluster a, unreachable since 12:00:00 UTC; no other cluster fits yet"
    )
    assert desk.reserved("a") == kept.request.resources


def test_it_is_said_once(desk, vigil, stuck):
    revision = desk.ledger.revision
    desk.listen(vigil, 3 * failover.RETRY_INTERVAL)
    assert desk.ledger.revision == revision


def test_it_moves_when_another_has_room(desk, vigil, stuck):
    desk.advertise("b", "cpu=16,memory=16Gi")
    desk.listen(vigil, failover.RETRY_INTERVAL)
    assert (desk.target(stuck), desk[stuck].reason) == ("b", "Moved")


def test_it_is_not_tried_all_the_time(desk, vigil, stuck):
    desk.advertise("b", "cpu=16,memory=16Gi")
    desk.pass_time(make.SECOND)
    desk.leave(vigil)
    assert desk.target(stuck) == "a"


@pytest.mark.parametrize(
    "is_used, reason, message",
    [
        (False, "Locked", "Resources locked in cluster a"),
        (True, "InUse", "Resources in use in cluster a"),
    ],
)
def test_provider_that_comes_back_has_what_was_kept_there(desk, vigil, is_used, reason, message):
    stuck = desk.reserve("cpu=5,memory=1Gi")
    if is_used:
        desk.activate(stuck)
    before = desk[stuck]
    fall_silent(desk, vigil)
    assert (desk[stuck].phase, desk[stuck].reason) == (before.phase, "ProviderSilent")
    desk.advertise("a", "cpu=8,memory=8Gi")
    desk.listen(vigil, make.SECOND)
    after = desk[stuck]
    assert (after.phase, after.reason, after.message) == (before.phase, reason, message)
    assert after.expires_at == before.expires_at


def test_one_that_moved_there_before_says_so_again(desk, vigil):
    held = desk.reserve("cpu=3,memory=1Gi")
    desk.refuse(held, "a")
    desk.advertise("b", "cpu=4,memory=4Gi", **SHORT)
    fall_silent(desk, vigil)
    assert (desk.target(held), desk[held].reason) == ("b", "ProviderSilent")
    keep_speaking(desk, "b")
    desk.listen(vigil, make.SECOND)
    assert (desk.target(held), desk[held].reason) == ("b", "Moved")


def test_restart_remembers_what_is_stranded(desk, stuck):
    desk.ledger = type(desk.ledger).restore(desk.kept())
    vigil = desk.vigil(LOST_AFTER)
    desk.listen(vigil, make.SECOND)
    assert desk[stuck].reason == "ProviderSilent", "it has not come back yet"
    desk.advertise("a", "cpu=8,memory=8Gi")
    desk.listen(vigil, make.SECOND)
    assert desk[stuck].reason == "Locked"


def test_many_are_moved_in_portions(desk, vigil):
    count = 2 * failover.MAX_ATTEMPTS_PER_RUN + 1
    held = [desk.reserve("cpu=1m,memory=1Mi", excluded="bc") for _ in range(count)]
    desk.advertise("d", "cpu=64,memory=512Gi")
    fall_silent(desk, vigil)
    assert sum(desk.target(one) == "d" for one in held) == failover.MAX_ATTEMPTS_PER_RUN
    assert vigil.is_busy
    desk.pass_time(make.MOMENT)
    desk.leave(vigil)
    desk.leave(vigil)
    assert {desk.target(one) for one in held} == {"d"}
    assert not vigil.is_busy


def test_those_that_fit_nowhere_do_not_keep_the_others_waiting(desk, vigil):
    """However many are stuck, each has its turn."""
    stuck = [
        desk.reserve("cpu=1m,memory=1Mi", pinned="a")
        for _ in range(failover.MAX_ATTEMPTS_PER_RUN + 10)
    ]
    free = desk.reserve(WANTED)
    fall_silent(desk, vigil)
    desk.listen(vigil, 5 * make.SECOND)
    assert desk.target(free) == "b"
    assert {desk[one].reason for one in stuck} == {"ProviderSilent"}


@pytest.mark.parametrize("end", ["release", "drain"])
def test_what_ended_or_was_moved_meanwhile_is_left_alone(desk, vigil, end):
    few = failover.MAX_ATTEMPTS_PER_RUN + 2
    held = [desk.reserve("cpu=1m,memory=1Mi", excluded="bc") for _ in range(few)]
    fall_silent(desk, vigil)
    desk.advertise("d", "cpu=8,memory=8Gi")
    if end == "drain":
        desk.drain("a")
    else:
        for one in held[-2:]:
            desk.release(one)
    revision = desk.ledger.revision
    desk.leave(vigil)
    assert desk.ledger.revision == revision


# -- silence that counts for nothing


def test_broker_that_was_down_gives_everybody_the_time_anew(desk, vigil):
    held = desk.reserve(WANTED)
    desk.pass_time(make.HOUR)
    keep_speaking(desk, "b", "c")
    vigil = desk.vigil(LOST_AFTER)
    assert desk.listen(vigil, LOST_AFTER - 5 * make.SECOND) == []
    assert desk.target(held) == "a"
    assert [lost.id for lost in desk.listen(vigil, 5 * make.SECOND)] == ["a"]


def test_clock_that_jumps_ahead_gives_everybody_the_time_anew(desk, vigil):
    """Or the process slept. `b` and `c` are heard just before, and would do."""
    held = desk.reserve(WANTED)
    desk.listen(vigil, make.MINUTE)
    keep_speaking(desk, "b", "c")
    desk.pass_time(make.STALE_AFTER - make.SECOND)
    assert desk.leave(vigil) == []
    keep_speaking(desk, "b", "c")
    assert desk.listen(vigil, LOST_AFTER - 5 * make.SECOND) == []
    assert desk.target(held) == "a"
    assert [lost.id for lost in desk.listen(vigil, 5 * make.SECOND)] == ["a"]


def test_clock_that_goes_back_does_not_put_anything_off(desk, vigil):
    desk.pass_time(-make.HOUR)
    desk.leave(vigil)
    keep_speaking(desk, "a", "b", "c")
    held = desk.reserve(WANTED)
    fall_silent(desk, vigil)
    assert desk.target(held) == "b"


def test_looks_follow_each_other_at_a_distance(desk, vigil):
    """Expiries may wake the broker a thousand times a second."""
    held = desk.reserve(WANTED)
    desk.listen(vigil, make.MINUTE + LOST_AFTER - make.MOMENT)
    desk.pass_time(make.MOMENT)
    desk.leave(vigil)
    assert desk.target(held) == "a"
    desk.pass_time(failover.CHECK_INTERVAL)
    desk.leave(vigil)
    assert desk.target(held) == "b"


def test_where_nobody_is_heard_it_may_be_the_broker_that_is_cut_off(desk, vigil):
    held = desk.reserve(WANTED)
    for name in "bc":
        desk.advertise(name, "cpu=4,memory=4Gi", **SHORT)
    assert desk.listen(vigil, 3 * LOST_AFTER) == []
    keep_speaking(desk, "b")
    assert desk.listen(vigil, make.MINUTE - make.SECOND) == []
    assert desk.target(held) == "a", "the others have not had the time to speak"
    for _ in range(5):
        keep_speaking(desk, "b")
        desk.listen(vigil, make.MINUTE - make.SECOND)
    assert desk.target(held) == "b"


def test_revoked_provider_is_silent_by_order(desk, vigil):
    """What becomes of its loans was decided when it was revoked: without a release they stay."""
    held = desk.reserve(WANTED)
    desk.run(
        enrolment.revoke_member(
            desk.ledger, Role.CLUSTER, "a", reason="", by="alice", release=False, now=desk.now
        )
    )
    assert fall_silent(desk, vigil) == []
    assert desk.target(held) == "a"
    assert desk[held].reason == "Locked"


def test_empty_ledger_is_looked_at_like_any_other():
    empty = make.Desk()
    assert empty.listen(empty.vigil(make.SECOND), make.MINUTE) == []
    assert isinstance(empty.ledger, Ledger)


def test_provider_that_comes_back_in_the_middle_keeps_the_rest(desk, vigil):
    count = failover.MAX_ATTEMPTS_PER_RUN + 3
    held = [desk.reserve("cpu=1m,memory=1Mi", excluded="bc") for _ in range(count)]
    desk.advertise("d", "cpu=8,memory=8Gi")
    fall_silent(desk, vigil)
    assert vigil.is_busy
    keep_speaking(desk, "a")
    desk.leave(vigil)
    assert [desk.target(one) for one in held] == ["d"] * failover.MAX_ATTEMPTS_PER_RUN + ["a"] * 3


def test_broker_that_falls_asleep_in_the_middle_gives_the_rest_the_time_anew(desk, vigil):
    count = failover.MAX_ATTEMPTS_PER_RUN + 3
    held = [desk.reserve("cpu=1m,memory=1Mi", excluded="bc") for _ in range(count)]
    desk.advertise("d", "cpu=8,memory=8Gi")
    fall_silent(desk, vigil)
    desk.pass_time(2 * failover.MAX_CHECK_GAP)
    desk.leave(vigil)
    assert sum(desk.target(one) == "a" for one in held) == 3


def test_provider_whose_offer_is_withdrawn_in_the_middle_keeps_the_rest(desk, vigil):
    count = failover.MAX_ATTEMPTS_PER_RUN + 3
    held = [desk.reserve("cpu=1m,memory=1Mi", excluded="bc") for _ in range(count)]
    desk.advertise("d", "cpu=8,memory=8Gi")
    fall_silent(desk, vigil)
    desk.run(commands.withdraw_offer(desk.ledger, ClusterId("a"), desk.now))
    desk.leave(vigil)
    assert sum(desk.target(one) == "a" for one in held) == 3
