"""How members and tokens look to people."""

from __future__ import annotations

import shlex
from datetime import datetime
from urllib.parse import quote, urlsplit

from kubelend.cli import escapes, tables
from kubelend.wire import membership_bodies as bodies

TOKENS = ("ID", "STATE", "ROLE", "NAME", "USES-LEFT", "EXPIRES", "CREATED-BY")
MEMBERS = ("ROLE", "NAME", "STANDING", "SINCE", "CERTIFICATE", "ASKS-WITH")
WIDE_MEMBERS = (*MEMBERS, "DECIDED-BY", "TOKEN", "SERIAL", "AUTHORITY", "REASON")


def tokens(found: list[bodies.Token], now: datetime) -> str:
    return tables.columns(TOKENS, [_token_cells(one, now) for one in found])


def members(found: list[bodies.Member], now: datetime, *, wide: bool = False) -> str:
    """Whole hashes only where they are to be compared: for who waits."""
    if not wide:
        return tables.columns(MEMBERS, [_cells(one, now) for one in found])
    return tables.columns(WIDE_MEMBERS, [(*_cells(one, now), *_more(one)) for one in found])


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


def accepted(member: bodies.Member, now: datetime) -> str:
    text = escapes.line(f"{member.role} {member.name} is accepted")
    if member.revoked_at is None:
        return text
    since = tables.moment(member.revoked_at, now)
    return f"{text}; certificates from before {since} stay refused"


def revoked(done: bodies.Revocation, *, release: bool) -> str:
    """What a revocation did, in one line."""
    member = done.member
    text = escapes.line(f"{member.role} {member.name} is revoked, and refused from now on")
    if member.role != "cluster":
        return text + _tokens_gone(done.tokens)
    if not release:
        return f"{text}; its reservations stay until they end, or until --release"
    given = tables.counted(len(done.released), "reservation")
    moved = tables.counted(len(done.drained), "reservation")
    return f"{text}; {given} that it had asked for released, {moved} on it moved or released"


def removed(role: str, name: str, left: bodies.Removal, now: datetime) -> str:
    if not left.refused:
        return f"{name} is removed{_tokens_gone(left.tokens)}"
    until = tables.moment(left.refused_until, now)
    rest = f"until they have ended, {until}" if until else "until it is accepted again"
    text = f"{role} {name} is removed; its certificates are refused {rest}"
    return text + _tokens_gone(left.tokens)


def _tokens_gone(tokens: list[str]) -> str:
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


def _cells(member: bodies.Member, now: datetime) -> tuple[str, ...]:
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


def _more(member: bodies.Member) -> tuple[str, ...]:
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
