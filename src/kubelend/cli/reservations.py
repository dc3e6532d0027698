"""Borrowing from the command line: ask, look, use, keep and give back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kubelend.apps.settings import ClientSettings
from kubelend.cli import calling, explanations, options, output, waiting, wishes
from kubelend.cli.output import Format
from kubelend.cli.reservation_views import details, sentence, table
from kubelend.core.errors import InvalidInput, KubelendError, NoCapacity
from kubelend.core.lifecycle import Phase
from kubelend.wire import bodies

if TYPE_CHECKING:
    from kubelend.transports.http_client import BrokerClient

Names = Annotated[list[str], typer.Argument(metavar="RESERVATION...", show_default=False)]


@options.takes(request=wishes.read, settings=options.client)
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
    settings: ClientSettings,
) -> None:
    """Borrow capacity: lock an amount on the best cluster.

    For example: kubelend borrow --cpu 4 --memory 8Gi --gpu 1 --for 2h --wait 5m
    """
    if request is None:
        raise InvalidInput("nothing is asked for", hint="give --cpu and --memory at least")
    if dry_run:
        explanations.show(calling.call(settings, lambda client: client.plan(request)), format)
        return
    found = calling.call(settings, lambda client: waiting.reserve(client, request, key))
    has_failed = found.status.phase == "Failed"
    if not has_failed or format is not Format.TABLE:
        _show(found, format)
    if has_failed:
        raise NoCapacity(found.status.message, hint=f"see `kubelend explain {found.id}`")


@options.takes(settings=options.client)
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
        bool, typer.Option("--watch", "-w", help="Then go on with each change.")
    ] = False,
    format: options.Output = Format.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """Reservations: all that concern the caller, or one."""
    _check_phases(phase)
    if watch:
        wanted = waiting.Filter(name, phase, role, cluster)
        calling.call(settings, lambda client: waiting.watch(client, wanted, format))
        return
    if name:
        _show_one(calling.call(settings, lambda client: client.get_reservation(name)), format)
        return
    found = calling.call(
        settings,
        lambda client: client.all_reservations(role=role, phase=phase, cluster=cluster),
    )
    output.listing(
        bodies.ReservationList(found),
        format,
        noun="reservations",
        names=[one.id for one in found],
        text=lambda: table(found, output.now(), wide=format is Format.WIDE),
    )


@options.takes(settings=options.client)
def describe(
    name: options.ReservationName,
    *,
    settings: ClientSettings,
) -> None:
    """One reservation in full."""
    found = calling.call(settings, lambda client: client.get_reservation(name))
    print(details(found, output.now()))


@options.takes(settings=options.client)
def release(
    names: Names,
    format: options.Output = Format.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """Give reservations back. Once or many times, the effect is the same."""
    failure = calling.call(settings, lambda client: _release_all(client, names, format))
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


def _check_phases(names: str) -> None:
    """Here, because a watch would otherwise wait for ever for what cannot come."""
    for name in filter(None, names.split(",")):
        if name not in list(Phase):
            known = ", ".join(Phase)
            raise InvalidInput(f"phase: {name!r} is unknown", hint=f"there are {known}")


async def _release_all(
    client: BrokerClient, names: list[str], format: Format
) -> KubelendError | None:
    """One that cannot be released does not keep the others; its error is told at the end."""
    failure: KubelendError | None = None
    for name in names:
        try:
            _show(await client.release(name), format)
        except KubelendError as error:
            if failure is not None:
                output.note(f"error: {failure}")
            failure = error
    return failure


def _show(found: bodies.Reservation, format: Format) -> None:
    output.show(found, format, text=lambda: sentence(found, output.now()), names=[found.id])


def _show_one(found: bodies.Reservation, format: Format) -> None:
    wide = format is Format.WIDE
    output.show(
        found, format, text=lambda: table([found], output.now(), wide=wide), names=[found.id]
    )
