"""What `borrow`, `release`, `get --watch` and `dev advertise` send, wait for and print."""

import asyncio
import inspect
import json
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from msgspec.structs import replace

from kubelend.cli import clusters, output, request_flags, reservations
from kubelend.cli.output import OutputFormat
from kubelend.cli.reservations import ReservationFilter
from kubelend.core.errors import (
    BrokerUnreachable,
    Forbidden,
    InvalidDuration,
    InvalidInput,
    NoCapacity,
    NotFound,
    QuotaExceeded,
    RateLimited,
)
from kubelend.wire import bodies

# -- flags of a request

REQUIRED: dict[str, Any] = {"cpu": "1", "memory": "1Gi"}
MINIMAL = bodies.ReservationRequest(bodies.Quantities("1", "1Gi"))


def test_all_flags_make_a_request():
    amounts: dict[str, Any] = {"cpu": "4", "memory": "8Gi", "gpu": "1", "storage": "100Gi"}
    where: dict[str, Any] = {
        "region": "eu",
        "exclude": ["c", "d"],
        "max_price": "0.5",
        "currency": "EUR",
    }
    request = request_flags.request_from_flags(
        **amounts,
        resource=["example.com/fpga=2"],
        duration="2h",
        priority=7,
        wait="5m",
        weight=["price=2", "headroom=0.5"],
        label=["tier=gold", "empty="],
        cluster="b",
        **where,
    )
    labels = {"tier": "gold", "empty": ""}
    assert request == bodies.ReservationRequest(
        bodies.Quantities(**amounts, extended={"example.com/fpga": "2"}),
        priority=7,
        duration="2h",
        wait="5m",
        weights={"price": 2.0, "headroom": 0.5},
        target_cluster_id="b",
        constraints=bodies.Constraints(labels, "eu", ["c", "d"], "0.5", "EUR"),
    )


def test_what_is_not_given_is_not_sent():
    assert request_flags.request_from_flags(**REQUIRED) == MINIMAL
    with_policy = request_flags.request_from_flags(**REQUIRED, policy="cost")
    assert with_policy == replace(MINIMAL, policy="cost")
    assert request_flags.request_from_flags() is None


@pytest.mark.parametrize(
    "given, problem",
    [
        ({}, "no resources are requested; give at least --cpu and --memory"),
        ({"cpu": "1"}, "--cpu and --memory are both required"),
        ({"gpu": "1"}, "--cpu and --memory are both required"),
        ({"priority": 3}, "--cpu and --memory are both required"),
        ({"label": ["gold"]}, "--label: 'gold' has no name and value; write NAME=VALUE"),
        ({"resource": ["=2"]}, "--resource: '=2' has no name and value"),
        ({"weight": ["price=much"]}, "--weight price: 'much' is no number; write for example"),
        ({"weight": ["headroom=nan"]}, "--weight headroom: 'nan' is no number"),
        ({"weight": ["headroom=-inf"]}, "--weight headroom: '-inf' is no number"),
        ({"weight": ["price="]}, "--weight price: '' is no number"),
        ({"policy": "cost", "weight": ["price=1"]}, "--policy and --weight exclude each other"),
    ],
    ids=str,
)
def test_an_invalid_request_is_reported_by_flag(given, problem):
    with pytest.raises(InvalidInput) as raised:
        request_flags.require_resources(request_flags.request_from_flags(**given))
    assert problem in str(raised.value)


def test_every_field_of_a_request_has_a_flag():
    flags = set(inspect.signature(request_flags.request_from_flags).parameters)
    fields = {*bodies.Quantities.__struct_fields__, *bodies.ReservationRequest.__struct_fields__}
    renamed = {"extended", "requested_resources", "weights", "target_cluster_id", "constraints"}
    assert fields - renamed - {"failover"} <= flags
    others = "no_failover resource weight cluster label region exclude max_price"
    assert set(others.split()) <= flags
    known = {name.replace("_", "-") for name in flags} - {"duration"} | {"for", "key"}
    assert {flag.removeprefix("--") for flag in request_flags.FIELDS.values()} == known


# -- an advertisement


def advertisement(**given):
    return msgspec.to_builtins(clusters.advertisement_from_flags(**given))


