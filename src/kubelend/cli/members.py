"""Members from the command line: looked at, accepted, put out and forgotten."""

from __future__ import annotations

import shlex
from datetime import datetime
from enum import StrEnum
from typing import Annotated
from urllib.parse import quote, urlsplit

import typer

from kubelend.apps.settings import ClientSettings
from kubelend.cli import calls, escapes, options, output, tables
from kubelend.cli.output import Format
from kubelend.core.errors import InvalidInput
from kubelend.sources import names
from kubelend.wire import mailbox_manifests, mailboxes
from kubelend.wire import membership_bodies as bodies


def create_cluster_namespace(
    *,
    cluster_id: Annotated[
        str,
        typer.Option(help="Whose it is. What is written there counts as said by it.", metavar="ID"),
    ],
    namespace: Annotated[
        str,
        typer.Option(help="Of the mailbox; mailbox-ID if not given.", metavar="NAME"),
    ] = "",
    user: Annotated[
        str,
        typer.Option(
            help="A user that the API server knows, instead of a service account of its own.",
            metavar="NAME",
        ),
    ] = "",
) -> None:
    """Print the objects of a mailbox, for `kubectl apply -f -` in the broker's cluster."""
    mailboxes.check_owner(cluster_id)
    place = namespace or f"mailbox-{cluster_id.lower()}"
    names.parse(f"{place}/any")
    documents = mailbox_manifests.documents(cluster_id, place, user=user)
    print("---\n".join(map(output.yaml, documents)), end="")


TOKEN_HEADERS = ("ID", "STATE", "ROLE", "NAME", "USES-LEFT", "EXPIRES", "CREATED-BY")
MEMBER_HEADERS = ("ROLE", "NAME", "STANDING", "SINCE", "CERTIFICATE", "ASKS-WITH")
WIDE_MEMBER_HEADERS = (*MEMBER_HEADERS, "DECIDED-BY", "TOKEN", "SERIAL", "AUTHORITY", "REASON")


def token_table(found: list[bodies.Token], now: datetime) -> str:
    return tables.columns(TOKEN_HEADERS, [_token_cells(one, now) for one in found])


def member_table(found: list[bodies.Member], now: datetime, *, wide: bool = False) -> str:
    """Whole hashes only where they are to be compared: for who waits."""
    if not wide:
        return tables.columns(MEMBER_HEADERS, [_member_cells(one, now) for one in found])
    return tables.columns(
        WIDE_MEMBER_HEADERS, [(*_member_cells(one, now), *_wide_member_cells(one)) for one in found]
    )


def join_command(made: bodies.NewToken, broker: str, address: str = "") -> str:
    """What the newcomer pastes. `broker` is where this administrator reaches it."""
    url = address or _on_same_host(broker, made.enrol_port)
    is_cluster = made.role == "cluster"
    name = made.name or ("CLUSTER" if is_cluster else "NAME")
    parts = ["kubelend", "join", url, "--ca-hash", made.ca_hash]
    parts += ["--cluster-id" if is_cluster else "--name", name]
    parts += [] if is_cluster else ["--role", made.role]
    command = shlex.join([*parts, "--out", f"certs/{quote(name, safe=' @+:,=')}"])
    # Not as a flag: every user of the machine could see that in the list of processes.
    return escapes.line(f"KUBELEND_TOKEN={shlex.quote(made.token)} {command}")


def broker_address(enrolment: str, port: int) -> str:
    """Where a newcomer calls from now on: the host at which it joined."""
    return _on_same_host(enrolment, port)


def approval_summary(member: bodies.Member, now: datetime) -> str:
    text = escapes.line(f"{member.role} {member.name} is accepted")
    if member.revoked_at is None:
        return text
    since = tables.moment(member.revoked_at, now)
    return f"{text}; certificates from before {since} stay refused"


def revocation_summary(done: bodies.Revocation, *, release: bool) -> str:
    """What a revocation did, in one line."""
    member = done.member
    text = escapes.line(f"{member.role} {member.name} is revoked, and refused from now on")
    if member.role != "cluster":
        return text + _deleted_tokens(done.tokens)
    if not release:
        return f"{text}; its reservations stay until they end, or until --release"
    given = tables.counted(len(done.released), "reservation")
    moved = tables.counted(len(done.drained), "reservation")
    return f"{text}; {given} that it had asked for released, {moved} on it moved or released"


def deletion_summary(role: str, name: str, left: bodies.Removal, now: datetime) -> str:
    if not left.refused:
        return f"{name} is removed{_deleted_tokens(left.tokens)}"
    until = tables.moment(left.refused_until, now)
    rest = f"until they have ended, {until}" if until else "until it is accepted again"
    text = f"{role} {name} is removed; its certificates are refused {rest}"
    return text + _deleted_tokens(left.tokens)


def _deleted_tokens(tokens: list[str]) -> str:
    return f"; {tables.counted(len(tokens), 'token')} of it deleted" if tokens else ""


