"""When a cluster is open: by the clock on the wall there, over midnight, and when clocks are changed."""

import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
from kubelend.core import errors, lending
from kubelend.core.lending import OpeningHours

MINUTE = timedelta(minutes=1)


def at(text):
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def is_open(texts, moment):
    return OpeningHours((tuple(texts.split(";")),)).is_open(at(moment))


@pytest.mark.parametrize(
    "texts, moment, expected",
    [
        # 1 January 2026 is a Thursday.
        ("08:00-18:00", "2026-01-01 08:00", True),
        ("08:00-18:00", "2026-01-01 07:59:59.999999", False),
        ("08:00-18:00", "2026-01-01 17:59:59.999999", True),
        ("08:00-18:00", "2026-01-01 18:00", False),
        ("8:00-18:00", "2026-01-01 08:00", True),
        ("00:00-24:00", "2026-01-01 23:59", True),
        ("22:00-24:00", "2026-01-02 00:00", False),
        ("Thu 08:00-18:00", "2026-01-01 12:00", True),
        ("Fri 08:00-18:00", "2026-01-01 12:00", False),
        ("Mon-Wed,Fri-Sun 08:00-18:00", "2026-01-01 12:00", False),
        ("fri-thu 08:00-18:00", "2026-01-01 12:00", True),
        ("Sat-Mon 08:00-18:00", "2026-01-04 12:00", True),
        ("Sat-Mon 08:00-18:00", "2026-01-06 12:00", False),
        ("Thu 18:00-08:00", "2026-01-01 18:00", True),
        ("Thu 18:00-08:00", "2026-01-02 07:59", True),
        ("Thu 18:00-08:00", "2026-01-02 08:00", False),
        ("Thu 18:00-08:00", "2026-01-01 07:59", False),
        ("Mon-Fri 18:00-08:00", "2026-01-03 07:00", True),
        ("Mon-Fri 18:00-08:00", "2026-01-05 07:00", False),
        ("08:00-18:00 Europe/Rome", "2026-01-01 07:00", True),
        ("08:00-18:00 Europe/Rome", "2026-07-01 06:00", True),
        ("08:00-18:00 Europe/Rome", "2026-07-01 05:59", False),
        ("Fri 00:00-08:00 Pacific/Auckland", "2026-01-01 12:00", True),
        ("08:00-09:00;12:00-13:00", "2026-01-01 12:30", True),
        ("08:00-09:00;12:00-13:00", "2026-01-01 10:00", False),
    ],
)
def test_hours_are_those_of_the_clock_on_the_wall(texts, moment, expected):
    assert is_open(texts, moment) is expected


def test_all_lists_have_to_be_open():
    both = OpeningHours((("08:00-18:00",), ("12:00-20:00",)))
    assert [both.is_open(at(f"2026-01-01 {hour}:00")) for hour in (11, 12, 17, 18)] == [
        False,
        True,
        True,
        False,
    ]
    assert both.next_change(at("2026-01-01 09:00")) == at("2026-01-01 12:00")


@pytest.mark.parametrize(
    "texts, moment, change",
    [
        ("08:00-18:00", "2026-01-01 12:00", "2026-01-01 18:00"),
        ("08:00-18:00", "2026-01-01 18:00", "2026-01-02 08:00"),
        ("Mon 08:00-18:00", "2026-01-05 18:00", "2026-01-12 08:00"),
        ("18:00-08:00 Europe/Rome", "2026-01-01 12:00", "2026-01-01 17:00"),
        ("18:00-08:00 Europe/Rome", "2026-07-01 12:00", "2026-07-01 16:00"),
        # Clocks in Rome go from 02:00 to 03:00 on 29 March 2026, at 01:00 UTC.
        ("Sun 02:30-04:00 Europe/Rome", "2026-03-29 00:00", "2026-03-29 01:00"),
        ("Sun 02:30-04:00 Europe/Rome", "2026-03-29 01:00", "2026-03-29 02:00"),
        ("Sun 02:15-02:45 Europe/Rome", "2026-03-28 00:00", "2026-04-05 00:15"),
        # And from 03:00 back to 02:00 on 25 October 2026, at 01:00 UTC: that hour comes twice.
        ("Sun 02:15-02:45 Europe/Rome", "2026-10-25 00:00", "2026-10-25 00:15"),
        ("Sun 02:15-02:45 Europe/Rome", "2026-10-25 00:15", "2026-10-25 00:45"),
        ("Sun 02:15-02:45 Europe/Rome", "2026-10-25 00:45", "2026-10-25 01:15"),
        ("Sun 02:30-03:30 Europe/Rome", "2026-10-25 00:30", "2026-10-25 01:00"),
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
ZONES = [
    "",
    " UTC",
    " Europe/Rome",
    " America/St_Johns",
    " America/Havana",  # where the clock is put forward at midnight
    " Asia/Kathmandu",
    " Pacific/Apia",
]
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
    assert change is None or table.is_open(change) != now


def test_zones_are_known_where_the_system_has_none():
    """A slim container, for example: without its own data Python finds what the package brings along."""
    check = (
        "from kubelend.core.lending import parse_opening_hours;"
        "print(parse_opening_hours('08:00-18:00 Europe/Rome').zone)"
    )
    done = subprocess.run(
        [sys.executable, "-c", check],
        env={"PYTHONTZPATH": ""},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "Europe/Rome"
