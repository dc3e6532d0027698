"""The figures that a list of measurements gives."""

import math

import pytest

from kubelend.bench import measure


@pytest.mark.parametrize(
    "percent, expected",
    [
        pytest.param(50, 50, id="median of a hundred"),
        pytest.param(99, 99, id="one is slower"),
        pytest.param(100, 100, id="the slowest"),
        pytest.param(0, 1, id="the fastest"),
    ],
)
def test_percentile_is_a_value_that_was_measured(percent, expected):
    values = [float(value) for value in range(100, 0, -1)]
    assert measure.percentile(values, percent) == expected


def test_percentile_of_one_value_is_that_value():
    assert measure.percentile([3.5], 99) == 3.5


def test_percentile_of_nothing_is_no_number():
    assert math.isnan(measure.percentile([], 50))


def test_every_round_makes_the_number_of_calls_asked_for():
    calls = []
    seconds = measure.seconds_per_call(lambda: calls.append(1), calls=7, rounds=3)
    assert len(calls) == 21
    assert seconds >= 0


def test_calls_are_doubled_until_they_take_long_enough():
    made = []
    calls = measure.calls_within(lambda: made.append(sum(range(1000))), 0.001)
    assert calls >= 1
    assert len(made) == 2 * calls - 1
