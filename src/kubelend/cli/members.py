"""Members from the command line: looked at, accepted, put out and forgotten."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from kubelend.apps.settings import ClientSettings
from kubelend.cli import calling, member_views, options, output
from kubelend.cli.output import Format
from kubelend.core.errors import InvalidInput
from kubelend.wire import membership_bodies as bodies


class Role(StrEnum):
    """What `--role` takes."""

    CLUSTER = "cluster"
    VIEWER = "viewer"
    ADMIN = "admin"
    PROXY = "proxy"


Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]
As = Annotated[Role, typer.Option("--role", help="As what it is known.")]


@options.takes(settings=options.client)
def get(
    standing: Annotated[
        str,
        typer.Option(help="Only these.", metavar="Pending|Accepted|Revoked"),
    ] = "",
    format: options.Output = Format.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """Who joined, who waits to be accepted, and who was put out (viewers and admins)."""
    found = calling.call(settings, lambda client: client.members.all(standing=standing))
    output.listing(
        bodies.MemberList(found),
        format,
        noun="members",
        names=[f"{one.role}/{one.name}" for one in found],
        text=lambda: member_views.members(found, output.now(), wide=format is Format.WIDE),
    )


@options.takes(settings=options.client)
def accept(
    name: Name,
    role: As = Role.CLUSTER,
    key: Annotated[
        str,
        typer.Option(
            help="Only the one with this key's hash, as `kubelend join` shows it.", metavar="HASH"
        ),
    ] = "",
    keep_old: Annotated[
        bool,
        typer.Option(
            "--keep-old", help="Go on believing the certificates of the key that was in until now."
        ),
    ] = False,
    format: options.Output = Format.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """Say yes to who asks to join, or take back a revocation."""
    found = calling.call(
        settings, lambda client: client.members.accept(role.value, name, key, keep_old=keep_old)
    )
    output.show(
        found, format, text=lambda: member_views.accepted(found, output.now()), names=[name]
    )


@options.takes(settings=options.client)
def reject(name: Name, role: As = Role.CLUSTER, *, settings: ClientSettings) -> None:
    """Say no to who asks to join."""
    calling.call(settings, lambda client: client.members.reject(role.value, name))
    print(f"{role} {name} is rejected")


@options.takes(settings=options.client)
def revoke(
    name: Name,
    role: As = Role.CLUSTER,
    release: Annotated[
        bool,
        typer.Option("--release", help="Give back what it borrowed, and move what it lends."),
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Let its reservations end by themselves (default).")
    ] = False,
    reason: options.Reason = "",
    format: options.Output = Format.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """Refuse all certificates of a cluster or person from now on, also on open connections."""
    if release and keep:
        raise InvalidInput("--release and --keep exclude each other", hint="choose one")
    done = calling.call(
        settings,
        lambda client: client.members.revoke(role.value, name, release=release, reason=reason),
    )
    output.show(
        done, format, text=lambda: member_views.revoked(done, release=release), names=[name]
    )
    if not done.known:
        output.note(f"{role} {name} has not joined through the broker: is the name right?")
    _note_legacy(done.let_in)


@options.takes(settings=options.client)
def remove(name: Name, role: As = Role.CLUSTER, *, settings: ClientSettings) -> None:
    """Forget a cluster that lends nothing, or a person, and refuse their certificates."""
    left = calling.call(settings, lambda client: client.members.remove(role.value, name))
    output.say(member_views.removed(role.value, name, left, output.now()))
    _note_legacy(left.let_in)


def _note_legacy(let_in: list[str]) -> None:
    if let_in:
        output.note(f"It let in {', '.join(let_in)}: they stay, so look whether they should.")
