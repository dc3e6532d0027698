"""`kubelend token`: made for newcomers, listed and deleted."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from kubelend.apps.settings import ClientSettings
from kubelend.cli import calling, member_views, options, output, tables
from kubelend.cli.output import Format
from kubelend.wire import membership_bodies as bodies


class Role(StrEnum):
    """What `--role` takes."""

    CLUSTER = "cluster"
    VIEWER = "viewer"
    ADMIN = "admin"


@options.takes(settings=options.client)
def create(
    *,
    ttl: Annotated[
        str, typer.Option(help="How long it is good for, 720h at most.", metavar="DURATION")
    ] = bodies.DEFAULT_TTL,
    name: Annotated[
        str,
        typer.Option(
            "--cluster-id",
            "--name",
            help="The only one that may join with it, and need not be accepted.",
            metavar="NAME",
        ),
    ] = "",
    role: Annotated[Role, typer.Option(help="As what.")] = Role.CLUSTER,
    uses: Annotated[int, typer.Option(help="How often it may be used.", metavar="N")] = 1,
    join_address: Annotated[
        str,
        typer.Option(
            help="Where newcomers reach the enrolment port; the host of --broker if not given.",
            metavar="URL",
            envvar="KUBELEND_JOIN_ADDRESS",
        ),
    ] = "",
    format: options.Output = Format.TABLE,
    settings: ClientSettings,
) -> None:
    """Print the command with which somebody joins. Its token is shown this once."""
    request = bodies.TokenRequest(ttl=ttl, role=role.value, name=name, uses=uses)
    made = calling.call(settings, lambda client: client.tokens.create(request))
    output.show(
        made,
        format,
        text=lambda: member_views.join_command(made, settings.broker, join_address),
        names=[made.id],
    )
    if format is Format.TABLE:
        output.note(_note(made))


@options.takes(settings=options.client)
def listing(format: options.Output = Format.TABLE, *, settings: ClientSettings) -> None:
    """All tokens, without their secrets. Expired ones are shown for a day."""
    found = calling.call(settings, lambda client: client.tokens.all())
    output.listing(
        bodies.TokenList(found),
        format,
        noun="tokens",
        names=[one.id for one in found],
        text=lambda: member_views.tokens(found, output.now()),
    )


@options.takes(settings=options.client)
def delete(
    token: Annotated[str, typer.Argument(metavar="ID", show_default=False)],
    *,
    settings: ClientSettings,
) -> None:
    """Let nobody in with a token any more."""
    calling.call(settings, lambda client: client.tokens.delete(token))
    print(f"token {token} is deleted")


def _note(made: bodies.NewToken) -> str:
    uses = "once" if made.uses == 1 else f"{made.uses} times"
    text = f"Good {uses}, until {tables.moment(made.expires_at, output.now())}."
    if made.name:
        return f"{text} Paste it where {made.name} is."
    return f"{text} Put the name in; who is not expected then waits for `kubelend accept NAME`."
