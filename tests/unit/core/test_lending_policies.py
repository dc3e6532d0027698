"""What a provider lends, to whom and when: patterns, caps, opening hours, and how policies are set."""

import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

import make
import reference
from kubelend.core import columns, commands, errors, explanations, filters, lending
from kubelend.core.events import RecordDeleted
from kubelend.core.ledger import Ledger
from kubelend.core.lending import NO_POLICY, AccessLists, OpeningHours
from kubelend.core.models import ClusterId, Limits


@pytest.mark.parametrize(
    "names, name, expected",
    [
        (("team-a",), "team-a", True),
        (("team-a",), "team-ab", False),
        (("team-*",), "team-", True),
        (("team-*",), "my-team-a", False),
        (("team-?", "x"), "team-b", True),
        (("team-[ab]",), "team-c", False),
        (("team-[!ab]",), "team-c", True),
        (("TEAM-*",), "team-a", False),
        (("edge[1]",), "edge[1]", True),
        (("edge[1]",), "edge1", True),
        (("a.b",), "axb", False),
        ((), "a", False),
        (("*",), "any name\nat all", True),
    ],
)
def test_names_are_patterns_of_the_shell(names, name, expected):
    assert lending.matches_any(name, names) is expected


@pytest.mark.parametrize("name", ["", " ", "a\nb", "\x1b[2J"])
def test_what_names_no_cluster_is_refused(name):
    with pytest.raises(
        errors.InvalidInput, match=r"deny: .* is not a cluster name or pattern; write a name such"
    ):
        lending.check_name_patterns(("team-*", name), "deny")


def test_patterns_are_few_and_short_and_names_are_not():
    names = tuple(f"{'x' * 200}-{number}" for number in range(256))
    patterns = tuple(f"team-{number}-*" for number in range(lending.MAX_PATTERNS))
    lending.check_name_patterns(names + patterns, "deny")
    with pytest.raises(errors.InvalidInput, match="deny: 33 patterns are more than 32; write"):
        lending.check_name_patterns((*patterns, "another?"), "deny")
    with pytest.raises(errors.InvalidInput, match=r"deny: 'x+' has more than 64 characters"):
        lending.check_name_patterns(("x" * lending.MAX_PATTERN_LENGTH + "*",), "deny")


def test_a_pattern_is_compiled_once_however_often_it_is_advertised():
    names = ("a-name", "never-seen-before-*", "nor-this-[a-z]")
    before = lending.compiled_patterns()
    for _ in range(3):
        lending.check_name_patterns(names, "allow")
        assert lending.matches_any("never-seen-before-x", (*names, str(_)))
    assert lending.compiled_patterns() == before + 2


def test_pattern_that_would_take_for_ever_does_not():
    hostile = ("*a" * 60 + "b",)
    assert not lending.matches_any("a" * 64, hostile)


def test_nothing_limited_is_no_policy():
    assert lending.effective_policy(None, None) is None
    assert lending.effective_policy(NO_POLICY, NO_POLICY) is None
    assert lending.effective_policy(None, NO_POLICY) is None


def test_the_stricter_of_both_holds_in_every_point():
    own = make.policy(
        allow=["team-*"],
        deny=["team-x"],
        keep_back="cpu=4,memory=1Gi",
        max_lent="cpu=10",
        max_per_requester="cpu=2,gpu=0",
        hours=["08:00-18:00"],
    )
    admins = make.policy(
        allow=["team-a", "other"],
        deny=["team-y"],
        keep_back="cpu=2,memory=8Gi",
        max_lent="cpu=8,gpu=1",
        max_per_requester="cpu=5",
        hours=["12:00-20:00"],
    )
    for found in (lending.effective_policy(own, admins), lending.effective_policy(admins, own)):
        assert found is not None
        assert found.access.deny == ("team-x", "team-y")
        names = ("team-a", "team-b", "other")
        assert [name for name in names if found.access.allows(name)] == ["team-a"]
        assert found.keep_back == make.resources("cpu=4,memory=8Gi")
        assert found.max_lent == {"cpu": 8000, "gpu": 1}
        assert found.max_per_requester == {"cpu": 2000, "gpu": 0}
        assert sorted(found.hours) == [("08:00-18:00",), ("12:00-20:00",)]