def test_flags_make_an_advertisement():
    assert advertisement(
        cpu="16",
        memory="64Gi",
        resource=["example.com/fpga=2"],
        allocated_cpu="5",
        label=["tier=gold"],
        region="eu",
        cpu_cost="0.05",
        currency="EUR",
        valid_for="1m",
    ) == {
        "clusterID": "",
        "resources": {
            "capacity": {"cpu": "16", "memory": "64Gi", "extended": {"example.com/fpga": "2"}},
            "allocated": {"cpu": "5", "memory": "0"},
        },
        "cost": {"cpuCost": "0.05", "currency": "EUR"},
        "labels": {"tier": "gold"},
        "region": "eu",
        "validFor": "1m",
    }
    assert "cost" not in advertisement(**REQUIRED)
    with pytest.raises(InvalidInput, match="--cpu and --memory are required"):
        advertisement(cpu="1")


@pytest.mark.parametrize(
    "text",
    [
        "resources: {capacity: {cpu: 16, memory: 64Gi}}\nregion: eu\n",
        '{"resources": {"capacity": {"cpu": 16, "memory": "64Gi"}}, "region": "eu"}',
    ],
    ids=["yaml", "json"],
)
def test_a_file_has_the_whole_advertisement(tmp_path, text):
    path = tmp_path / "advertisement"
    path.write_text(text)
    assert advertisement(file=str(path)) == {
        "clusterID": "",
        "resources": {"capacity": {"cpu": 16, "memory": "64Gi"}},
        "region": "eu",
    }


@pytest.mark.parametrize(
    "text, problem",
    [
        (None, "cannot be read: No such file"),
        ("[1, 2]", "is no advertisement: Expected `object`"),
        ("region: eu", "missing required field `resources`"),
        ("a: [", "is no advertisement"),
    ],
    ids=["missing", "list", "incomplete", "broken"],
)
def test_a_file_without_an_advertisement_is_rejected(tmp_path, text, problem):
    path = tmp_path / "advertisement"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidInput, match=problem):
        advertisement(file=str(path))


# -- pending requests

CREATED, LOCKED = (
    datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    bodies.ReservationStatus("Reserved", ""),
)
RESERVATION = bodies.Reservation(
    "rsv-1", "borrower", "lender", MINIMAL.requested_resources, LOCKED, CREATED
)
REQUEST = bodies.ReservationRequest(RESERVATION.requested_resources, wait="1h")
PENDING = replace(RESERVATION, status=bodies.ReservationStatus("Pending", "nothing fits"))
STAYS = "rsv-1 stays pending for at most 1h, or until you release it"


class ScriptedBackend:
    """Answers every call with the next of its answers, which may be errors; the last one is repeated."""

    def __init__(self, *answers, pending=PENDING):
        self.answers = list(answers)
        self.pending = pending
        self.is_called = asyncio.Event()
        self.released = []

    async def reserve(self, request, *, key=""):
        return self.pending

    async def get_reservation(self, reservation):
        self.is_called.set()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def release(self, reservation):
        self.released.append(reservation)
        return replace(await self.get_reservation(reservation), id=reservation)

    async def stream(self):
        for answer in self.answers:
            if isinstance(answer, Exception):
                raise answer
            yield answer


async def reserve(*answers, request=REQUEST, pending=PENDING):
    backend = ScriptedBackend(*answers, pending=pending)
    return await reservations.reserve_and_wait(backend, request, "")  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def short_polls(monkeypatch):
    monkeypatch.setattr(reservations, "POLL_SECONDS", 0.001)


async def test_a_pending_request_is_waited_for_through_errors_that_may_pass():
    answers = PENDING, BrokerUnreachable("away"), RateLimited("slow down"), RESERVATION
    assert await reserve(*answers) == RESERVATION


async def test_such_errors_are_not_retried_for_longer_than_the_request_waits():
    with pytest.raises(BrokerUnreachable, match=f"^away; {STAYS.replace('1h', '10ms')}$"):
        await reserve(BrokerUnreachable("away"), request=replace(REQUEST, wait="10ms"))


END = RESERVATION.created_at + timedelta(minutes=5)


UNTIL_END = STAYS.replace("for at most 1h", "until 2026-01-02T03:09:05Z (in 5m)")


@pytest.mark.parametrize(
    "error, wait_until, text",
    [
        (Forbidden("no", hint="ask"), None, f"no; {STAYS}; ask"),
        (NotFound("deleted"), None, "deleted"),
        (Forbidden("no"), END, f"no; {UNTIL_END}"),
    ],
    ids=["until the request ends", "deleted", "until the broker's end"],
)
async def test_an_error_says_what_stays_pending(monkeypatch, error, wait_until, text):
    monkeypatch.setattr(output, "now", lambda: RESERVATION.created_at)
    pending = replace(PENDING, status=replace(PENDING.status, wait_until=wait_until))
    with pytest.raises(type(error)) as caught:
        await reserve(error, pending=pending)
    assert str(caught.value) == text


