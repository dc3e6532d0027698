"""Borrowing from the command line: ask, look, use, keep and give back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kubelend.apps.settings import ClientSettings
from kubelend.cli import calling, explanations, options, output, places, waiting, wishes
from kubelend.cli.output import Format
from kubelend.cli.places import Place
from kubelend.cli.reservation_views import details, sentence, table
from kubelend.core.errors import InvalidInput, KubelendError, NoCapacity
from kubelend.core.lifecycle import Phase
from kubelend.wire import bodies

if TYPE_CHECKING:
    from kubelend.cli.calling import Desk

Names = Annotated[list[str], typer.Argument(metavar="RESERVATION...", show_default=False)]


@options.takes(request=wishes.read, settings=options.lender)
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
    settings: places.Settings,
) -> None:
    """Borrow capacity: lock an amount on the best cluster.

    For example: kubelend borrow --cpu 4 --memory 8Gi --gpu 1 --for 2h --wait 5m
    """
    asked = wishes.complete(request)
    if dry_run:
        explanations.show(_plan(asked, settings), format)
        return
    found = calling.ask(settings, lambda desk: waiting.reserve(desk, asked, key))
    has_failed = found.status.phase == "Failed"
    if not has_failed or format is not Format.TABLE:
        _show(found, format)
    if has_failed:
        in_cluster = isinstance(settings, Place)
        hint = "" if in_cluster else f"see `kubelend explain {found.id}`"
        raise NoCapacity(found.status.message, hint=hint)


@options.takes(settings=options.lender)
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
    all_namespaces: places.Everywhere = False,
    format: options.Output = Format.TABLE,
    *,
    settings: places.Settings,
) -> None:
    """Reservations: all that concern the caller, or one."""
    wanted = waiting.Filter(name, phase, role, cluster)
    _check_phases(phase)
    if all_namespaces:
        settings = _everywhere(settings, name)
    if watch:
        _check_watch(settings, role)
        calling.ask(settings, lambda desk: waiting.watch(desk, wanted, format))
        return
    if name:
        _show_one(calling.ask(settings, lambda desk: desk.get_reservation(name)), format)
        return
    found, where = calling.ask(settings, lambda desk: _find_all(desk, wanted))
    _show_all(found, format, where)


@options.takes(settings=options.lender)
def describe(
    name: options.ReservationName,
    *,
    settings: places.Settings,
) -> None:
    """One reservation in full."""
    found = calling.ask(settings, lambda desk: desk.get_reservation(name))
    output.say(details(found, output.now()))


@options.takes(settings=options.lender)
def release(
    names: Names,
    format: options.Output = Format.TABLE,
    *,
    settings: places.Settings,
) -> None:
    """Give reservations back. Once or many times, the effect is the same."""
    failure = calling.ask(settings, lambda desk: _release_all(desk, names, format))
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
    _show(calling.call(settings, lambda client: client.renew(name, duration)), format)


@options.takes(settings=options.client)
def activate(
    name: options.ReservationName,
    format: options.Output = Format.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """Say that a reservation is in use."""
    _show(calling.call(settings, lambda client: client.activate(name)), format)


def _plan(request: bodies.ReservationRequest, settings: places.Settings) -> bodies.Explanation:
    if isinstance(settings, Place):
        raise InvalidInput(
            "--dry-run is answered by the broker itself", hint="give --broker and --cert-path"
        )
    return calling.call(settings, lambda client: client.plan(request))


async def _find_all(desk: Desk, wanted: waiting.Filter) -> tuple[list[bodies.Reservation], str]:
    found = await desk.all_reservations(
        role=wanted.role, phase=wanted.phases, cluster=wanted.cluster
    )
    return found, calling.where(desk)


def _everywhere(settings: places.Settings, name: str) -> Place:
    if name:
        raise InvalidInput("one reservation is in one namespace", hint="give --namespace instead")
    return places.everywhere(settings)


def _check_watch(settings: places.Settings, role: str) -> None:
    """Here, because in a cluster what is borrowed is watched, and nothing else would ever come."""
    if role and isinstance(settings, Place):
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


async def _release_all(desk: Desk, names: list[str], format: Format) -> KubelendError | None:
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
                output.complain(failure)
            failure = error
        else:
            if not is_list:
                _show(released[-1], format)
    if is_list:
        _show_all(released, format)
    return failure


def _show(found: bodies.Reservation, format: Format) -> None:
    output.show(found, format, text=lambda: sentence(found, output.now()), names=[found.id])


def _show_all(found: list[bodies.Reservation], format: Format, where: str = "") -> None:
    output.listing(
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