def test_the_same_list_twice_counts_once():
    one = make.policy(allow=["a"], hours=["08:00-18:00"])
    found = lending.effective_policy(one, one)
    assert found is not None
    assert (found.access, found.hours) == (AccessLists((("a",),)), (("08:00-18:00",),))


@pytest.mark.parametrize(
    "available, reserved, lendable",
    [
        ("cpu=8,memory=8Gi,gpu=2", "", "cpu=6,memory=8Gi"),
        ("cpu=8,memory=8Gi", "cpu=5", "cpu=5,memory=8Gi"),
        ("cpu=8,memory=8Gi", "cpu=11", "memory=8Gi"),
        ("cpu=1,memory=8Gi", "", "memory=8Gi"),
        ("", "", ""),
    ],
)
def test_lendable_is_without_what_is_kept_back_and_within_the_cap(available, reserved, lendable):
    holds = lending.effective_policy(make.policy(keep_back="cpu=2", max_lent="cpu=10,gpu=0"), None)
    assert holds is not None
    found = holds.lendable(make.resources(available), make.resources(reserved))
    assert found == make.resources(lendable)


OFFER = "cpu=10,memory=10Gi,gpu=2"


def runner_with(**fields):
    """One provider whose administrator says this of it."""
    runner = make.runner(a=OFFER)
    runner.limit("a", **fields)
    return runner


def rejections(runner, wanted="cpu=1,memory=1Gi", cluster="a", **fields):
    """All that speaks against a cluster; that the decision agrees is checked."""
    question, fleet = runner.question(wanted, **fields), runner.ledger.fleet
    row = fleet.find_row(ClusterId(cluster))
    found = [
        str(rejection) for rejection, mask in filters.filter_masks(question, fleet) if not mask[row]
    ]
    assert bool(filters.feasible_clusters(question, fleet)[row]) == (not found)
    return found


def suggestion(runner, wanted="cpu=1,memory=1Gi", **fields):
    found = explanations.explain_placement(
        runner.question(wanted, **fields), runner.ledger.fleet, 5
    ).suggestion
    return None if found is None else found.text


def test_requesters_who_ask_do_not_fill_the_memory():
    runner = runner_with(deny=["r7"])
    names = [f"r{number}" for number in range(3 * columns.MAX_REQUESTER_MASKS)]
    assert [name for name in names if rejections(runner, requester=name)] == ["r7"]
    assert suggestion(runner, requester="r7") is None, "no other request would help"
    masks = runner.ledger.fleet.policy_columns._requester_masks  # noqa: SLF001 - its size
    assert len(masks) <= columns.MAX_REQUESTER_MASKS
    runner.limit("a", make.policy())
    assert runner.ledger.fleet.policy_columns is None, "no policies, no cost"


KEEP_4, LEND_3 = {"keep_back": "cpu=4"}, {"max_lent": "cpu=3"}
EACH_3 = {"max_per_requester": "cpu=3"}
CAPPED = ("KeptBack", "LendingCapReached", "RequesterCapReached")
ALL_THREE = {"keep_back": "cpu=4", "max_lent": "cpu=5", "max_per_requester": "cpu=6"}


