"""Lines that repeat: the first at once, then one now and then with a count of the others."""

import pytest

from clocks import Seconds
from kubelend.kits import ratelimit
from kubelend.kits.ratelimit import LogThrottle


@pytest.fixture
def time():
    return Seconds()


def test_first_line_is_let_through_and_its_repeats_are_not(time):
    lines = LogThrottle(10, time)
    assert [lines.suppressed("a") for _ in range(3)] == [0, None, None]


def test_next_line_after_the_interval_says_how_many_were_left_out(time):
    lines = LogThrottle(10, time)
    for _ in range(5):
        lines.suppressed("a")
    time.now += 10
    assert lines.suppressed("a") == 4
    assert lines.suppressed("a") is None
    time.now += 10
    assert lines.suppressed("a") == 1


def test_subjects_are_counted_apart(time):
    lines = LogThrottle(10, time)
    lines.suppressed("a")
    assert lines.suppressed("b") == 0


def test_of_many_subjects_the_oldest_is_forgotten(time):
    lines = LogThrottle(10, time)
    for number in range(ratelimit.MAX_LOG_KEYS):
        lines.suppressed(number)
    lines.suppressed("one more")
    assert lines.suppressed(1) is None
    assert lines.suppressed(0) == 0


def test_subject_that_was_logged_again_is_not_the_oldest(time):
    lines = LogThrottle(10, time)
    for number in range(ratelimit.MAX_LOG_KEYS):
        lines.suppressed(number)
    time.now += 10
    lines.suppressed(0)
    lines.suppressed("one more")
    assert lines.suppressed(0) is None
