"""Commands that take their time: a request that waits for capacity, and a look at what changes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from kubelend.cli import escapes, exits, output, reservation_views, tables
from kubelend.cli.output import Format
from kubelend.core import durations
from kubelend.core.errors import KubelendError, NotFound
from kubelend.wire import bodies

if TYPE_CHECKING:
    from kubelend.cli.calling import Desk

POLL_SECONDS = 1.0


class Filter(NamedTuple):
    """Which changes are wanted; what is empty lets all through."""

    name: str = ""
    phases: str = ""
    role: str = ""
    cluster: str = ""

    def lets_through(self, instruction: bodies.Instruction) -> bool:
        found = instruction.reservation
        return (
            self.name in {"", found.id}
            and (not self.phases or found.status.phase in self.phases.split(","))
            and self.role in {"", instruction.role}
            and self.cluster in {"", found.requester_id, found.target_cluster_id}
        )


async def reserve(client: Desk, request: bodies.ReservationRequest, key: str) -> bodies.Reservation:
    """Ask, and if the broker lets the request wait, wait with it.

    From then on it has a name, and an end of its own: whoever stops waiting leaves it, and is told so.
    """
    import asyncio

    found = await client.reserve(request, key=key)
    if found.status.phase != "Pending":
        return found
    try:
        with _progress(f"{found.id} waits for capacity; Ctrl-C leaves it waiting"):
            return await _decided(client, found, durations.parse(request.wait or "0s"))
    except NotFound:
        raise
    except asyncio.CancelledError:
        output.note(_left(found, request))
        raise
    except KubelendError as error:
        raise exits.saying(error, _left(found, request)) from None


def _left(found: bodies.Reservation, request: bodies.ReservationRequest) -> str:
    """Only the broker knows exactly until when; before it has said so, there is what it was asked."""
    until = tables.moment(found.status.wait_until, output.now())
    end = f"until {until}" if until else f"for {request.wait} at most"
    return f"{found.id} goes on waiting for capacity {end}, or until you release it"


async def watch(client: Desk, wanted: Filter, format: Format) -> None:
    """Print what is open, and then each change, until Ctrl-C."""
    has_begun = False
    async with contextlib.aclosing(client.stream()) as instructions:
        async for instruction in instructions:
            if wanted.lets_through(instruction):
                # Not before: who may not watch is to see nothing but the reason.
                if not has_begun:
                    _print_headers(format)
                has_begun = True
                _print_change(instruction.reservation, format)


async def _decided(client: Desk, found: bodies.Reservation, wait: timedelta) -> bodies.Reservation:
    """While it waits, so does who asks: what passes by itself is no reason to stop."""
    import asyncio

    clock = asyncio.get_running_loop().time
    end = clock() + wait.total_seconds()
    while found.status.phase == "Pending":
        await asyncio.sleep(POLL_SECONDS)
        try:
            found = await client.get_reservation(found.id)
        except KubelendError as error:
            if not error.retryable or clock() > end:
                raise
    return found


def _print_change(found: bodies.Reservation, format: Format) -> None:
    if format is Format.JSON:
        print(output.json_line(found), flush=True)
    elif format is Format.YAML:
        print("---\n" + output.yaml(found), end="", flush=True)
    elif format is Format.NAME:
        print(escapes.line(found.id), flush=True)
    elif format is Format.WIDE:
        _print_row(reservation_views.wide_cells(found, output.now()), format)
    else:
        _print_row(reservation_views.cells(found, output.now()), format)


def _print_headers(format: Format) -> None:
    if format is Format.WIDE:
        _print_row(reservation_views.WIDE_HEADERS, format)
    elif format is Format.TABLE:
        _print_row(reservation_views.HEADERS, format)


def _print_row(cells: tuple[str, ...], format: Format) -> None:
    is_wide = format is Format.WIDE
    widths = reservation_views.WIDE_ROW_WIDTHS if is_wide else reservation_views.ROW_WIDTHS
    print(tables.row(cells, widths), flush=True)


@contextlib.contextmanager
def _progress(text: str) -> Iterator[None]:
    """A sign of life for a person; one line for everything else."""
    if not sys.stderr.isatty():
        output.note(text)
        yield
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True, highlight=False).status(Text(escapes.line(text))):
        yield
