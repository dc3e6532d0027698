"""Which changes a watch shows."""

from datetime import UTC, datetime

import pytest

from kubelend.cli.waiting import Filter
from kubelend.wire import bodies

RESERVATION = bodies.Reservation(
    id="rsv-1",
    requester_id="asks",
    target_cluster_id="lends",
    requested_resources=bodies.Quantities("1", "1Gi"),
    status=bodies.ReservationStatus("Reserved", "locked"),
    created_at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
)
CHANGE = bodies.Instruction(7, "requester", "Use", "use it", RESERVATION)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"name": "rsv-1"},
        {"phases": "Active,Reserved"},
        {"role": "requester"},
        {"cluster": "asks"},
        {"cluster": "lends", "phases": "Reserved"},
    ],
)
def test_what_is_asked_for_is_shown(fields):
    assert Filter(**fields).lets_through(CHANGE)


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "rsv-2"},
        {"phases": "Active"},
        {"role": "provider"},
        {"cluster": "other"},
        {"cluster": "asks", "phases": "Active"},
    ],
)
def test_all_else_is_not(fields):
    assert not Filter(**fields).lets_through(CHANGE)
