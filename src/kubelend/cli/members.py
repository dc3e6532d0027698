"""Membership: join tokens, members and their approval, and cluster namespaces."""

from __future__ import annotations

import shlex
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple
from urllib.parse import quote, urlsplit

import typer

from kubelend.apps.settings import ClientSettings
from kubelend.cli import calls, options, output, reservation_views
from kubelend.cli.output import Format
from kubelend.core.errors import InvalidInput, NotFound
from kubelend.kits import tables
from kubelend.sources import object_semantics
from kubelend.wire import admin_bodies, bodies, cluster_namespaces

if TYPE_CHECKING:
    from kubelend.transports.client import BrokerClient


class Role(StrEnum):
    """What `--role` takes."""

    CLUSTER = "cluster"
    VIEWER = "viewer"
    ADMIN = "admin"
    PROXY = "proxy"


class JoinRole(StrEnum):
    """What `--role` takes for a join token."""

    CLUSTER = "cluster"
    VIEWER = "viewer"
    ADMIN = "admin"


class MemberReference(NamedTuple):
    """Which member is meant; printed as `role/name`."""

    role: Role
    name: str

    def __str__(self) -> str:
        return f"{self.role}/{self.name}"


MemberName = Annotated[str, typer.Argument(metavar="[ROLE/]NAME", show_default=False)]
MemberRole = Annotated[
    Role | None,
    typer.Option("--role", help="Role of the member. Defaults to cluster.", show_default=False),
]


def member(name: MemberName, role: MemberRole = None) -> MemberReference:
    """A builder: the member of an argument such as `berlin`, `cluster/berlin` or `admin/alice`."""
    text = options.parse_name(name, "member", "cluster") if name.startswith("member") else name
    prefix, slash, rest = text.partition("/")
    known = next((one for one in Role if slash and prefix == one), None)
    if known is None:
        return MemberReference(role or Role.CLUSTER, text)
    if role not in {None, known}:
        raise InvalidInput(f"{text!r} is no {role}", hint="leave out --role, or the part before /")
    return MemberReference(known, rest)


# -- members