@pytest.mark.parametrize(
    "policy, lent, wanted, refused, helps",
    [
        (KEEP_4, "", "cpu=6", "", ""),
        (KEEP_4, "", "cpu=7", "KeptBack", "request 1 cpu less"),
        (KEEP_4, "cpu=2", "cpu=6", "KeptBack", "request 2 cpu less, or wait"),
        (KEEP_4, "", "cpu=11", "InsufficientCPU", "request 5 cpu less"),
        ({"keep_back": "cpu=40"}, "", "cpu=1", "KeptBack", ""),
        (LEND_3, "", "cpu=3", "", ""),
        (LEND_3, "cpu=1", "cpu=3", "LendingCapReached", "request 1 cpu less, or wait"),
        ({"max_lent": "gpu=0"}, "", "cpu=1,gpu=1", "LendingCapReached", "request 1 gpu less"),
        ({"max_lent": "gpu=0"}, "", "cpu=10", "", ""),
        (EACH_3, "", "cpu=3", "", ""),
        (EACH_3, "cpu=2", "cpu=3", "RequesterCapReached", "request 2 cpu less, or wait"),
        (EACH_3, "", "cpu=4", "RequesterCapReached", "request 1 cpu less"),
        ({"max_per_requester": "cpu=0"}, "", "cpu=1", "RequesterCapReached", ""),
        (ALL_THREE, "", "cpu=7", " ".join(CAPPED), "request 2 cpu less"),
    ],
)
def test_amounts_are_bounded_and_an_exact_fit_fits(policy, lent, wanted, refused, helps):
    runner = runner_with(**policy)
    if lent:
        runner.reserve(lent)
    assert rejections(runner, wanted) == refused.split()
    expected = helps.replace("or wait", "or wait until reservations there end")
    assert suggestion(runner, wanted) == (f"a fits if you {expected}" if helps else None)


def test_hours_bound_when_new_reservations_start_and_not_those_that_run():
    runner = runner_with(hours=["12:00-12:05"])
    held = runner.reserve("cpu=1,memory=1Gi")
    runner.pass_time(5 * make.MINUTE)
    assert rejections(runner) == ["OutsideOpeningHours"]
    assert suggestion(runner) == "a fits if you wait until it opens at 2026-01-02T12:00Z"
    assert runner[held].is_live
    runner.renew(held, make.HOUR)


def test_hours_that_never_meet_have_no_suggestion_but_another_cluster_may():
    runner = runner_with(hours=["13:00-14:00"])
    runner.advertise("a", OFFER, policy=make.policy(hours=["15:00-16:00"]))
    assert suggestion(runner) is None
    runner.advertise("b", "cpu=1,memory=1Gi")
    assert suggestion(runner, "cpu=2,memory=1Gi") == "b fits if you request 1 cpu less"


def test_advertisement_neither_opens_nor_closes_a_cluster():
    """It is written into a mask that is kept from one opening to the next."""
    runner = make.runner(a=OFFER, b=OFFER)
    runner.limit("a", hours=["13:00-14:00"])
    runner.limit("b", hours=["11:00-13:00"])
    for minutes, closed in ((1, "a"), (1, "a"), (58, "b")):
        runner.pass_time(minutes * make.MINUTE)
        runner.advertise("a", OFFER)
        runner.advertise("b", OFFER)
        for name in ("a", "b"):
            expected = ["OutsideOpeningHours"] if name == closed else []
            assert rejections(runner, cluster=name) == expected


A = ClusterId("a")
POLICY = make.policy(allow=["team-*"], keep_back="cpu=2", max_lent="gpu=0", hours=["08:00-18:00"])
QUOTA = make.quota("cpu=32", reservations=5, budget="50", currency="EUR")


def last(runner, count=2):
    """The changes that the last command left."""
    return runner.changes[-count:]


def test_limits_are_stored_and_audited_and_the_same_again_is_no_event():
    runner = make.runner(a="cpu=4,memory=8Gi")
    runner.limit("a", POLICY)
    stored, entry = last(runner)
    assert stored == Limits(A, POLICY, revision=runner.ledger.revision)
    assert (entry.action, entry.subject) == ("PolicySet", "limits/a")
    assert (entry.before, entry.after) == (None, stored)
    runner.allot("a", QUOTA)
    both, entry = last(runner)
    assert both == Limits(A, POLICY, QUOTA, runner.ledger.revision)
    assert (entry.action, entry.before) == ("QuotaSet", stored)
    revision = runner.ledger.revision
    runner.limit("a", POLICY)
    runner.allot("a", QUOTA)
    assert runner.ledger.revision == revision


def test_limits_may_be_set_before_the_cluster_advertises_and_outlive_it():
    runner = make.CommandRunner()
    runner.limit("a", deny=["r"])
    for _ in range(2):
        runner.advertise("a")
        assert runner.refused("cpu=1,memory=1Gi") == "0/1 cluster fits: 1 RequesterDenied"
        runner.remove("a")


