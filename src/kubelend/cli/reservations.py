"""Reservations: `borrow`, `explain`, `get reservations`, `describe`, `renew` and `release`."""

from __future__ import annotations

import contextlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

from kubelend.apps.settings import ClientSettings
from kubelend.cli import calls, options, output, request_flags
from kubelend.cli.options import KubeTarget, Target, flag
from kubelend.cli.output import Column, OutputFormat, Printer
from kubelend.core import durations
from kubelend.core.errors import InvalidInput, KubelendError, NoCapacity, NotFound
from kubelend.core.lifecycle import Phase
from kubelend.kits import tables
from kubelend.wire import bodies, json_types

if TYPE_CHECKING:
    from kubelend.cli.calls import Backend

POLL_SECONDS = 1.0


Side = StrEnum("Side", ["REQUESTER", "PROVIDER"])
"""What `--role` takes: which side of a reservation a cluster is on."""

PhaseNames = Annotated[
    str, flag("Only these phases, separated by commas: Reserved,Active.", "PHASES")
]
OfCluster = Annotated[
    str, flag("Only those of this cluster.", "CLUSTER", callback=options.named("cluster"))
]
Watch = Annotated[
    bool,
    flag(
        "After listing, watch for changes. On a broker for clusters only: viewers and admins get"
        " exit code 4.",
        *(None, "--watch", "-w"),
    ),
]


# -- commands


@options.takes(request=request_flags.request_from_flags, target=options.target)
def borrow(
    *,
    request: bodies.ReservationRequest | None,
    key: Annotated[
        str,
        flag("Idempotency key: repeated with the same key, it gives the same reservation.", "TEXT"),
    ] = "",
    dry_run: Annotated[
        bool, flag("Show what would be chosen; change nothing.", None, "--dry-run")
    ] = False,
    format: options.Output = OutputFormat.TABLE,
    target: Target,
) -> None:
    """Reserve capacity on the best cluster that fits.

    For example: kubelend borrow --cpu 4 --memory 8Gi --gpu 1 --for 2h --wait 5m
    """
    wanted = request_flags.require_resources(request)
    if dry_run:
        plan = calls.call_backend(
            target, lambda backend: backend.reserve_dry_run(wanted), request_flags.FIELDS
        )
        _show_explanation(plan, format)
        return
    found = calls.call_backend(
        target, lambda backend: reserve_and_wait(backend, wanted, key), request_flags.FIELDS
    )
    has_failed = found.status.phase == "Failed"
    if not has_failed or format is not OutputFormat.TABLE:
        _show(found, format)
    if has_failed:
        is_object = isinstance(target, KubeTarget)
        hint = "" if is_object else f"see `kubelend explain {found.id}`"
        with calls.naming_flags(request_flags.FIELDS):
            raise rejection(found.status, hint)


@options.takes(request=request_flags.request_from_flags, target=options.target)
def explain(
    request: bodies.ReservationRequest | None,
    name: Annotated[
        str,
        options.argument(
            *("[RESERVATION]", "reservation"),
            help="Explain this reservation, by the present state of the clusters.",
        ),
    ] = "",
    limit: Annotated[int, flag("Maximum number of clusters to show.", min=1, max=100)] = 20,
    format: options.Output = OutputFormat.TABLE,
    *,
    target: Target,
) -> None:
    """Explain where a request fits, and where not and why. Changes nothing.

    For example: kubelend explain --cpu 4 --memory 8Gi --max-price 0.50
    """
    _check_explain_arguments(name, request)
    if name:
        found = calls.call_backend(
            target, lambda backend: backend.explain_reservation(name, limit=limit)
        )
    else:
        wanted = request_flags.require_resources(request)
        found = calls.call_backend(
            target, lambda backend: backend.explain(wanted, limit=limit), request_flags.FIELDS
        )
    _show_explanation(found, format)


