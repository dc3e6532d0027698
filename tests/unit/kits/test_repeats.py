"""Lines that repeat: the first at once, then one now and then with a count of the others."""

import pytest

from clocks import Seconds
from kubelend.kits import repeats
from kubelend.kits.repeats import Repeats


@pytest.fixture
def time():
    return Seconds()


def test_first_line_is_let_through_and_its_repeats_are_not(time):
    lines = Repeats(10, time)
    assert [lines.left_out("a") for _ in range(3)] == [0, None, None]


def test_next_line_after_the_interval_says_how_many_were_left_out(time):
    lines = Repeats(10, time)
    for _ in range(5):
        lines.left_out("a")
    time.now += 10
    assert lines.left_out("a") == 4
    assert lines.left_out("a") is None
    time.now += 10
    assert lines.left_out("a") == 1


def test_subjects_are_counted_apart(time):
    lines = Repeats(10, time)
    lines.left_out("a")
    assert lines.left_out("b") == 0


def test_of_many_subjects_the_oldest_is_forgotten(time):
    lines = Repeats(10, time)
    for number in range(repeats.MOST):
        lines.left_out(number)
    lines.left_out("one more")
    assert lines.left_out(1) is None
    assert lines.left_out(0) == 0


def test_subject_that_was_told_of_again_is_not_the_oldest(time):
    lines = Repeats(10, time)
    for number in range(repeats.MOST):
        lines.left_out(number)
    time.now += 10
    lines.left_out(0)
    lines.left_out("one more")
    assert lines.left_out(0) is None
