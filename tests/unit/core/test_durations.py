"""Durations read and print as Go does; the tables were checked against Go's own time package."""

import math
from datetime import timedelta
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubelend.core import durations, errors

MICROSECOND = timedelta(microseconds=1)
MICRO, MU = "\u00b5", "\u03bc"
UNITS = {
    "h": Fraction(3600),
    "m": Fraction(60),
    "s": Fraction(1),
    "ms": Fraction(1, 10**3),
    "us": Fraction(1, 10**6),
    f"{MICRO}s": Fraction(1, 10**6),
    f"{MU}s": Fraction(1, 10**6),
    "ns": Fraction(1, 10**9),
}


@pytest.mark.parametrize(
    "text, duration",
    [
        ("0", timedelta(0)),
        ("-0", timedelta(0)),
        ("+0", timedelta(0)),
        ("0s", timedelta(0)),
        ("0h0m", timedelta(0)),
        ("1h", timedelta(hours=1)),
        ("1h30m", timedelta(hours=1, minutes=30)),
        ("90s", timedelta(seconds=90)),
        ("500ms", timedelta(milliseconds=500)),
        ("1.5h", timedelta(minutes=90)),
        (".5s", timedelta(milliseconds=500)),
        ("1.s", timedelta(seconds=1)),
        ("+5s", timedelta(seconds=5)),
        ("-1.5m", timedelta(seconds=-90)),
        ("1h1h", timedelta(hours=2)),
        ("1s1h", timedelta(hours=1, seconds=1)),
        ("1m1ms", timedelta(minutes=1, milliseconds=1)),
        ("12us", timedelta(microseconds=12)),
        (f"12{MICRO}s", timedelta(microseconds=12)),
        (f"12{MU}s", timedelta(microseconds=12)),
        ("2000ns", timedelta(microseconds=2)),
        ("720h", timedelta(days=30)),
        ("2562047h47m16.854775s", durations.MAX_DURATION),
        ("-2562047h47m16.854775s", -durations.MAX_DURATION),
    ],
)
def test_reads_what_go_reads(text, duration):
    assert durations.parse_duration(text) == duration


@pytest.mark.parametrize(
    "text, microseconds",
    [
        ("1ns", 1),
        ("-1ns", -1),
        ("1001ns", 2),
        ("0.1us0.1us", 1),
        ("0.0000001s", 1),
        ("0.3us0.7us", 1),
    ],
)
def test_finer_than_a_microsecond_is_rounded_away_from_zero(text, microseconds):
    assert durations.parse_duration(text) == microseconds * MICROSECOND


@pytest.mark.parametrize(
    "duration, text, short",
    [
        (timedelta(0), "0s", "0s"),
        (timedelta(microseconds=1), f"1{MICRO}s", f"1{MICRO}s"),
        (timedelta(microseconds=999), f"999{MICRO}s", f"999{MICRO}s"),
        (timedelta(microseconds=1500), "1.5ms", "1.5ms"),
        (timedelta(microseconds=1001), "1.001ms", "1.001ms"),
        (timedelta(milliseconds=500), "500ms", "500ms"),
        (timedelta(microseconds=999_999), "999.999ms", "999.999ms"),
        (timedelta(seconds=1), "1s", "1s"),
        (timedelta(seconds=10), "10s", "10s"),
        (timedelta(seconds=1.5), "1.5s", "1.5s"),
        (timedelta(seconds=60), "1m0s", "1m"),
        (timedelta(seconds=90), "1m30s", "1m30s"),
        (timedelta(minutes=10), "10m0s", "10m"),
        (timedelta(hours=1), "1h0m0s", "1h"),
        (timedelta(hours=1, minutes=30), "1h30m0s", "1h30m"),
        (timedelta(hours=1, seconds=5), "1h0m5s", "1h0m5s"),
        (timedelta(hours=1, milliseconds=10), "1h0m0.01s", "1h0m0.01s"),
        (timedelta(hours=10, minutes=10, seconds=10), "10h10m10s", "10h10m10s"),
        (timedelta(days=30), "720h0m0s", "720h"),
        (timedelta(hours=-1), "-1h0m0s", "-1h"),
        (timedelta(milliseconds=-1.5), "-1.5ms", "-1.5ms"),
        (durations.MAX_DURATION, "2562047h47m16.854775s", "2562047h47m16.854775s"),
    ],
)
def test_prints_what_go_prints_and_shorter_for_people(duration, text, short):
    assert durations.format_duration(duration) == text
    assert durations.format_duration_short(duration) == short