@options.takes(target=options.target)
def get_reservations(
    name: Annotated[
        str, options.argument("[RESERVATION]", "reservation", help="Only this one.")
    ] = "",
    phase: PhaseNames = "",
    role: Annotated[
        Side | None,
        flag("Only those where the cluster is requester or provider.", "requester|provider"),
    ] = None,
    cluster: OfCluster = "",
    watch: Watch = False,
    all_namespaces: options.AllNamespaces = False,
    format: options.Output = OutputFormat.TABLE,
    *,
    target: Target,
) -> None:
    """List reservations, or show one.

    A cluster sees those that it has borrowed or lent; viewers and admins see all.
    """
    if name and all_namespaces:
        raise InvalidInput("one reservation is in one namespace", hint="give --namespace instead")
    if name and not watch:
        found = calls.call_backend(target, lambda backend: backend.get_reservation(name))
        RESERVATIONS.show(found, format)
        return
    wanted = ReservationFilter(name, phase, role or "", cluster)
    get_list(target, wanted, format, watch=watch, all_namespaces=all_namespaces)


@options.takes(target=options.target)
def describe_reservation(name: options.ReservationName, *, target: Target) -> None:
    """Show the details of a reservation."""
    found = calls.call_backend(target, lambda backend: backend.get_reservation(name))
    output.print_text(details(found, output.now()))


@options.takes(target=options.target)
def release(
    names: options.ReservationNames, format: options.Output = OutputFormat.TABLE, *, target: Target
) -> None:
    """Release reservations. Repeating it has no further effect.

    For example: kubelend release $(kubelend get reservations -o name)
    """
    failure = calls.call_backend(target, lambda backend: release_all(backend, names, format))
    if failure is not None:
        raise failure


