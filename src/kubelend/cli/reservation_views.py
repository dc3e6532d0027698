"""Reservations as text: a table, one line, or all details."""

from __future__ import annotations

from datetime import datetime

from kubelend.cli import output
from kubelend.kits import tables
from kubelend.wire import bodies

HEADERS = ("NAME", "PHASE", "TARGET", "CPU", "MEMORY", "AGE")
WIDE_HEADERS = (
    *HEADERS,
    "LEFT",
    "REQUESTER",
    "GPU",
    "STORAGE",
    "PRIORITY",
    "COST",
    "REASON",
)
ROW_WIDTHS = (36, 8, 16, 5, 7, 4)
WIDE_ROW_WIDTHS = (*ROW_WIDTHS, 5, 16, 3, 7, 8, 12, 6)
"""For rows that are printed one at a time, before the longest is known."""


def table(found: list[bodies.Reservation], now: datetime, *, wide: bool = False) -> str:
    if not wide:
        return tables.format_table(HEADERS, [cells(one, now) for one in found])
    return tables.format_table(WIDE_HEADERS, [wide_cells(one, now) for one in found])


def reference(found: bodies.Reservation) -> str:
    return f"reservation/{found.id}"


def references(found: list[bodies.Reservation]) -> list[str]:
    return [reference(one) for one in found]


def cells(found: bodies.Reservation, now: datetime) -> tuple[str, ...]:
    wanted = found.requested_resources
    return (
        found.id,
        found.status.phase,
        found.target_cluster_id,
        str(wanted.cpu),
        str(wanted.memory),
        tables.format_age(found.created_at, now),
    )


def wide_cells(found: bodies.Reservation, now: datetime) -> tuple[str, ...]:
    return (*cells(found, now), *_more(found, now))


def summary(found: bodies.Reservation, now: datetime) -> str:
    """The state of a reservation in one line."""
    status = found.status
    if status.finished_at is None and status.expires_at is not None:
        left = tables.format_span(status.expires_at - now)
        text = f"{found.id} is {status.phase} on {found.target_cluster_id} for {left}"
    else:
        text = f"{found.id} is {status.phase}: {status.message or status.reason}"
    return tables.sanitize_line(text)


def details(found: bodies.Reservation, now: datetime) -> str:
    status = found.status
    return tables.format_pairs(
        [
            ("Name", found.id),
            ("Reservation", getattr(found, "reservation_name", "")),
            ("Phase", f"{status.phase} ({status.reason})" if status.reason else status.phase),
            ("Message", status.message),
            ("Requester", found.requester_id),
            ("Target", found.target_cluster_id),
            ("Previously on", ", ".join(found.previous_cluster_ids)),
            ("Resources", output.format_amounts(found.requested_resources)),
            ("Cost", _cost(found, " per hour")),
            ("Priority", str(found.priority)),
            ("Duration", found.duration),
            ("Created", tables.format_time(found.created_at, now)),
            ("Pending until", tables.format_time(status.wait_until, now)),
            ("Reserved", tables.format_time(status.reserved_at, now)),
            ("Acknowledged", tables.format_time(status.acknowledged_at, now)),
            ("Activated", tables.format_time(status.activated_at, now)),
            ("Expires", tables.format_time(status.expires_at, now)),
            ("Finished", tables.format_time(status.finished_at, now)),
        ]
    )


def _more(found: bodies.Reservation, now: datetime) -> tuple[str, ...]:
    wanted, status = found.requested_resources, found.status
    is_live = status.finished_at is None and status.expires_at is not None
    left = tables.format_span(status.expires_at - now) if is_live and status.expires_at else ""
    return (
        left,
        found.requester_id,
        str(wanted.gpu),
        str(wanted.storage),
        str(found.priority),
        _cost(found, "/h"),
        status.reason,
    )


def _cost(found: bodies.Reservation, unit: str) -> str:
    known = found.cost
    return (
        ""
        if known is None
        else f"{output.format_price(known.price_per_hour)} {known.currency}{unit}"
    )
