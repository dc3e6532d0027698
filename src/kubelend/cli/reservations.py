"""Borrowing from the command line: ask, look, use, keep and give back."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from kubelend.apps.settings import ClientSettings
from kubelend.cli import (
    calls,
    escapes,
    exit_codes,
    options,
    output,
    request_flags,
    reservation_views,
    tables,
)
from kubelend.cli.options import KubeTarget
from kubelend.cli.output import Format
from kubelend.cli.reservation_views import details, summary, table
from kubelend.core import durations
from kubelend.core.errors import InvalidInput, KubelendError, NoCapacity, NotFound
from kubelend.core.lifecycle import Phase
from kubelend.wire import bodies

if TYPE_CHECKING:
    from kubelend.cli.calls import Backend

MAX_CANDIDATES = 100
"""How many clusters a broker looks at closely."""

EXPLANATION_HEADERS = ("CLUSTER", "FITS", "SCORE", "PRICE", "WHY NOT, AND WHAT WOULD HELP")


@options.takes(request=request_flags.request_from_flags, settings=options.client)
def explain(
    request: bodies.ReservationRequest | None,
    name: Annotated[
        str,
        typer.Argument(metavar="[RESERVATION]", help="Explain this one, anew.", show_default=False),
    ] = "",
    limit: Annotated[
        int, typer.Option(help="How many clusters to show at most.", min=1, max=MAX_CANDIDATES)
    ] = 20,
    format: options.Output = Format.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """Where a request would fit, best first, and why not elsewhere. Nothing changes.

    For example: kubelend explain --cpu 4 --memory 8Gi --max-price 0.50
    """
    _check_explain_arguments(name, request)
    if name:
        found = calls.call_broker(
            settings, lambda desk: desk.explain_reservation(name, limit=limit)
        )
    else:
        asked = request_flags.require_resources(request)
        found = calls.call_broker(settings, lambda desk: desk.explain(asked, limit=limit))
    show_explanation(found, format)


def _check_explain_arguments(name: str, request: bodies.ReservationRequest | None) -> None:
    if name and request is not None:
        raise InvalidInput(
            "either a reservation or amounts, not both",
            hint="leave out the name, or the flags that say what is wanted",
        )
    if not name and request is None:
        raise InvalidInput(
            "one of both is needed: a reservation, or amounts",
            hint="give --cpu and --memory, or the name of a reservation",
        )


def show_explanation(found: bodies.Explanation, format: Format) -> None:
    fitting = [one.cluster_id for one in found.candidates if one.fits]
    output.show(found, format, text=lambda: explanation_text(found, output.width()), names=fitting)


def explanation_text(found: bodies.Explanation, width: int | None) -> str:
    """The sum, the clusters, and the nearest remedy if none fits."""
    parts = [
        escapes.line(found.summary),
        *(_filled(f"Quota: {text}.", width) for text in found.quota),
    ]
    if found.candidates:
        rows = [_candidate_cells(one) for one in found.candidates]
        parts.append(tables.columns(EXPLANATION_HEADERS, rows, width=width))
    if found.total > len(found.candidates) > 0:
        more = "; --limit shows more" if len(found.candidates) < MAX_CANDIDATES else ""
        parts.append(f"Shown {len(found.candidates)} of {found.total}{more}.")
    if found.remedy is not None:
        parts.append(_filled(f"Nearest: {found.remedy.text}.", width))
    return "\n\n".join(parts)


def _filled(text: str, width: int | None) -> str:
    text = escapes.line(text)
    return text if width is None else textwrap.fill(text, width)


def _candidate_cells(one: bodies.Candidate) -> tuple[str, ...]:
    why = ", ".join(one.refusals)
    if one.remedy is not None:
        # The row names the cluster already.
        _, _, step = one.remedy.text.partition(" fits if you ")
        why = f"{why}: {step or one.remedy.text}"
    return (
        one.cluster_id,
        "yes" if one.fits else "no",
        "" if one.score is None else f"{one.score:.4f}",
        f"{output.format_price(one.price_per_hour)} {one.currency}/h" if one.price_per_hour else "",
        why,
    )


POLL_SECONDS = 1.0


class ReservationFilter(NamedTuple):
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


async def reserve_and_wait(
    client: Backend, request: bodies.ReservationRequest, key: str
) -> bodies.Reservation:
    """Ask, and if the broker lets the request wait, wait with it.

    From then on it has a name, and an end of its own: whoever stops waiting leaves it, and is told so.
    """
    import asyncio

    found = await client.reserve(request, key=key)
    if found.status.phase != "Pending":
        return found
    try:
        with _progress(f"{found.id} waits for capacity; Ctrl-C leaves it waiting"):
            return await _wait_until_decided(client, found, durations.parse(request.wait or "0s"))
    except NotFound:
        raise
    except asyncio.CancelledError:
        output.note(_still_pending(found, request))
        raise
    except KubelendError as error:
        raise exit_codes.with_detail(error, _still_pending(found, request)) from None


def _still_pending(found: bodies.Reservation, request: bodies.ReservationRequest) -> str:
    """Only the broker knows exactly until when; before it has said so, there is what it was asked."""
    until = tables.moment(found.status.wait_until, output.now())
    end = f"until {until}" if until else f"for {request.wait} at most"
    return f"{found.id} goes on waiting for capacity {end}, or until you release it"


async def waiting_watch(client: Backend, wanted: ReservationFilter, format: Format) -> None:
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


async def _wait_until_decided(
    client: Backend, found: bodies.Reservation, wait: timedelta
) -> bodies.Reservation:
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


Names = Annotated[list[str], typer.Argument(metavar="RESERVATION...", show_default=False)]


@options.takes(request=request_flags.request_from_flags, settings=options.target)
def borrow(
    *,
    request: bodies.ReservationRequest | None,
    key: Annotated[
        str,
        typer.Option(help="Idempotency key: the same gives the same reservation.", metavar="TEXT"),
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be chosen; change nothing.")
    ] = False,
    format: options.Output = Format.TABLE,
    settings: options.Target,
) -> None:
    """Borrow capacity: lock an amount on the best cluster.

    For example: kubelend borrow --cpu 4 --memory 8Gi --gpu 1 --for 2h --wait 5m
    """
    asked = request_flags.require_resources(request)
    if dry_run:
        show_explanation(_plan(asked, settings), format)
        return
    found = calls.call_backend(settings, lambda desk: reserve_and_wait(desk, asked, key))
    has_failed = found.status.phase == "Failed"
    if not has_failed or format is not Format.TABLE:
        _show(found, format)
    if has_failed:
        in_cluster = isinstance(settings, KubeTarget)
        hint = "" if in_cluster else f"see `kubelend explain {found.id}`"
        raise NoCapacity(found.status.message, hint=hint)


@options.takes(settings=options.target)
def get(
    name: Annotated[
        str, typer.Argument(metavar="[RESERVATION]", help="Only this one.", show_default=False)
    ] = "",
    phase: Annotated[
        str,
        typer.Option(help="Only these, with commas: Reserved,Active.", metavar="PHASES"),
    ] = "",
    role: Annotated[
        str,
        typer.Option(
            help="Only those where the cluster is requester or provider.",
            metavar="requester|provider",
        ),
    ] = "",
    cluster: Annotated[
        str, typer.Option(help="Only those of this cluster.", metavar="CLUSTER")
    ] = "",
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            "-w",
            help="Then go on with each change. At a broker, for a cluster only: viewers and admins get"
            " exit code 4.",
        ),
    ] = False,
    all_namespaces: options.AllNamespaces = False,
    format: options.Output = Format.TABLE,
    *,
    settings: options.Target,
) -> None:
    """Reservations: all that concern the caller, or one."""
    wanted = ReservationFilter(name, phase, role, cluster)
    _check_phases(phase)
    if all_namespaces:
        settings = _everywhere(settings, name)
    if watch:
        _check_watch(settings, role)
        calls.call_backend(settings, lambda desk: waiting_watch(desk, wanted, format))
        return
    if name:
        _show_one(calls.call_backend(settings, lambda desk: desk.get_reservation(name)), format)
        return
    found, where = calls.call_backend(settings, lambda desk: _find_all(desk, wanted))
    _show_all(found, format, where)


@options.takes(settings=options.target)
def describe(
    name: options.ReservationName,
    *,
    settings: options.Target,
) -> None:
    """One reservation in full."""
    found = calls.call_backend(settings, lambda desk: desk.get_reservation(name))
    output.print_text(details(found, output.now()))


@options.takes(settings=options.target)
def release(
    names: Names,
    format: options.Output = Format.TABLE,
    *,
    settings: options.Target,
) -> None:
    """Give reservations back. Once or many times, the effect is the same."""
    failure = calls.call_backend(settings, lambda desk: _release_all(desk, names, format))
    if failure is not None:
        raise failure


@options.takes(settings=options.client)
def renew(
    name: options.ReservationName,
    duration: Annotated[
        str,
        typer.Option(
            "--for",
            "--duration",
            help="For how long from now; as long as at first if not given.",
            metavar="DURATION",
        ),
    ] = "",
    format: options.Output = Format.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """Keep a reservation for longer, counted from now."""
    _show(calls.call_broker(settings, lambda client: client.renew(name, duration)), format)


@options.takes(settings=options.client)
def activate(
    name: options.ReservationName,
    format: options.Output = Format.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """Say that a reservation is in use."""
    _show(calls.call_broker(settings, lambda client: client.activate(name)), format)


def _plan(request: bodies.ReservationRequest, settings: options.Target) -> bodies.Explanation:
    if isinstance(settings, KubeTarget):
        raise InvalidInput(
            "--dry-run is answered by the broker itself", hint="give --broker and --cert-path"
        )
    return calls.call_broker(settings, lambda client: client.plan(request))


async def _find_all(
    desk: Backend, wanted: ReservationFilter
) -> tuple[list[bodies.Reservation], str]:
    found = await desk.all_reservations(
        role=wanted.role, phase=wanted.phases, cluster=wanted.cluster
    )
    return found, calls.search_scope(desk)


def _everywhere(settings: options.Target, name: str) -> KubeTarget:
    if name:
        raise InvalidInput("one reservation is in one namespace", hint="give --namespace instead")
    return options.all_namespaces(settings)


def _check_watch(settings: options.Target, role: str) -> None:
    """Here, because in a cluster what is borrowed is watched, and nothing else would ever come."""
    if role and isinstance(settings, KubeTarget):
        raise InvalidInput(
            "--role cannot be watched in a cluster",
            hint="`kubectl get providerinstructions --watch` shows what it lends",
        )


def _check_phases(names: str) -> None:
    """Here, because a watch would otherwise wait for ever for what cannot come."""
    for name in filter(None, names.split(",")):
        if name not in list(Phase):
            known = ", ".join(Phase)
            raise InvalidInput(f"phase: {name!r} is unknown", hint=f"there are {known}")


async def _release_all(desk: Backend, names: list[str], format: Format) -> KubelendError | None:
    """One that cannot be released does not keep the others; its error is told at the end.

    People see each as it is released. For programs, several are one list, as `get` prints them.
    """
    is_list = len(names) > 1 and format in {Format.JSON, Format.YAML}
    released: list[bodies.Reservation] = []
    failure: KubelendError | None = None
    for name in names:
        try:
            released.append(await desk.release(name))
        except KubelendError as error:
            if failure is not None:
                output.print_error(failure)
            failure = error
        else:
            if not is_list:
                _show(released[-1], format)
    if is_list:
        _show_all(released, format)
    return failure


def _show(found: bodies.Reservation, format: Format) -> None:
    output.show(found, format, text=lambda: summary(found, output.now()), names=[found.id])


def _show_all(found: list[bodies.Reservation], format: Format, where: str = "") -> None:
    output.show_list(
        bodies.ReservationList(found),
        format,
        noun="reservations",
        where=where,
        names=[one.id for one in found],
        text=lambda: table(found, output.now(), wide=format is Format.WIDE),
    )


def _show_one(found: bodies.Reservation, format: Format) -> None:
    wide = format is Format.WIDE
    output.show(
        found, format, text=lambda: table([found], output.now(), wide=wide), names=[found.id]
    )