@options.takes(settings=options.client)
def renew(
    name: options.ReservationName,
    duration: Annotated[
        str,
        flag(
            "Duration from now on. Defaults to the original one.",
            *("DURATION", "--for", "--duration"),
        ),
    ] = "",
    format: options.Output = OutputFormat.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """Extend a reservation, counted from now."""
    found = calls.call_broker(
        settings, lambda client: client.renew(name, duration), {"duration": "--for"}
    )
    _show(found, format)


@options.takes(settings=options.client)
def activate(
    name: options.ReservationName,
    format: options.Output = OutputFormat.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """Mark a reservation as in use. Agents do this by themselves."""
    _show(calls.call_broker(settings, lambda client: client.activate(name)), format)


def rejection(status: bodies.ReservationStatus, hint: str) -> KubelendError:
    """The error of a failed reservation, by its reason: the same as from the broker itself."""
    return json_types.ERRORS_BY_CODE.get(status.reason, NoCapacity)(status.message, hint=hint)


# -- lists


class ReservationFilter(NamedTuple):
    """Which reservations are wanted; an empty field matches all."""

    name: str = ""
    phases: str = ""
    role: str = ""
    cluster: str = ""

    def matches(self, instruction: bodies.Instruction) -> bool:
        found = instruction.reservation
        return (
            self.name in {"", found.id}
            and (not self.phases or found.status.phase in self.phases.split(","))
            and self.role in {"", instruction.role}
            and self.cluster in {"", found.requester_id, found.target_cluster_id}
        )


def get_list(
    target: Target,
    wanted: ReservationFilter,
    format: OutputFormat,
    *,
    watch: bool,
    all_namespaces: bool,
    printer: Printer[bodies.Reservation] | None = None,
) -> None:
    """`printer` is that of one side of the reservations."""
    _check_phases(wanted.phases)
    if all_namespaces:
        target = options.all_namespaces(target)
    if watch:
        _check_watch(target, wanted.role)
        calls.call_backend(target, lambda backend: watch_reservations(backend, wanted, format))
        return
    is_side = printer is not None
    found, where = calls.call_backend(
        target, lambda backend: _find_all(backend, wanted, is_side=is_side)
    )
    (printer or RESERVATIONS).show_list(found, format, where)


async def _find_all(
    backend: Backend, wanted: ReservationFilter, *, is_side: bool
) -> tuple[list[bodies.Reservation], str]:
    find = backend.all_reservations
    if is_side:  # a broker knows neither nodes nor what pods use
        find = getattr(backend, "instructed_reservations", find)
    try:
        found = await find(role=wanted.role, phase=wanted.phases, cluster=wanted.cluster)
    except InvalidInput as error:
        # Phase and role are checked already: the caller is no cluster, and has no side.
        if wanted.role and not wanted.cluster:
            raise InvalidInput(
                "viewers and admins have no reservations of their own",
                hint="select a cluster with --cluster",
            ) from error
        raise
    return found, calls.search_scope(backend)


def _check_watch(target: Target, role: str) -> None:
    """In a cluster only what is borrowed is watched: anything else would never print a line."""
    if role == Side.PROVIDER and isinstance(target, KubeTarget):
        raise InvalidInput(
            "what a cluster lends cannot be watched by this command",
            hint="use `kubectl get providerinstructions --watch`",
        )


def _check_phases(names: str) -> None:
    """Checked here, because a watch for an unknown phase would never print a line."""
    for name in filter(None, names.split(",")):
        if name not in list(Phase):
            known = ", ".join(Phase)
            raise InvalidInput(f"--phase: {name!r} is unknown", hint=f"there are {known}")


async def release_all(
    backend: Backend, names: list[str], format: OutputFormat
) -> KubelendError | OSError | None:
    """Release each; an error does not stop the others, and the last one is returned.

    For people each is printed as it is released. For programs, several are one list, as `get` prints them.
    """
    is_list = len(names) > 1 and format in {OutputFormat.JSON, OutputFormat.YAML}
    released: list[bodies.Reservation] = []
    failure: KubelendError | OSError | None = None
    for name in names:
        try:
            released.append(await backend.release(name))
            if not is_list:
                _show(released[-1], format)
        except (KubelendError, OSError) as error:  # OSError: standard output cannot be written
            if isinstance(failure, KubelendError):
                output.print_error(failure)
            failure = error
    if is_list:
        RESERVATIONS.show_list(released, format)
    return failure


def _show(found: bodies.Reservation, format: OutputFormat) -> None:
    RESERVATIONS.show(found, format, lambda: summary(found, output.now()))


# -- requests that stay pending


async def reserve_and_wait(
    backend: Backend, request: bodies.ReservationRequest, key: str
) -> bodies.Reservation:
    """Reserve, and if the request stays pending, wait for the decision.

    From then on it has a name, and an end of its own: a command that stops waiting leaves it pending, and
    prints that.
    """
    import asyncio

    found = await backend.reserve(request, key=key)
    if found.status.phase != "Pending":
        return found
    try:
        with _progress(f"{found.id} is pending, waiting for capacity; Ctrl-C leaves it pending"):
            return await _wait_until_decided(
                backend, found, durations.parse_duration(request.wait or "0s")
            )
    except NotFound:
        raise
    except asyncio.CancelledError:
        output.note(_still_pending(found, request))
        raise
    except KubelendError as error:
        raise output.with_detail(error, _still_pending(found, request)) from None


async def _wait_until_decided(
    backend: Backend, found: bodies.Reservation, wait: timedelta
) -> bodies.Reservation:
    """Poll; errors that may pass are retried for as long as the request can be pending."""
    import asyncio

    clock = asyncio.get_running_loop().time
    end = clock() + wait.total_seconds()
    while found.status.phase == "Pending":
        await asyncio.sleep(POLL_SECONDS)
        try:
            found = await backend.get_reservation(found.id)
        except KubelendError as error:
            if not error.retryable or clock() > end:
                raise
    return found


def _still_pending(found: bodies.Reservation, request: bodies.ReservationRequest) -> str:
    """The exact end is the broker's; if it is missing, it is computed from the request."""
    until = tables.format_time(found.status.wait_until, output.now())
    end = f"until {until}" if until else f"for at most {request.wait}"
    return f"{found.id} stays pending {end}, or until you release it"


@contextlib.contextmanager
def _progress(text: str) -> Iterator[None]:
    """A spinner on a terminal; one line elsewhere."""
    if not sys.stderr.isatty():
        output.note(text)
        yield
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True, highlight=False).status(Text(tables.sanitize_line(text))):
        yield


# -- watches


async def watch_reservations(
    backend: Backend, wanted: ReservationFilter, format: OutputFormat
) -> None:
    """Print the present state, and then each change, until Ctrl-C."""
    has_begun = False
    async with contextlib.aclosing(backend.stream()) as instructions:
        async for instruction in instructions:
            if wanted.matches(instruction):
                # Not earlier: a caller who may not watch gets an error and no headers.
                if not has_begun and format in {OutputFormat.TABLE, OutputFormat.WIDE}:
                    _print_row(format, lambda column: column.header)
                has_begun = True
                _print_change(instruction.reservation, format)


def _print_change(found: bodies.Reservation, format: OutputFormat) -> None:
    if format is OutputFormat.JSON:
        print(output.json(output.typed("Reservation", found), indent=-1), flush=True)
    elif format is OutputFormat.YAML:
        print("---\n" + output.yaml(output.typed("Reservation", found)), end="", flush=True)
    elif format is OutputFormat.NAME:
        print(tables.sanitize_line(RESERVATIONS.name(found)), flush=True)
    else:
        now = output.now()
        _print_row(format, lambda column: column.cell(found, now))


def _print_row(format: OutputFormat, cell: Callable[[Column[bodies.Reservation]], str]) -> None:
    columns = RESERVATIONS.shown(wide=format is OutputFormat.WIDE)
    row = tables.format_row(list(map(cell, columns)), [column.width for column in columns])
    print(row, flush=True)


# -- explanations

EXPLANATION_HEADERS: Final = ("CLUSTER", "FITS", "SCORE", "PRICE", "REASONS AND SUGGESTIONS")


def _check_explain_arguments(name: str, request: bodies.ReservationRequest | None) -> None:
    if name and request is not None:
        raise InvalidInput(
            "give either a reservation or resources, not both",
            hint="leave out the name, or the flags of the request",
        )
    if not name and request is None:
        raise InvalidInput(
            "give a reservation or resources",
            hint="add --cpu and --memory, or the name of a reservation",
        )


def _show_explanation(found: bodies.Explanation, format: OutputFormat) -> None:
    fitting = [f"cluster/{one.cluster_id}" for one in found.candidates if one.fits]
    output.show(
        found, format, lambda: explanation_text(found, output.width()), fitting, "Explanation"
    )


def explanation_text(found: bodies.Explanation, width: int | None) -> str:
    """The summary, the clusters, and the nearest suggestion if none fits."""
    parts = [
        tables.sanitize_line(found.summary),
        *(_filled(f"Quota: {text}.", width) for text in found.quota),
    ]
    shown = len(found.candidates)
    if shown:
        rows = [_candidate_cells(one) for one in found.candidates]
        parts.append(tables.format_table(EXPLANATION_HEADERS, rows, width=width))
    if found.total > shown > 0:
        more = "; --limit shows more" if shown < _MAX_CANDIDATES else ""
        parts.append(f"Shown {shown} of {found.total}{more}.")
    if found.suggestion is not None:
        parts.append(_filled(f"Nearest: {calls.suggest_flags(found.suggestion.text)}.", width))
    return "\n\n".join(parts)


_MAX_CANDIDATES: Final = 100
"""How many clusters a broker explains at most."""


def _filled(text: str, width: int | None) -> str:
    text = tables.sanitize_line(text)
    return text if width is None else textwrap.fill(text, width)


def _candidate_cells(one: bodies.Candidate) -> tuple[str, ...]:
    reasons = ", ".join(one.rejections)
    if one.suggestion is not None:
        # The row names the cluster already.
        text = calls.suggest_flags(one.suggestion.text)
        _, _, step = text.partition(" fits if you ")
        reasons = f"{reasons}: {step or text}"
    price = one.price_per_hour
    return (
        one.cluster_id,
        "yes" if one.fits else "no",
        "" if one.score is None else f"{one.score:.4f}",
        f"{output.format_price(price)} {one.currency}/h" if price else "",
        reasons,
    )


# -- reservations as text


def summary(found: bodies.Reservation, now: datetime) -> str:
    """The state of a reservation in one line."""
    status = found.status
    if left := time_left(found, now):
        text = f"{found.id} is {status.phase} on {found.target_cluster_id} for {left}"
    else:
        text = f"{found.id} is {status.phase}: {status.message or status.reason}"
    return tables.sanitize_line(text)


def details(found: bodies.Reservation, now: datetime) -> str:
    status = found.status
    return output.details(
        [
            ("Name", found.id),
            ("Reservation", getattr(found, "reservation_name", "")),
            ("Phase", f"{status.phase} ({status.reason})" if status.reason else status.phase),
            ("Message", status.message),
            ("Requester", found.requester_id),
            ("Target", found.target_cluster_id),
            ("Previously on", ", ".join(found.previous_cluster_ids)),
            ("Resources", output.format_amounts(found.requested_resources)),
            ("Cost", cost_text(found, " per hour")),
            ("Priority", found.priority),
            ("Duration", found.duration),
            ("Created", found.created_at),
            ("Pending until", status.wait_until),
            ("Reserved", status.reserved_at),
            ("Acknowledged", status.acknowledged_at),
            ("Held", held_text(status.held)),
            ("Activated", status.activated_at),
            ("Expires", status.expires_at),
            ("Finished", status.finished_at),
        ],
        now,
    )


def held_text(held: bodies.HoldReport | None) -> str:
    """What the provider reports; empty if it has reported nothing."""
    if held is None:
        return ""
    return f"{held.reason}: {held.message}" if held.message else held.reason


def time_left(found: bodies.Reservation, now: datetime) -> str:
    end = found.status.expires_at
    return tables.format_span(end - now) if end and found.status.finished_at is None else ""


def cost_text(found: bodies.Reservation, unit: str) -> str:
    known = found.cost
    if known is None:
        return ""
    return f"{output.format_price(known.price_per_hour)} {known.currency}{unit}"


RESERVATIONS: Final[Printer[bodies.Reservation]] = Printer(
    "Reservation",
    "reservations",
    lambda one: f"reservation/{one.id}",
    [
        Column("NAME", lambda one, _: one.id, width=36),
        Column("PHASE", lambda one, _: one.status.phase, width=8),
        Column("REQUESTER", lambda one, _: one.requester_id, width=16),
        Column("PROVIDER", lambda one, _: one.target_cluster_id, width=16),
        Column("CPU", lambda one, _: str(one.requested_resources.cpu), width=5),
        Column("MEMORY", lambda one, _: str(one.requested_resources.memory), width=7),
        Column("AGE", lambda one, now: tables.format_age(one.created_at, now), width=4),
        Column("LEFT", time_left, is_wide=True, width=5),
        Column("GPU", lambda one, _: str(one.requested_resources.gpu), is_wide=True, width=3),
        Column(
            "STORAGE", lambda one, _: str(one.requested_resources.storage), is_wide=True, width=7
        ),
        Column("PRIORITY", lambda one, _: str(one.priority), is_wide=True, width=8),
        Column("COST", lambda one, _: cost_text(one, "/h"), is_wide=True, width=12),
        Column("REASON", lambda one, _: one.status.reason, is_wide=True, width=6),
    ],
)
