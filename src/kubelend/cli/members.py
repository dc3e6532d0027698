"""Membership: join tokens, members and their approval, and cluster namespaces."""

from __future__ import annotations

import shlex
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple
from urllib.parse import quote, urlsplit

import typer

from kubelend.apps.settings import ClientSettings
from kubelend.cli import calls, options, output
from kubelend.cli.options import flag
from kubelend.cli.output import Column, OutputFormat, Printer
from kubelend.cli.reservations import RESERVATIONS
from kubelend.core.errors import InvalidInput, NotFound
from kubelend.core.lifecycle import Role
from kubelend.kits import tables
from kubelend.sources import object_semantics
from kubelend.wire import admin_bodies, bodies, cluster_namespaces

if TYPE_CHECKING:
    from kubelend.transports.client import BrokerClient


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


MemberName = Annotated[str, options.argument("[ROLE/]NAME")]
MemberRole = Annotated[
    Role | None,
    flag("Role of the member. Defaults to cluster.", None, "--role", show_default=False),
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
    name: Annotated[str, options.argument("[[ROLE/]NAME]", help="Only this one.")] = "",
    status: Annotated[str, flag("Only these.", "Pending|Approved|Revoked")] = "",
    old_status: Annotated[str, typer.Option("--standing", hidden=True)] = "",
    outdated: Annotated[
        bool,
        flag(
            "Only those that have not renewed their certificate since the last step of a CA rotation.",
            None,
            "--outdated",
        ),
    ] = False,
    format: options.Output = OutputFormat.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """List members and join requests (viewers and admins)."""
    if name:
        MEMBERS.show(_find_member(settings, member(name)), format)
        return
    found = calls.call_broker(
        settings,
        lambda client: client.members.all(status=status or old_status, outdated=outdated),
        {"status": "--status"},
    )
    MEMBERS.show_list(found, format)


@options.takes(who=member, settings=options.client)
def describe_member(who: MemberReference, *, settings: ClientSettings) -> None:
    """Show the details of a member (viewers and admins)."""
    output.print_text(member_details(_find_member(settings, who), output.now()))


@options.takes(who=member, settings=options.client)
def approve(
    who: MemberReference,
    key: Annotated[
        str, flag("Approve only the key with this hash, as `kubelend join` prints it.", "HASH")
    ] = "",
    keep_old: Annotated[
        bool, flag("Keep the certificates of the member's previous key valid.", None, "--keep-old")
    ] = False,
    format: options.Output = OutputFormat.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """Approve a join request, or lift a revocation."""
    found = calls.call_broker(
        settings,
        lambda client: client.members.approve(who.role, who.name, key, keep_old=keep_old),
        {"key": "--key"},
    )
    MEMBERS.show(found, format, lambda: approval_summary(found, output.now()))


@options.takes(who=member, settings=options.client)
def deny(who: MemberReference, *, settings: ClientSettings) -> None:
    """Deny a join request."""
    calls.call_broker(settings, lambda client: client.members.deny(who.role, who.name))
    output.print_text(f"{who} denied")


@options.takes(who=member, settings=options.client)
def revoke(
    who: MemberReference,
    release: Annotated[
        bool, flag("Release what it has borrowed, and move what it has lent.", None, "--release")
    ] = False,
    keep: Annotated[
        bool, flag("Keep its reservations until they end (default).", None, "--keep")
    ] = False,
    reason: options.Reason = "",
    dry_run: options.DryRun = False,
    yes: options.Yes = False,
    format: options.Output = OutputFormat.TABLE,
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
        done, format, lambda: revocation_summary(done, release=release), [str(who)], "Revocation"
    )
    if not done.known:
        output.note(f"{who} never joined through this broker: check the name")
    _note_approved(done.approved)


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
    _note_approved(left.approved)


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
    released = _ending("borrowed and would be released", borrowed)
    moved = _ending("lent and would be moved or released", lent)
    return f"{heading}\n\n{released}\n\n{moved}"


def _ending(what: str, found: list[bodies.Reservation]) -> str:
    if not found:
        return f"No reservations are {what}."
    count = tables.format_count(len(found), "reservation")
    verb = "is" if len(found) == 1 else "are"
    return f"{count} {verb} {what}:\n{RESERVATIONS.table(found, output.now())}"


# -- tokens


@options.takes(settings=options.client)
def create_token(
    *,
    ttl: Annotated[str, flag("Lifetime, at most 720h.", "DURATION")] = admin_bodies.DEFAULT_TTL,
    name: Annotated[
        str,
        flag(
            "Bind the token to this name, which then needs no approval.",
            *("NAME", "--cluster-id", "--name"),
        ),
    ] = "",
    role: Annotated[JoinRole, flag("Role of who joins with it.")] = JoinRole.CLUSTER,
    uses: Annotated[int, flag("Number of times it can be used.", "N")] = 1,
    join_address: Annotated[
        str,
        flag(
            "Address of the enrolment port. Defaults to the host of --broker-url.",
            "URL",
            envvar="KUBELEND_JOIN_ADDRESS",
        ),
    ] = "",
    format: options.Output = OutputFormat.TABLE,
    settings: ClientSettings,
) -> None:
    """Create a join token, and print the `kubelend join` command with it.

    The token is shown only once.
    """
    request = admin_bodies.TokenRequest(ttl=ttl, role=role.value, name=name, uses=uses)
    made = calls.call_broker(settings, lambda client: client.tokens.create(request), _TOKEN_FIELDS)
    text, names = (
        lambda: join_command(made, settings.broker_url, join_address),
        [f"token/{made.id}"],
    )
    output.show(made, format, text, names, "Token")
    if format is OutputFormat.TABLE:
        output.note(_token_note(made))


_TOKEN_FIELDS: Final = calls.fields_of("", "ttl", "uses", "role") | {"name": "--cluster-id"}


@options.takes(settings=options.client)
def get_tokens(
    token: Annotated[str, options.argument("[ID]", "token", help="Only this one.")] = "",
    format: options.Output = OutputFormat.TABLE,
    *,
    settings: ClientSettings,
) -> None:
    """List join tokens, without their secrets. Expired ones are listed for a day."""
    if token:
        TOKENS.show(_find_token(settings, token), format)
    else:
        TOKENS.show_list(calls.call_broker(settings, lambda client: client.tokens.all()), format)


TokenId = Annotated[str, options.argument("ID", "token")]


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
        flag(
            "Cluster that the namespace is for. Objects in it count as sent by this cluster.", "ID"
        ),
    ],
    namespace: Annotated[str, flag("Name of the namespace. Defaults to cluster-ID.", "NAME")] = "",
    user: Annotated[
        str, flag("User known to the API server, instead of a new service account.", "NAME")
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


def token_details(found: admin_bodies.Token, now: datetime) -> str:
    return output.details(
        [
            ("ID", found.id),
            ("State", found.state),
            ("Role", found.role),
            ("Name", found.name),
            ("Uses left", found.uses_left),
            ("Created", found.created_at),
            ("Created by", found.created_by),
            ("Expires", found.expires_at),
        ],
        now,
    )


def member_details(found: admin_bodies.Member, now: datetime) -> str:
    known = found.certificate
    return output.details(
        [
            ("Name", found.name),
            ("Role", found.role),
            ("Status", found.status),
            ("Requested", found.requested_at),
            ("Pending key", found.pending_key),
            ("Token", found.token),
            ("Decided", found.decided_at),
            ("Decided by", found.decided_by),
            ("Revoked", found.revoked_at),
            ("Reason", found.reason),
            ("Certificate", getattr(known, "serial", None)),
            ("Valid until", getattr(known, "expires_at", None)),
            ("Authority", getattr(known, "authority", None)),
        ],
        now,
    )


def join_command(made: admin_bodies.NewToken, broker: str, address: str = "") -> str:
    """The command to run on the joining side. `broker` is the address that this administrator uses."""
    url = address or on_same_host(broker, made.enrol_port)
    is_cluster = made.role == "cluster"
    name = made.name or ("CLUSTER" if is_cluster else "NAME")
    parts = ["kubelend", "join", url, "--ca-hash", made.ca_hash]
    parts += ["--cluster-id" if is_cluster else "--name", name]
    parts += [] if is_cluster else ["--role", made.role]
    command = shlex.join([*parts, "--out", f"certs/{quote(name, safe=' @+:,=')}"])
    # Not as a flag: every user of the machine could see that in the list of processes.
    return tables.sanitize_line(f"KUBELEND_TOKEN={shlex.quote(made.token)} {command}")


def approval_summary(member: admin_bodies.Member, now: datetime) -> str:
    text = tables.sanitize_line(f"{MEMBERS.name(member)} approved")
    if member.revoked_at is None:
        return text
    since = tables.format_time(member.revoked_at, now)
    return f"{text}; certificates from before {since} stay revoked"


def revocation_summary(done: admin_bodies.Revocation, *, release: bool) -> str:
    text = tables.sanitize_line(f"{MEMBERS.name(done.member)} revoked")
    if done.member.role != "cluster":
        return text + _deleted_tokens(done.tokens)
    if not release:
        return f"{text}; its reservations stay until they end, or until --release"
    borrowed = tables.format_count(len(done.released), "borrowed reservation")
    lent = tables.format_count(len(done.drained), "lent reservation")
    return f"{text}; {borrowed} released, {lent} moved or released"


def deletion_summary(who: str, left: admin_bodies.Removal, now: datetime) -> str:
    text = tables.sanitize_line(f"{who} deleted")
    if left.rejected:
        until = tables.format_time(left.rejected_until, now)
        rest = f"until the last one ends, {until}" if until else "until it is approved again"
        text = f"{text}; its certificates stay revoked {rest}"
    return text + _deleted_tokens(left.tokens)


def _deleted_tokens(tokens: list[str]) -> str:
    count = tables.format_count(len(tokens), "token")
    return f"; {count} that it created deleted" if tokens else ""


def on_same_host(url: str, port: int) -> str:
    """The address of another port of a broker."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"https://{f'[{host}]' if ':' in host else host}:{port}"


TOKENS: Final[Printer[admin_bodies.Token]] = Printer(
    "Token",
    "tokens",
    lambda one: f"token/{one.id}",
    [
        Column("ID", lambda one, _: one.id),
        Column("STATE", lambda one, _: one.state),
        Column("ROLE", lambda one, _: one.role),
        Column("NAME", lambda one, _: one.name),
        Column("USES-LEFT", lambda one, _: str(one.uses_left)),
        Column("EXPIRES", lambda one, now: tables.format_time(one.expires_at, now)),
        Column("CREATED-BY", lambda one, _: one.created_by),
    ],
)


def _since(found: admin_bodies.Member) -> datetime:
    moment = found.revoked_at if found.status == "Revoked" else found.decided_at
    return moment or found.requested_at


MEMBERS: Final[Printer[admin_bodies.Member]] = Printer(
    "Member",
    "members",
    lambda one: f"{one.role}/{one.name}",
    [
        Column("ROLE", lambda one, _: one.role),
        Column("NAME", lambda one, _: one.name),
        Column("STATUS", lambda one, _: one.status),
        Column("SINCE", lambda one, now: tables.format_age(_since(one), now)),
        Column(
            "CERTIFICATE",
            lambda one, now: output.time_left(getattr(one.certificate, "expires_at", None), now),
        ),
        # Whole hashes only where they are compared: for pending requests.
        Column("PENDING-KEY", lambda one, _: one.pending_key),
        Column("DECIDED-BY", lambda one, _: one.decided_by, is_wide=True),
        Column("TOKEN", lambda one, _: one.token, is_wide=True),
        Column("SERIAL", lambda one, _: getattr(one.certificate, "serial", ""), is_wide=True),
        Column("AUTHORITY", lambda one, _: getattr(one.certificate, "authority", ""), is_wide=True),
        Column("REASON", lambda one, _: one.reason, is_wide=True),
    ],
)