async def test_an_interrupted_command_says_what_stays_pending(capsys):
    backend = ScriptedBackend(PENDING)
    waiting = reservations.reserve_and_wait(backend, REQUEST, "")  # type: ignore[arg-type]
    task = asyncio.create_task(waiting)
    await backend.is_called.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert capsys.readouterr().err.splitlines()[-1] == STAYS


@pytest.mark.parametrize("format", [OutputFormat.TABLE, OutputFormat.NAME, OutputFormat.JSON])
async def test_all_are_released_though_the_output_is_lost(monkeypatch, format):
    backend = ScriptedBackend(RESERVATION)
    full_disk = Mock(**{"write.side_effect": OSError(28, "No space left on device")})
    monkeypatch.setattr("sys.stdout", full_disk)
    try:
        error = await reservations.release_all(backend, ["a", "b", "c"], format)  # type: ignore[arg-type]
    except OSError as caught:
        error = caught
    assert isinstance(error, OSError)
    assert backend.released == ["a", "b", "c"]


@pytest.mark.parametrize(
    "reason, kind",
    [
        ("QuotaExceeded", QuotaExceeded),
        ("InvalidDuration", InvalidDuration),
        ("NoCapacity", NoCapacity),
        ("WaitExpired", NoCapacity),
    ],
)
def test_a_failed_reservation_has_the_error_of_its_reason(reason, kind):
    error = reservations.rejection(bodies.ReservationStatus("Failed", "why", reason), "")
    assert (type(error), str(error)) == (kind, "why")


# -- watches

CHANGE = bodies.Instruction(7, "requester", "Use", "use it", RESERVATION)


@pytest.mark.parametrize(
    "fields, is_shown",
    [
        ({"name": "rsv-1"}, True),
        ({"phases": "Active,Reserved"}, True),
        ({"role": "requester"}, True),
        ({"cluster": "borrower"}, True),
        ({"cluster": "lender", "phases": "Reserved"}, True),
        ({"name": "rsv-2"}, False),
        ({"role": "provider"}, False),
        ({"cluster": "other"}, False),
        ({"cluster": "borrower", "phases": "Active"}, False),
    ],
    ids=str,
)
def test_a_watch_shows_what_matches_all_filters(fields, is_shown):
    assert ReservationFilter(**fields).matches(CHANGE) is is_shown


async def watch(capsys, format, *answers):
    backend = ScriptedBackend(*answers)
    await reservations.watch_reservations(backend, ReservationFilter(), format)  # type: ignore[arg-type]
    return capsys.readouterr().out


async def test_a_watch_has_the_columns_of_a_table(capsys):
    headers, row = (await watch(capsys, OutputFormat.WIDE, CHANGE)).splitlines()
    assert headers.split()[-5:] == ["GPU", "STORAGE", "PRIORITY", "COST", "REASON"]
    assert row.split()[-5:] == ["-", "-", "0", "-", "-"]
    assert headers.index("REQUESTER") == row.index("borrower")
    headers, *rows = (await watch(capsys, OutputFormat.TABLE, CHANGE, CHANGE)).splitlines()
    assert headers.split() == [*("NAME", "PHASE", "REQUESTER", "PROVIDER", "CPU", "MEMORY", "AGE")]
    assert len(rows) == 2


async def test_a_rejected_watch_prints_nothing_but_the_error(capsys):
    with pytest.raises(Forbidden):
        await watch(capsys, OutputFormat.TABLE, Forbidden("not for admins"))
    assert capsys.readouterr().out == ""


async def test_a_change_is_one_line_whatever_is_in_it(capsys):
    hostile = replace(RESERVATION, id="rsv\x1b[2J\n\x9bfake  Active")
    change = replace(CHANGE, reservation=hostile)
    shown = r"rsv\x1b[2J\n\x9bfake  Active"
    for columns in (OutputFormat.TABLE, OutputFormat.WIDE):
        _, row = (await watch(capsys, columns, change)).splitlines()
        assert row.startswith(shown)
    assert await watch(capsys, OutputFormat.NAME, change) == f"reservation/{shown}\n"
    line = await watch(capsys, OutputFormat.JSON, change)
    assert (json.loads(line)["id"], json.loads(line)["kind"]) == (hostile.id, "Reservation")
    assert line.strip().isprintable()
    assert (await watch(capsys, OutputFormat.YAML, change)).startswith("---\nkind: Reservation\n")
