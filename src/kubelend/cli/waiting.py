"""Commands that take their time: a request that waits for capacity, and a look at what changes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from kubelend.cli import exits, output, reservation_views, tables
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
    left = f"{found.id} goes on waiting for capacity, until you release it"
    try:
        with _progress(f"{found.id} waits for capacity; Ctrl-C leaves it waiting"):
            return await _decided(client, found, durations.parse(request.wait or "0s"))
    except NotFound:
        raise
    except asyncio.CancelledError:
        output.note(left)
        raise
    except KubelendError as error:
        raise exits.saying(error, left) from None


async def watch(client: Desk, wanted: Filter, format: Format) -> None:
    """Print what is open, and then each change, until Ctrl-C."""
    if format in {Format.TABLE, Format.WIDE}:
        _print_row(reservation_views.HEADERS)
    async with contextlib.aclosing(client.stream()) as instructions:
        async for instruction in instructions:
            if wanted.lets_through(instruction):
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
