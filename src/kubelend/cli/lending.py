"""One side of the reservations of a cluster: `get borrowed`, `get lent`, and `grant` for signed ones."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kubelend.apps.settings import ClientSettings
from kubelend.cli import calls, options, output, reservations
from kubelend.cli.options import Target, flag
from kubelend.cli.output import Column, OutputFormat, Printer
from kubelend.cli.reservations import Side
from kubelend.core.errors import InvalidInput, InvalidSettings
from kubelend.kits import tables
from kubelend.wire import bodies

if TYPE_CHECKING:
    from kubelend.core.grants import Grant
    from kubelend.pki.grants import Jwk


PhaseNames = Annotated[
    str,
    options.flag(f"Only these phases, separated by commas. Defaults to {calls.LIVE}.", "PHASES"),
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
        phases = phase or ("" if watch else calls.LIVE)
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


@options.takes(settings=options.client)
def get_grant(name: options.ReservationName, *, settings: ClientSettings) -> None:
    """Print the signed grant of an active reservation, as its requester or provider."""
    output.print_text(calls.call_broker(settings, lambda client: client.grant(name)))


@options.takes(settings=options.client)
def get_grant_keys(*, settings: ClientSettings) -> None:
    """Print the broker's public keys; keep them in a file for `grant verify`."""
    print(output.json(calls.call_broker(settings, lambda client: client.grant_keys())))


def verify_grant(
    grant: Annotated[
        str, typer.Argument(metavar="[GRANT]", help="Defaults to standard input.")
    ] = "-",
    *,
    keys: Annotated[Path, flag("Output of `grant keys`.", "FILE")],
    provider: Annotated[
        str,
        flag("Cluster that the grant has to be for.", "CLUSTER", callback=options.named("cluster")),
    ],
    format: options.Output = OutputFormat.TABLE,
) -> None:
    """Verify a grant without a broker: signature, provider and expiry."""
    from kubelend.core.grants import MAX_GRANT_LENGTH
    from kubelend.pki import grants

    text = sys.stdin.read(MAX_GRANT_LENGTH + 1) if grant == "-" else grant
    found = grants.verify_grant(text, _keys(keys))
    found.check(provider=provider, now=output.now())
    if format is OutputFormat.TABLE:
        output.print_text(_grant_summary(found))
    elif format in {OutputFormat.JSON, OutputFormat.YAML}:
        print((output.json if format is OutputFormat.JSON else output.yaml)(found))
    else:
        raise InvalidInput(
            f"--output: {format} is not supported for grants", hint="use json or yaml"
        )


def _keys(path: Path) -> list[Jwk]:
    import msgspec

    from kubelend.kits import files
    from kubelend.pki.grants import JwkSet

    try:
        return msgspec.json.decode(files.read_file(path), type=JwkSet).keys
    except InvalidSettings as error:
        raise InvalidSettings(f"--keys: {error.message}", hint=error.hint) from None
    except msgspec.MsgspecError:
        raise InvalidSettings(
            f"--keys: {path} has no keys", hint="write it with `kubelend grant keys`"
        ) from None


def _grant_summary(grant: Grant) -> str:
    amounts = ", ".join(f"{amount} {name}" for name, amount in grant.resources.items())
    end = tables.format_time(datetime.fromtimestamp(grant.exp, UTC), output.now())
    return tables.sanitize_line(
        f"{grant.sub} may use {amounts} of {grant.aud} for {grant.jti} until {end}"
    )