@pytest.mark.parametrize("lift", ["with nothing", "by name"])
def test_limits_that_are_lifted_leave_nothing(lift):
    runner = make.CommandRunner()
    runner.limit("a", POLICY)
    runner.allot("a", QUOTA)
    if lift == "by name":
        runner.run(commands.clear_policy(runner.ledger, A, runner.now))
    else:
        runner.limit("a", make.policy())
    runner.lift("a")
    change, entry = last(runner)
    assert change == RecordDeleted("limits", "a")
    assert entry.after is None
    assert runner.kept().limits == []
    assert make.state(Ledger.restore(runner.kept())) == make.state(runner.ledger)


@pytest.mark.parametrize("clear", [commands.clear_policy, commands.clear_quota])
def test_what_is_not_set_cannot_be_cleared(clear):
    runner = make.runner(a="cpu=4,memory=8Gi")
    with pytest.raises(errors.NotFound):
        runner.run(clear(runner.ledger, A, runner.now))
    assert runner.ledger.revision == 1


MINUTE = timedelta(minutes=1)


def at(text):
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def is_open(texts, moment):
    return OpeningHours((tuple(texts.split(";")),)).is_open(at(moment))


@pytest.mark.parametrize(
    "texts, moment, expected",
    [
        # 1 January 2026 is a Thursday.
        ("08:00-18:00", "2026-01-01 17:59:59.999999", True),
        ("08:00-18:00", "2026-01-01 18:00", False),
        ("8:00-18:00", "2026-01-01 08:00", True),
        ("00:00-24:00", "2026-01-01 23:59", True),
        ("22:00-24:00", "2026-01-02 00:00", False),
        ("Mon-Wed,Fri-Sun 08:00-18:00", "2026-01-01 12:00", False),
        ("fri-thu 08:00-18:00", "2026-01-01 12:00", True),
        ("Sat-Mon 08:00-18:00", "2026-01-06 12:00", False),
        ("Thu 18:00-08:00", "2026-01-02 08:00", False),
        ("Thu 18:00-08:00", "2026-01-01 07:59", False),
        ("Mon-Fri 18:00-08:00", "2026-01-03 07:00", True),
        ("08:00-18:00 Europe/Rome", "2026-07-01 06:00", True),
        ("Fri 00:00-08:00 Pacific/Auckland", "2026-01-01 12:00", True),
        ("08:00-09:00;12:00-13:00", "2026-01-01 10:00", False),
    ],
)
def test_hours_are_those_of_the_clock_on_the_wall(texts, moment, expected):
    assert is_open(texts, moment) is expected


@pytest.mark.parametrize(
    "texts, moment, change",
    [
        ("08:00-18:00", "2026-01-01 12:00", "2026-01-01 18:00"),
        ("Mon 08:00-18:00", "2026-01-05 18:00", "2026-01-12 08:00"),
        ("18:00-08:00 Europe/Rome", "2026-07-01 12:00", "2026-07-01 16:00"),
        # Clocks in Rome go from 02:00 to 03:00 on 29 March 2026, at 01:00 UTC.
        ("Sun 02:30-04:00 Europe/Rome", "2026-03-29 00:00", "2026-03-29 01:00"),
        ("Sun 02:15-02:45 Europe/Rome", "2026-03-28 00:00", "2026-04-05 00:15"),
        # And from 03:00 back to 02:00 on 25 October 2026, at 01:00 UTC: that hour comes twice.
        ("Sun 02:15-02:45 Europe/Rome", "2026-10-25 00:15", "2026-10-25 00:45"),
        ("Sun 02:15-02:45 Europe/Rome", "2026-10-25 00:45", "2026-10-25 01:15"),
        ("00:00-24:00", "2026-01-01 12:00", None),
    ],
)
def test_next_change_is_the_very_instant(texts, moment, change):
    found = OpeningHours((tuple(texts.split(";")),)).next_change(at(moment))
    assert found == (None if change is None else at(change))