@options.takes(settings=options.client)
def get_members(
    name: Annotated[
        str,
        typer.Argument(metavar="[[ROLE/]NAME]", help="Only this one.", show_default=False),
    ] = "",
    status: Annotated[
        str, typer.Option(help="Only these.", metavar="Pending|Accepted|Revoked")
    ] = "",
    standing: Annotated[str, typer.Option(hidden=True)] = "",
    format: options.Output = Format.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """List members and join requests (viewers and admins)."""
    wide = format is Format.WIDE
    if name:
        one = _find_member(settings, member(name))
        output.show(
            one,
            format,
            kind="Member",
            text=lambda: member_table([one], output.now(), wide=wide),
            names=[_member_reference(one)],
        )
        return
    found = calls.call_broker(
        settings,
        lambda client: client.members.all(standing=status or standing),
        {"standing": "--status"},
    )
    output.show_list(
        found,
        format,
        kind="Member",
        noun="members",
        names=[_member_reference(one) for one in found],
        text=lambda: member_table(found, output.now(), wide=wide),
    )


@options.takes(who=member, settings=options.client)
def describe_member(who: MemberReference, *, settings: ClientSettings) -> None:
    """Show the details of a member (viewers and admins)."""
    output.print_text(member_details(_find_member(settings, who), output.now()))


@options.takes(who=member, settings=options.client)
def approve(
    who: MemberReference,
    key: Annotated[
        str,
        typer.Option(
            help="Approve only the key with this hash, as `kubelend join` prints it.",
            metavar="HASH",
        ),
    ] = "",
    keep_old: Annotated[
        bool,
        typer.Option(
            "--keep-old", help="Keep the certificates of the member's previous key valid."
        ),
    ] = False,
    format: options.Output = Format.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """Approve a join request, or lift a revocation."""
    found = calls.call_broker(
        settings,
        lambda client: client.members.approve(who.role, who.name, key, keep_old=keep_old),
        {"key": "--key"},
    )
    output.show(
        found,
        format,
        kind="Member",
        text=lambda: approval_summary(found, output.now()),
        names=[str(who)],
    )


@options.takes(who=member, settings=options.client)
def deny(who: MemberReference, *, settings: ClientSettings) -> None:
    """Deny a join request."""
    calls.call_broker(settings, lambda client: client.members.deny(who.role, who.name))
    output.print_text(f"{who} denied")


@options.takes(who=member, settings=options.client)
def revoke(
    who: MemberReference,
    release: Annotated[
        bool,
        typer.Option("--release", help="Release what it has borrowed, and move what it has lent."),
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep its reservations until they end (default).")
    ] = False,
    reason: options.Reason = "",
    dry_run: options.DryRun = False,
    yes: options.Yes = False,
    format: options.Output = Format.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """Revoke the certificates of a cluster or person.

    They are rejected from the next request on, also on open connections. With --release the command shows the
    reservations that it would end, and asks for confirmation.
    """
    if release and keep:
        raise InvalidInput("--release and --keep exclude each other", hint="give one")
    if dry_run:
        output.print_text(_revocation_plan(settings, who, release=release))
        return
    if release and not yes:
        output.confirm(
            lambda: _revocation_plan(settings, who, release=True), f"Revoke {who} and release?"
        )
    done = calls.call_broker(
        settings,
        lambda client: client.members.revoke(who.role, who.name, release=release, reason=reason),
        {"reason": "--reason"},
    )
    output.show(
        done,
        format,
        kind="Revocation",
        text=lambda: revocation_summary(done, release=release),
        names=[str(who)],
    )
    if not done.known:
        output.note(f"{who} never joined through this broker: check the name")
    _note_approved(done.let_in)


@options.takes(settings=options.client)
def delete_cluster(name: options.ClusterName, *, settings: ClientSettings) -> None:
    """Delete a cluster without active reservations, and revoke its certificates."""
    _delete(settings, MemberReference(Role.CLUSTER, name))


@options.takes(who=member, settings=options.client)
def delete_member(who: MemberReference, *, settings: ClientSettings) -> None:
    """Delete a person, or a cluster without active reservations; revokes the certificates."""
    _delete(settings, who)


def _delete(settings: ClientSettings, who: MemberReference) -> None:
    left = calls.call_broker(settings, lambda client: client.members.remove(who.role, who.name))
    output.print_text(deletion_summary(str(who), left, output.now()))
    _note_approved(left.let_in)


def _find_member(settings: ClientSettings, who: MemberReference) -> admin_bodies.Member:
    for found in calls.call_broker(settings, lambda client: client.members.all()):
        if (found.role, found.name) == who:
            return found
    raise NotFound(f"no member {str(who)!r}", hint="see `kubelend get members`")


def _note_approved(members: list[str]) -> None:
    if members:
        output.note(
            f"It approved {', '.join(members)}, who stay members: check whether they should."
        )


_UNFINISHED: Final = "Pending,Reserved,Active"


def _revocation_plan(settings: ClientSettings, who: MemberReference, *, release: bool) -> str:
    heading = f"The certificates of {who} would be revoked."
    if who.role is not Role.CLUSTER or not release:
        return heading
    name = who.name

    async def find(client: BrokerClient) -> list[list[bodies.Reservation]]:
        return [
            await client.all_reservations(role=role, phase=_UNFINISHED, cluster=name)
            for role in ("requester", "provider")
        ]

    borrowed, lent = calls.call_broker(settings, find)
    return "\n\n".join(
        [
            heading,
            _ending("borrowed and would be released", borrowed),
            _ending("lent and would be moved or released", lent),
        ]
    )


def _ending(what: str, found: list[bodies.Reservation]) -> str:
    if not found:
        return f"No reservations are {what}."
    count = tables.format_count(len(found), "reservation")
    verb = "is" if len(found) == 1 else "are"
    return f"{count} {verb} {what}:\n{reservation_views.table(found, output.now())}"


# -- tokens


@options.takes(settings=options.client)
def create_token(
    *,
    ttl: Annotated[
        str, typer.Option(help="Lifetime, at most 720h.", metavar="DURATION")
    ] = admin_bodies.DEFAULT_TTL,
    name: Annotated[
        str,
        typer.Option(
            "--cluster-id",
            "--name",
            help="Bind the token to this name, which then needs no approval.",
            metavar="NAME",
        ),
    ] = "",
    role: Annotated[JoinRole, typer.Option(help="Role of who joins with it.")] = JoinRole.CLUSTER,
    uses: Annotated[int, typer.Option(help="Number of times it can be used.", metavar="N")] = 1,
    join_address: Annotated[
        str,
        typer.Option(
            help="Address of the enrolment port. Defaults to the host of --broker-url.",
            metavar="URL",
            envvar="KUBELEND_JOIN_ADDRESS",
        ),
    ] = "",
    format: options.Output = Format.TABLE,
    settings: ClientSettings,
) -> None:
    """Create a join token, and print the `kubelend join` command with it.

    The token is shown only once.
    """
    request = admin_bodies.TokenRequest(ttl=ttl, role=role.value, name=name, uses=uses)
    made = calls.call_broker(settings, lambda client: client.tokens.create(request), _TOKEN_FIELDS)
    output.show(
        made,
        format,
        kind="Token",
        text=lambda: join_command(made, settings.broker_url, join_address),
        names=[f"token/{made.id}"],
    )
    if format is Format.TABLE:
        output.note(_token_note(made))


_TOKEN_FIELDS: Final = {
    "ttl": "--ttl",
    "name": "--cluster-id",
    "uses": "--uses",
    "role": "--role",
}


@options.takes(settings=options.client)
def get_tokens(
    token: Annotated[
        str,
        typer.Argument(
            metavar="[ID]",
            help="Only this one.",
            show_default=False,
            callback=options.named("token"),
        ),
    ] = "",
    format: options.Output = Format.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """List join tokens, without their secrets. Expired ones are listed for a day."""
    if token:
        one = _find_token(settings, token)
        output.show(
            one,
            format,
            kind="Token",
            text=lambda: token_table([one], output.now()),
            names=[f"token/{one.id}"],
        )
        return
    found = calls.call_broker(settings, lambda client: client.tokens.all())
    output.show_list(
        found,
        format,
        kind="Token",
        noun="tokens",
        names=[f"token/{one.id}" for one in found],
        text=lambda: token_table(found, output.now()),
    )


TokenId = Annotated[
    str, typer.Argument(metavar="ID", show_default=False, callback=options.named("token"))
]


@options.takes(settings=options.client)
def describe_token(token: TokenId, *, settings: ClientSettings) -> None:
    """Show the details of a join token."""
    output.print_text(token_details(_find_token(settings, token), output.now()))


@options.takes(settings=options.client)
def delete_token(token: TokenId, *, settings: ClientSettings) -> None:
    """Delete a join token."""
    calls.call_broker(settings, lambda client: client.tokens.delete(token))
    output.print_text(f"token/{token} deleted")


def _find_token(settings: ClientSettings, token: str) -> admin_bodies.Token:
    for found in calls.call_broker(settings, lambda client: client.tokens.all()):
        if found.id == token:
            return found
    raise NotFound(f"no token {token!r}", hint="see `kubelend get tokens`")


def _token_note(made: admin_bodies.NewToken) -> str:
    uses = "once" if made.uses == 1 else f"{made.uses} times"
    text = f"Valid {uses}, until {tables.format_time(made.expires_at, output.now())}."
    if made.name:
        return f"{text} Run it where {made.name} is."
    return f"{text} Insert the name; who joins with it waits for `kubelend approve NAME`."


# -- cluster namespaces


def create_cluster_namespace(
    *,
    cluster_id: Annotated[
        str,
        typer.Option(
            help="Cluster that the namespace is for. Objects in it count as sent by this cluster.",
            metavar="ID",
        ),
    ],
    namespace: Annotated[
        str,
        typer.Option(help="Name of the namespace. Defaults to cluster-ID.", metavar="NAME"),
    ] = "",
    user: Annotated[
        str,
        typer.Option(
            help="User known to the API server, instead of a new service account.",
            metavar="NAME",
        ),
    ] = "",
) -> None:
    """Print the manifests of a cluster namespace, for `kubectl apply -f -`.

    An agent with --broker-transport=kubernetes reaches the broker through it.
    """
    cluster_namespaces.check_cluster_label(cluster_id)
    place = namespace or f"cluster-{cluster_id.lower()}"
    object_semantics.parse_object_key(f"{place}/any")
    documents = cluster_namespaces.cluster_namespace_manifests(cluster_id, place, user=user)
    print("---\n".join(map(output.yaml, documents)), end="")


# -- text

TOKEN_HEADERS: Final = ("ID", "STATE", "ROLE", "NAME", "USES-LEFT", "EXPIRES", "CREATED-BY")
MEMBER_HEADERS: Final = ("ROLE", "NAME", "STATUS", "SINCE", "CERTIFICATE", "PENDING-KEY")
WIDE_MEMBER_HEADERS: Final = (
    *MEMBER_HEADERS,
    "DECIDED-BY",
    "TOKEN",
    "SERIAL",
    "AUTHORITY",
    "REASON",
)


def token_table(found: list[admin_bodies.Token], now: datetime) -> str:
    return tables.format_table(TOKEN_HEADERS, [_token_cells(one, now) for one in found])


def token_details(found: admin_bodies.Token, now: datetime) -> str:
    return tables.format_pairs(
        [
            ("ID", found.id),
            ("State", found.state),
            ("Role", found.role),
            ("Name", found.name),
            ("Uses left", str(found.uses_left)),
            ("Created", tables.format_time(found.created_at, now)),
            ("Created by", found.created_by),
            ("Expires", tables.format_time(found.expires_at, now)),
        ]
    )


def member_table(found: list[admin_bodies.Member], now: datetime, *, wide: bool = False) -> str:
    """Whole hashes only where they are compared: for pending requests."""
    if not wide:
        return tables.format_table(MEMBER_HEADERS, [_member_cells(one, now) for one in found])
    rows = [(*_member_cells(one, now), *_wide_member_cells(one)) for one in found]
    return tables.format_table(WIDE_MEMBER_HEADERS, rows)


def member_details(found: admin_bodies.Member, now: datetime) -> str:
    known = found.certificate
    return tables.format_pairs(
        [
            ("Name", found.name),
            ("Role", found.role),
            ("Status", found.standing),
            ("Requested", tables.format_time(found.asked_at, now)),
            ("Pending key", found.asks),
            ("Token", found.token),
            ("Decided", tables.format_time(found.decided_at, now)),
            ("Decided by", found.decided_by),
            ("Revoked", tables.format_time(found.revoked_at, now)),
            ("Reason", found.reason),
            ("Certificate", "" if known is None else known.serial),
            ("Valid until", "" if known is None else tables.format_time(known.ends_at, now)),
            ("Authority", "" if known is None else known.authority),
        ]
    )


def join_command(made: admin_bodies.NewToken, broker: str, address: str = "") -> str:
    """The command to run on the joining side. `broker` is the address that this administrator uses."""
    url = address or _on_same_host(broker, made.enrol_port)
    is_cluster = made.role == "cluster"
    name = made.name or ("CLUSTER" if is_cluster else "NAME")
    parts = ["kubelend", "join", url, "--ca-hash", made.ca_hash]
    parts += ["--cluster-id" if is_cluster else "--name", name]
    parts += [] if is_cluster else ["--role", made.role]
    command = shlex.join([*parts, "--out", f"certs/{quote(name, safe=' @+:,=')}"])
    # Not as a flag: every user of the machine could see that in the list of processes.
    return tables.sanitize_line(f"KUBELEND_TOKEN={shlex.quote(made.token)} {command}")


def broker_address(enrolment: str, port: int) -> str:
    """The broker's address, on the host of its enrolment port."""
    return _on_same_host(enrolment, port)


def approval_summary(member: admin_bodies.Member, now: datetime) -> str:
    text = tables.sanitize_line(f"{_member_reference(member)} approved")
    if member.revoked_at is None:
        return text
    since = tables.format_time(member.revoked_at, now)
    return f"{text}; certificates from before {since} stay revoked"


def revocation_summary(done: admin_bodies.Revocation, *, release: bool) -> str:
    text = tables.sanitize_line(f"{_member_reference(done.member)} revoked")
    if done.member.role != "cluster":
        return text + _deleted_tokens(done.tokens)
    if not release:
        return f"{text}; its reservations stay until they end, or until --release"
    borrowed = tables.format_count(len(done.released), "borrowed reservation")
    lent = tables.format_count(len(done.drained), "lent reservation")
    return f"{text}; {borrowed} released, {lent} moved or released"


def deletion_summary(who: str, left: admin_bodies.Removal, now: datetime) -> str:
    text = tables.sanitize_line(f"{who} deleted")
    if left.refused:
        until = tables.format_time(left.refused_until, now)
        rest = f"until the last one ends, {until}" if until else "until it is approved again"
        text = f"{text}; its certificates stay revoked {rest}"
    return text + _deleted_tokens(left.tokens)


def _deleted_tokens(tokens: list[str]) -> str:
    return (
        f"; {tables.format_count(len(tokens), 'token')} that it created deleted" if tokens else ""
    )


def _member_reference(found: admin_bodies.Member) -> str:
    return f"{found.role}/{found.name}"


def _token_cells(token: admin_bodies.Token, now: datetime) -> tuple[str, ...]:
    return (
        token.id,
        token.state,
        token.role,
        token.name,
        str(token.uses_left),
        tables.format_time(token.expires_at, now),
        token.created_by,
    )


def _member_cells(member: admin_bodies.Member, now: datetime) -> tuple[str, ...]:
    known = member.certificate
    since = member.revoked_at if member.standing == "Revoked" else member.decided_at
    return (
        member.role,
        member.name,
        member.standing,
        tables.format_age(since or member.asked_at, now),
        "" if known is None else tables.format_time_left(known.ends_at, now),
        member.asks,
    )


def _wide_member_cells(member: admin_bodies.Member) -> tuple[str, ...]:
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