def _token_cells(token: bodies.Token, now: datetime) -> tuple[str, ...]:
    return (
        token.id,
        token.state,
        token.role,
        token.name,
        str(token.uses_left),
        tables.moment(token.expires_at, now),
        token.created_by,
    )


def _member_cells(member: bodies.Member, now: datetime) -> tuple[str, ...]:
    known = member.certificate
    since = member.revoked_at if member.standing == "Revoked" else member.decided_at
    return (
        member.role,
        member.name,
        member.standing,
        tables.age(since or member.asked_at, now),
        "" if known is None else tables.left(known.ends_at, now),
        member.asks,
    )


def _wide_member_cells(member: bodies.Member) -> tuple[str, ...]:
    known = member.certificate
    return (
        member.decided_by,
        member.token,
        "" if known is None else known.serial,
        "" if known is None else known.authority,
        member.reason,
    )


def _on_same_host(url: str, port: int) -> str:
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"https://{f'[{host}]' if ':' in host else host}:{port}"


class Role(StrEnum):
    """What `--role` takes."""

    CLUSTER = "cluster"
    VIEWER = "viewer"
    ADMIN = "admin"
    PROXY = "proxy"


Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]
As = Annotated[Role, typer.Option("--role", help="As what it is known.")]


@options.takes(settings=options.client)
def get_members(
    standing: Annotated[
        str,
        typer.Option(help="Only these.", metavar="Pending|Accepted|Revoked"),
    ] = "",
    format: options.Output = Format.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """Who joined, who waits to be accepted, and who was put out (viewers and admins)."""
    found = calls.call_broker(settings, lambda client: client.members.all(standing=standing))
    output.show_list(
        bodies.MemberList(found),
        format,
        noun="members",
        names=[f"{one.role}/{one.name}" for one in found],
        text=lambda: member_table(found, output.now(), wide=format is Format.WIDE),
    )


@options.takes(settings=options.client)
def approve(
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
    found = calls.call_broker(
        settings, lambda client: client.members.accept(role.value, name, key, keep_old=keep_old)
    )
    output.show(found, format, text=lambda: approval_summary(found, output.now()), names=[name])


@options.takes(settings=options.client)
def deny(name: Name, role: As = Role.CLUSTER, *, settings: ClientSettings) -> None:
    """Say no to who asks to join."""
    calls.call_broker(settings, lambda client: client.members.reject(role.value, name))
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
    done = calls.call_broker(
        settings,
        lambda client: client.members.revoke(role.value, name, release=release, reason=reason),
    )
    output.show(done, format, text=lambda: revocation_summary(done, release=release), names=[name])
    if not done.known:
        output.note(f"{role} {name} has not joined through the broker: is the name right?")
    _note_legacy(done.let_in)


@options.takes(settings=options.client)
def delete_member(name: Name, role: As = Role.CLUSTER, *, settings: ClientSettings) -> None:
    """Forget a cluster that lends nothing, or a person, and refuse their certificates."""
    left = calls.call_broker(settings, lambda client: client.members.remove(role.value, name))
    output.print_text(deletion_summary(role.value, name, left, output.now()))
    _note_legacy(left.let_in)


def _note_legacy(let_in: list[str]) -> None:
    if let_in:
        output.note(f"It let in {', '.join(let_in)}: they stay, so look whether they should.")


class JoinRole(StrEnum):
    """What `--role` takes."""

    CLUSTER = "cluster"
    VIEWER = "viewer"
    ADMIN = "admin"


@options.takes(settings=options.client)
def create_token(
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
    role: Annotated[JoinRole, typer.Option(help="As what.")] = JoinRole.CLUSTER,
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
    made = calls.call_broker(settings, lambda client: client.tokens.create(request))
    output.show(
        made,
        format,
        text=lambda: join_command(made, settings.broker, join_address),
        names=[made.id],
    )
    if format is Format.TABLE:
        output.note(_token_note(made))


@options.takes(settings=options.client)
def get_tokens(format: options.Output = Format.TABLE, *, settings: ClientSettings) -> None:
    """All tokens, without their secrets. Expired ones are shown for a day."""
    found = calls.call_broker(settings, lambda client: client.tokens.all())
    output.show_list(
        bodies.TokenList(found),
        format,
        noun="tokens",
        names=[one.id for one in found],
        text=lambda: token_table(found, output.now()),
    )


@options.takes(settings=options.client)
def delete_token(
    token: Annotated[str, typer.Argument(metavar="ID", show_default=False)],
    *,
    settings: ClientSettings,
) -> None:
    """Let nobody in with a token any more."""
    calls.call_broker(settings, lambda client: client.tokens.delete(token))
    print(f"token {token} is deleted")


def _token_note(made: bodies.NewToken) -> str:
    uses = "once" if made.uses == 1 else f"{made.uses} times"
    text = f"Good {uses}, until {tables.moment(made.expires_at, output.now())}."
    if made.name:
        return f"{text} Paste it where {made.name} is."
    return f"{text} Put the name in; who is not expected then waits for `kubelend accept NAME`."
