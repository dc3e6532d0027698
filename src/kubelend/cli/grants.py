"""`kubelend grant`: signed reservations, and their verification without a broker."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kubelend.apps.settings import ClientSettings
from kubelend.cli import calls, options, output
from kubelend.cli.options import flag
from kubelend.cli.output import OutputFormat
from kubelend.core.errors import InvalidInput, InvalidSettings
from kubelend.kits import tables

if TYPE_CHECKING:
    from kubelend.core.grants import Grant
    from kubelend.pki.grants import Jwk


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
