"""A cluster's moments are its own, stay the same, and lie where the clock says."""

from datetime import UTC, datetime, timedelta

import pytest

import make
from kubelend.agent import advertisement
from make import MINUTE, MOMENT, NO_TIME, SECOND

INTERVAL = 30 * SECOND


def at(hour: int, minute: int, second: float = 0) -> datetime:
    return datetime(2026, 1, 1, hour, minute, tzinfo=UTC) + timedelta(seconds=second)


@pytest.mark.parametrize(
    "earliest, interval, offset, expected",
    [
        pytest.param(at(10, 0, 7), INTERVAL, NO_TIME, at(10, 0, 30), id="on the clock"),
        pytest.param(at(10, 0), INTERVAL, NO_TIME, at(10, 0), id="the moment itself"),
        pytest.param(at(10, 0) + MOMENT, INTERVAL, NO_TIME, at(10, 0, 30), id="just over"),
        pytest.param(at(10, 0, 7), INTERVAL, 8 * SECOND, at(10, 0, 8), id="offset ahead"),
        pytest.param(at(10, 0, 9), INTERVAL, 8 * SECOND, at(10, 0, 38), id="offset behind"),
        pytest.param(at(10, 1), 7 * MINUTE, NO_TIME, at(10, 2), id="does not divide the hour"),
        pytest.param(at(10, 0, 0.05), 0.1 * SECOND, NO_TIME, at(10, 0, 0.1), id="short"),
    ],
)
def test_the_next_moment_is_the_first_that_is_not_before(earliest, interval, offset, expected):
    assert advertisement.next_scheduled(earliest, interval, offset) == expected


def test_a_clusters_offset_is_always_the_same():
    assert advertisement.advertising_offset("cluster-a", INTERVAL) == timedelta(
        microseconds=6_728_758
    )


def test_offsets_are_within_the_interval_and_spread_over_it():
    offsets = [
        advertisement.advertising_offset(f"cluster-{number}", INTERVAL) for number in range(300)
    ]
    tenths = [sum(k <= offset / (INTERVAL / 10) < k + 1 for offset in offsets) for k in range(10)]
    assert sum(tenths) == 300
    assert min(tenths) > 10
    assert min(offsets) >= make.NO_TIME
