"""Which changes a watch shows, and how a request that waits is waited for."""

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from kubelend.cli import output, reservations
from kubelend.cli.output import Format
from kubelend.cli.reservations import ReservationFilter
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
    assert ReservationFilter(**fields).matches(CHANGE)


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
    assert not ReservationFilter(**fields).matches(CHANGE)


# -- a request that waits

WISH = bodies.ReservationRequest(RESERVATION.requested_resources, wait="1h")
PENDING = replace(RESERVATION, status=bodies.ReservationStatus("Pending", "nothing fits"))
LEFT = "rsv-1 stays pending for at most 1h, or until you release it"


class Desk:
    """Lets a request wait, and then says what it is told to, the last of it for ever."""

    pending = PENDING

    def __init__(self, *said):
        self.said = list(said)
        self.is_asked = asyncio.Event()

    async def reserve(self, request, *, key=""):
        return self.pending

    async def get_reservation(self, reservation):
        self.is_asked.set()
        said = self.said.pop(0) if len(self.said) > 1 else self.said[0]
        if isinstance(said, Exception):
            raise said
        return said


async def reserve(desk: Any, wish: bodies.ReservationRequest = WISH) -> bodies.Reservation:
    return await reservations.reserve_and_wait(desk, wish, "")


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(reservations, "POLL_SECONDS", 0.001)


async def test_who_waits_waits_out_what_passes():
    desk = Desk(PENDING, BrokerUnreachable("away"), RateLimited("slowly"), RESERVATION)
    assert await reserve(desk) == RESERVATION


async def test_trouble_is_not_waited_out_for_longer_than_was_asked_for():
    with pytest.raises(BrokerUnreachable, match=f"^away; {LEFT.replace('1h', '10ms')}$"):
        await reserve(Desk(BrokerUnreachable("away")), replace(WISH, wait="10ms"))


async def test_error_says_what_it_leaves_waiting_and_keeps_its_class_and_hint():
    with pytest.raises(Forbidden) as caught:
        await reserve(Desk(Forbidden("no", hint="ask")))
    assert str(caught.value) == f"no; {LEFT}; ask"


async def test_what_is_gone_does_not_go_on_waiting():
    with pytest.raises(NotFound) as caught:
        await reserve(Desk(NotFound("deleted")))
    assert str(caught.value) == "deleted"


async def test_end_that_the_broker_has_named_is_told(monkeypatch):
    monkeypatch.setattr(output, "now", lambda: RESERVATION.created_at)
    end = RESERVATION.created_at + timedelta(minutes=5)
    status = replace(PENDING.status, wait_until=end)
    monkeypatch.setattr(Desk, "pending", replace(PENDING, status=status))
    with pytest.raises(Forbidden) as caught:
        await reserve(Desk(Forbidden("no")))
    assert str(caught.value) == (
        "no; rsv-1 stays pending until 2026-01-02T03:09:05Z (in 5m), or until you release it"
    )


async def test_interrupted_borrower_is_told_what_goes_on_waiting(capsys):
    desk = Desk(PENDING)
    task = asyncio.create_task(reserve(desk))
    await desk.is_asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert capsys.readouterr().err.splitlines()[-1] == LEFT


# -- a watch


class Told:
    """Streams what it is given, and then raises if that is an error."""

    def __init__(self, *said):
        self.said = said

    async def stream(self):
        for one in self.said:
            if isinstance(one, Exception):
                raise one
            yield one


async def watched(capsys, format, *said):
    desk: Any = Told(*said)
    await reservations.watch_reservations(desk, ReservationFilter(), format)
    return capsys.readouterr().out


async def test_wide_watch_has_the_columns_of_a_wide_table(capsys):
    headers, row = (await watched(capsys, Format.WIDE, CHANGE)).splitlines()
    assert headers.split()[-6:] == ["REQUESTER", "GPU", "STORAGE", "PRIORITY", "COST", "REASON"]
    assert row.split()[-6:] == ["asks", "-", "-", "0", "-", "-"]
    assert headers.index("REQUESTER") == row.index("asks")


async def test_who_may_not_watch_sees_nothing_but_the_reason(capsys):
    with pytest.raises(Forbidden):
        await watched(capsys, Format.TABLE, Forbidden("not for admins"))
    assert capsys.readouterr().out == ""


async def test_watched_change_is_one_line_whatever_is_in_it(capsys):
    hostile = replace(RESERVATION, id="rsv\x1b[2J\n\x9bfake  Active")
    change = replace(CHANGE, reservation=hostile)
    for columns in (Format.TABLE, Format.WIDE):
        _, row = (await watched(capsys, columns, change)).splitlines()
        assert row.startswith(r"rsv\x1b[2J\n\x9bfake  Active")
    assert (
        await watched(capsys, Format.NAME, change)
        == "reservation/rsv\\x1b[2J\\n\\x9bfake  Active\n"
    )
    line = await watched(capsys, Format.JSON, change)
    assert json.loads(line)["id"] == hostile.id
    assert line.strip().isprintable()