@pytest.mark.parametrize(
    "text, problem",
    [
        ("", "is not a valid opening-hours text"),
        ("always", "is not a valid opening-hours text"),
        ("18-08", "is not a valid opening-hours text"),
        ("18:00-25:00", "25:00 is not a time of day"),
        ("18:60-20:00", "18:60 is not a time of day"),
        ("24:00-08:00", "24:00 is not a time of day"),
        ("08:00-08:00", "begins and ends at the same time; write 00:00-24:00 for a whole day"),
        ("Mon-Fry 08:00-18:00", "mon-fry is not a day or range of days"),
        ("Mon-Wed-Fri 08:00-18:00", "is not a day or range of days"),
        ("08:00-18:00 Mars/Olympus", "Mars/Olympus is not a known time zone"),
        ("08:00-18:00 Europe", "Europe is not a known time zone"),
        ("08:00-18:00 ../../etc/passwd", "is not a known time zone"),
        ("08:00-18:00 /etc/localtime", "is not a known time zone"),
        ("08:00-18:00 Europe/Rome extra", "is not a valid opening-hours text"),
        ("x" * 10_000, "is not a valid opening-hours text"),
    ],
)
def test_what_is_no_opening_hours_is_refused_with_a_reason(text, problem):
    with pytest.raises(errors.InvalidInput) as raised:
        lending.parse_opening_hours(text)
    assert problem in str(raised.value)
    assert len(str(raised.value)) < 250


def test_hours_of_a_zone_that_is_not_known_here_are_never_open():
    """Written on another machine: what cannot be read lends nothing, and stops nobody."""
    table = OpeningHours((("00:00-24:00 Mars/Olympus",),))
    assert not table.is_open(at("2026-01-01 12:00"))
    assert table.next_change(at("2026-01-01 12:00")) is None


def test_day_on_which_the_clock_is_put_forward_late_is_not_missed():
    """An hour before midnight there, and 24 hours later; after 48 it is the day after next."""
    table = OpeningHours((("Sun 00:00-24:00 America/St_Johns",),))
    assert table.next_change(at("2026-03-07 02:30")) == at("2026-03-08 03:30")


DAYS = ["", "Mon-Fri ", "Sat,Sun ", "Sun ", "Thu-Mon "]
TIMES = ["00:00-24:00", "08:00-18:00", "18:00-08:00", "02:30-03:30", "23:00-01:00", "02:15-02:45"]
# In Havana the clock is put forward at midnight.
ZONES = ["", " UTC", " Europe/Rome", " America/St_Johns", " America/Havana", " Pacific/Apia"]
texts = st.builds("{}{}{}".format, *map(st.sampled_from, (DAYS, TIMES, ZONES)))
lists = st.lists(st.lists(texts, min_size=1, max_size=2).map(tuple), max_size=2).map(tuple)
# Around the days on which clocks are changed, and in between.
moments = st.builds(
    lambda day, minute: at(day) + minute * MINUTE,
    st.sampled_from(["2026-03-28", "2026-10-24", "2026-03-07", "2026-11-01", "2026-06-01"]),
    st.integers(0, 3 * 24 * 60),
)


@given(lists, moments)
def test_open_is_what_the_plain_reference_says(lists, moment):
    assert OpeningHours(lists).is_open(moment) == reference.is_open(lists, moment)


@given(lists, moments)
def test_nothing_changes_before_the_next_change(lists, moment):
    table = OpeningHours(lists)
    change = table.next_change(moment)
    until = min(change or moment + timedelta(days=15), moment + timedelta(days=3))
    now = table.is_open(moment)
    while moment < until:
        assert table.is_open(moment) == now
        moment += 7 * MINUTE
    assert change is None or table.is_open(change) != now == table.is_open(change - make.MOMENT)


def test_zones_are_known_where_the_system_has_none():
    """A slim container, for example: without its own data Python finds what the package brings along."""
    check = (
        "from kubelend.core.lending import parse_opening_hours;"
        "print(parse_opening_hours('08:00-18:00 Europe/Rome').zone)"
    )
    command = [sys.executable, "-c", check]
    assert subprocess.check_output(command, env={"PYTHONTZPATH": ""}).strip() == b"Europe/Rome"