@pytest.mark.parametrize(
    "text, problem",
    [
        ("", "is not a duration"),
        (" ", "is not a duration"),
        ("-", "is not a duration"),
        ("s", "is not a duration"),
        (".s", "is not a duration"),
        (" 1h", "is not a duration"),
        ("--1h", "is not a duration"),
        ("1m-1s", "is not a duration"),
        ("1hm", "is not a duration"),
        ("NaN", "is not a duration"),
        ("inf", "is not a duration"),
        ("P1D", "is not a duration"),
        ("\N{ARABIC-INDIC DIGIT ONE}h", "is not a duration"),
        ("3", "number without a unit"),
        ("1h30", "number without a unit"),
        ("00", "number without a unit"),
        ("1.2.3s", "number without a unit"),
        ("1d", "unknown unit 'd'"),
        ("1 h", "unknown unit ' h'"),
        ("1h ", "is not a duration"),
        ("1h30min", "is not a duration"),
        ("1H", "unknown unit 'H'"),
        ("1e3s", "unknown unit 'e'"),
        ("1x\n", r"unknown unit 'x\n'"),
        ("2562048h", "over 292 years"),
        ("-2562048h", "over 292 years"),
        ("2562047h47m16.854775001s", "over 292 years"),
        ("9223372036854775808ns", "over 292 years"),
        ("9" * 63 + "h", "over 292 years"),
        ("1h" * 33, "has 66 characters, more than 64"),
    ],
)
def test_anything_else_is_refused_with_what_is_wrong_and_an_example(text, problem):
    with pytest.raises(errors.InvalidDuration) as caught:
        durations.parse_duration(text)
    assert problem in caught.value.message
    assert "for example 1h30m, 90s or 500ms" in caught.value.hint


@pytest.mark.parametrize("text", ["1" * 2**20, "1h" * 2**19, "." * 2**20, "1h" * 2**19 + "x"])
@pytest.mark.timeout(1)
def test_a_megabyte_is_refused_at_once_in_one_short_line(text):
    with pytest.raises(errors.InvalidDuration, match="more than 64") as caught:
        durations.parse_duration(text)
    assert len(str(caught.value)) < 200


@pytest.mark.timeout(1)
def test_the_costliest_texts_that_are_short_enough_cost_little():
    for text in ["1h" * 31 + "1x", "1m" * 31 + "1", "1." * 32, "9" * 64] * 1000:
        with pytest.raises(errors.InvalidDuration):
            durations.parse_duration(text)


numbers = st.one_of(
    st.integers(0, 10_000).map(str),
    st.builds("{}.{}".format, st.integers(0, 10_000), st.integers(0, 10**12)),
)
parts = st.lists(st.tuples(numbers, st.sampled_from(sorted(UNITS))), min_size=1, max_size=3)


@given(parts, st.sampled_from(["", "-"]))
def test_a_sequence_is_the_exact_sum_of_its_parts_rounded_once(parts, sign):
    text = sign + "".join(number + unit for number, unit in parts)
    exact = sum(Fraction(number) * UNITS[unit] for number, unit in parts)
    microseconds = math.ceil(exact * 10**6)
    assert durations.parse_duration(text) == (-microseconds if sign else microseconds) * MICROSECOND


@given(st.timedeltas(-durations.MAX_DURATION, durations.MAX_DURATION))
def test_printing_and_parsing_give_the_same_duration(duration):
    assert durations.parse_duration(durations.format_duration(duration)) == duration
    assert durations.parse_duration(durations.format_duration_short(duration)) == duration
