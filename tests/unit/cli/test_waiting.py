"""Which changes a watch shows, and how a request that waits is waited for."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from kubelend.cli import waiting
from kubelend.cli.waiting import Filter
from kubelend.core.errors import BrokerUnreachable, Forbidden, NotFound, RateLimited
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


# -- a request that waits

WISH = bodies.ReservationRequest(RESERVATION.requested_resources, wait="1h")
PENDING = replace(RESERVATION, status=bodies.ReservationStatus("Pending", "nothing fits"))
LEFT = "rsv-1 goes on waiting for capacity, until you release it"


class Desk:
    """Lets a request wait, and then says what it is told to, the last of it for ever."""

    def __init__(self, *said):
        self.said = list(said)
        self.is_asked = asyncio.Event()

    async def reserve(self, request, *, key=""):
        return PENDING

    async def get_reservation(self, reservation):
        self.is_asked.set()
        said = self.said.pop(0) if len(self.said) > 1 else self.said[0]
        if isinstance(said, Exception):
            raise said
        return said


async def reserve(desk: Any, wish: bodies.ReservationRequest = WISH) -> bodies.Reservation:
    return await waiting.reserve(desk, wish, "")


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(waiting, "POLL_SECONDS", 0.001)


async def test_who_waits_waits_out_what_passes():
    desk = Desk(PENDING, BrokerUnreachable("away"), RateLimited("slowly"), RESERVATION)
    assert await reserve(desk) == RESERVATION


async def test_trouble_is_not_waited_out_for_longer_than_was_asked_for():
    with pytest.raises(BrokerUnreachable, match=f"^away; {LEFT}$"):
        await reserve(Desk(BrokerUnreachable("away")), replace(WISH, wait="10ms"))


async def test_error_says_what_it_leaves_waiting_and_keeps_its_class_and_hint():
    with pytest.raises(Forbidden) as caught:
        await reserve(Desk(Forbidden("no", hint="ask")))
    assert str(caught.value) == f"no; {LEFT}; ask"


async def test_what_is_gone_does_not_go_on_waiting():
    with pytest.raises(NotFound) as caught:
        await reserve(Desk(NotFound("deleted")))
    assert str(caught.value) == "deleted"


async def test_interrupted_borrower_is_told_what_goes_on_waiting(capsys):
    desk = Desk(PENDING)
    task = asyncio.create_task(reserve(desk))
    await desk.is_asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert capsys.readouterr().err.splitlines()[-1] == LEFT
