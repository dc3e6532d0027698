"""`get borrowed` and `get lent`: one side of the reservations of a cluster."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Final

from kubelend.cli import options, reservations
from kubelend.cli.options import Target
from kubelend.cli.output import Column, OutputFormat, Printer
from kubelend.cli.reservations import Side
from kubelend.wire import bodies

LIVE: Final = "Reserved,Active"
PhaseNames = Annotated[
    str, options.flag(f"Only these phases, separated by commas. Defaults to {LIVE}.", "PHASES")
]


def _get_side(role: Side, help: str) -> Callable[..., None]:
    def get(
        phase: PhaseNames = "",
        cluster: reservations.OfCluster = "",
        watch: reservations.Watch = False,
        all_namespaces: options.AllNamespaces = False,
        format: options.Output = OutputFormat.TABLE,
        *,
        target: Target,
    ) -> None:
        phases = phase or ("" if watch else LIVE)
        wanted = reservations.ReservationFilter("", phases, role, cluster)
        reservations.get_list(
            target, wanted, format, watch=watch, all_namespaces=all_namespaces, printer=SIDES[role]
        )

    get.__doc__ = help
    return options.takes(target=options.target)(get)


get_borrowed = _get_side(
    Side.REQUESTER,
    """List what the cluster has borrowed: from whom, how much, until when, at what price.

    With `kubectl lend` also the virtual node, and how much its pods use.
    """,
)
get_lent = _get_side(
    Side.PROVIDER,
    """List what the cluster has lent: to whom, how much, until when, at what price.

    With `kubectl lend` also how much the requester's pods use.
    """,
)


def _held(found: bodies.Reservation, _: datetime) -> str:
    held = found.status.held
    return "" if held is None else held.reason


def _used(found: bodies.Reservation, _: datetime) -> str:
    used = getattr(found, "used", None)
    return "" if used is None else f"{used.cpu} {used.memory}"


def _until(found: bodies.Reservation, _: datetime) -> str:
    end = found.status.expires_at
    return f"{end:%Y-%m-%dT%H:%M:%SZ}" if end else ""


def _side_printer(
    header: str, other: Callable[[bodies.Reservation], str], *columns: Column[bodies.Reservation]
) -> Printer[bodies.Reservation]:
    """Prints reservations as one side of them sees them; `other` is the cluster of the other side."""
    return Printer(
        "Reservation",
        "reservations",
        lambda one: f"reservation/{one.id}",
        [
            Column("NAME", lambda one, _: one.id),
            Column("PHASE", lambda one, _: one.status.phase),
            Column(header, lambda one, _: other(one)),
            Column("CPU", lambda one, _: str(one.requested_resources.cpu)),
            Column("MEMORY", lambda one, _: str(one.requested_resources.memory)),
            Column("HELD", _held),
            Column("USED", _used),
            Column("UNTIL", _until),
            Column("PRICE", lambda one, _: reservations.cost_text(one, "/h")),
            *columns,
            Column("LEFT", reservations.time_left, is_wide=True),
            Column("GPU", lambda one, _: str(one.requested_resources.gpu), is_wide=True),
            Column("STORAGE", lambda one, _: str(one.requested_resources.storage), is_wide=True),
            Column("MESSAGE", lambda one, _: one.status.message, is_wide=True),
        ],
    )


SIDES: Final = {
    Side.REQUESTER: _side_printer(
        "FROM",
        lambda one: one.target_cluster_id,
        Column("NODE", lambda one, _: str(getattr(one, "node_name", ""))),
    ),
    Side.PROVIDER: _side_printer("TO", lambda one: one.requester_id),
}
