"""Commands that take their time: a request that waits for capacity, and a look at what changes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from kubelend.cli import output, reservation_views, tables
from kubelend.cli.output import Format
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
    """Ask, and if the broker lets the request wait, wait with it."""
    import asyncio

    found = await client.reserve(request, key=key)
    if found.status.phase != "Pending":
        return found
    with _progress(f"{found.id} waits for capacity; Ctrl-C leaves it waiting"):
        while found.status.phase == "Pending":
            await asyncio.sleep(POLL_SECONDS)
            found = await client.get_reservation(found.id)
    return found


async def watch(client: Desk, wanted: Filter, format: Format) -> None:
    """Print what is open, and then each change, until Ctrl-C."""
    if format in {Format.TABLE, Format.WIDE}:
        _print_row(reservation_views.HEADERS)
    async with contextlib.aclosing(client.stream()) as instructions:
        async for instruction in instructions:
            if wanted.lets_through(instruction):
                _print_change(instruction.reservation, format)


def _print_change(found: bodies.Reservation, format: Format) -> None:
    if format is Format.JSON:
        import msgspec

        print(msgspec.json.encode(found).decode(), flush=True)
    elif format is Format.YAML:
        print("---\n" + output.yaml(found), end="", flush=True)
    elif format is Format.NAME:
        print(found.id, flush=True)
    else:
        _print_row(reservation_views.cells(found, output.now()))


def _print_row(cells: tuple[str, ...]) -> None:
    print(tables.row(cells, reservation_views.ROW_WIDTHS), flush=True)


@contextlib.contextmanager
def _progress(text: str) -> Iterator[None]:
    """A sign of life for a person; one line for everything else."""
    if not sys.stderr.isatty():
        output.note(text)
        yield
        return
    from rich.console import Console

    with Console(stderr=True, highlight=False).status(text):
        yield
