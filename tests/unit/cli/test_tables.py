"""Columns line up, ages are short, and what is too long for the terminal is wrapped, not cut."""

from datetime import UTC, datetime, timedelta

import pytest

from kubelend.kits import tables

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_columns_line_up_and_no_line_ends_in_spaces():
    text = tables.format_table(("NAME", "AGE"), [("a-long-name", "5m"), ("b", "")])
    assert text == "NAME         AGE\na-long-name  5m\nb            -"


@pytest.mark.parametrize("number, text", [(0, "0 clusters"), (1, "1 cluster"), (2, "2 clusters")])
def test_one_is_not_many(number, text):
    assert tables.format_count(number, "cluster") == text


def test_only_the_last_column_is_wrapped():
    text = tables.format_table(
        ("NAME", "WHY"), [("x" * 10, "one two three four five six")], width=32
    )
    assert text == "NAME        WHY\nxxxxxxxxxx  one two three four\n            five six"


def test_without_a_width_nothing_is_wrapped():
    long = "word " * 50
    assert tables.format_table(("A", "B"), [("x", long.strip())]).count("\n") == 1


def test_a_narrow_terminal_still_shows_something():
    text = tables.format_table(
        ("NAME", "WHY"), [("x" * 100, "a few words that do not fit")], width=40
    )
    assert "a few words that do" in text


def test_pairs_leave_out_what_is_empty():
    assert tables.format_pairs([("Name", "x"), ("Region", ""), ("Valid until", "y")]) == (
        "Name:         x\nValid until:  y"
    )


@pytest.mark.parametrize(
    "duration,text",
    [
        (timedelta(), "0s"),
        (timedelta(seconds=-5), "0s"),
        (timedelta(seconds=119), "119s"),
        (timedelta(minutes=2), "2m"),
        (timedelta(minutes=119, seconds=58), "2h"),
        (timedelta(hours=2, minutes=59, seconds=58), "3h"),
        (timedelta(hours=2, minutes=30), "2h30m"),
        (timedelta(hours=10), "10h"),
        (timedelta(hours=47, minutes=59), "2d"),
        (timedelta(days=365), "365d"),
    ],
    ids=str,
)
def test_a_span_is_said_in_a_word(duration, text):
    assert tables.format_span(duration) == text


def test_a_moment_says_how_far_away_it_is():
    assert tables.format_time(NOW + timedelta(hours=3), NOW) == "2026-01-02T06:04:05Z (in 3h)"
    assert tables.format_time(NOW - timedelta(minutes=5), NOW) == "2026-01-02T02:59:05Z (5m ago)"
    assert tables.format_time(None, NOW) == ""
