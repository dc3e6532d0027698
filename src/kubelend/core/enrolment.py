"""How somebody gets in: tokens, the judgement of a newcomer, and certificates; commands as in `commands`.

A newcomer shows a token and the key that it wants a certificate for. Whoever asks a second time with the
same token and the same key has lost the answer, or waits for an administrator: that costs no second use.
A name that is taken is never given to another key by a token alone.
"""

from __future__ import annotations

import hmac
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import NamedTuple

from msgspec.structs import replace

from kubelend.core.commands import Command
from kubelend.core.errors import Conflict, Forbidden, NotFound, Revoked, TokenRefused
from kubelend.core.events import (
    CertificateIssued,
    JoinRejected,
    JoinRequested,
    MemberAccepted,
    MemberRemoved,
    MemberRevoked,
    TokenCreated,
    TokenRemoved,
    TokenUsed,
    Uncordoned,
)
from kubelend.core.ledger import Ledger
from kubelend.core.members import (
    BY_CERTIFICATE,
    Certificate,
    Member,
    Standing,
    Token,
    TokenId,
    member_id,
)
from kubelend.core.models import ClusterId, Record
from kubelend.core.roles import Role

JOINING = (Role.CLUSTER, Role.VIEWER, Role.ADMIN)
"""What a token can be for. A proxy speaks for everyone: its certificate is made where the authority is."""

MOST_TOKENS = 1000
SHORTEST_TTL, LONGEST_TTL = timedelta(seconds=1), timedelta(days=30)

REVOKED = "revoked"
"""How the reason begins for which a revoked cluster is cordoned."""

_NO_DIGEST = "0" * 64
"""Stands for the digest of a token that does not exist, so that looking for one takes as long."""


class Door(Record, frozen=True):
    """Which clusters are let in, by patterns such as `edge-*`. People come with tokens in their names."""

    allow: tuple[str, ...] = ("*",)
    """Names that may join at all."""
    auto_accept: tuple[str, ...] = ()
    """Names that need no administrator to say yes, though the token is not bound to them."""


class Newcomer(Record, frozen=True):
    """Who asks to join, as its certificate request says."""

    role: Role
    name: str
    key: str
    """The pin of its public key."""


class Judgement(NamedTuple):
    """What becomes of a newcomer; nothing has changed yet."""

    member: Member
    token: Token | None
    """As it is after this use; None if this costs none."""
    let_in: bool
    """Whether it gets a certificate now. If not, it waits."""


def create_token(ledger: Ledger, token: Token, door: Door, now: datetime) -> Command[Token]:
    """Let somebody in who will come with this token."""
    if token.role not in JOINING:
        raise Forbidden(f"no {token.role} joins with a token", hint="see `kubelend ca issue`")
    if len(ledger.registry.tokens) >= MOST_TOKENS:
        raise Conflict(f"there are {MOST_TOKENS} tokens", hint="delete some: `kubelend get tokens`")
    if token.id in ledger.registry.tokens:
        raise Conflict(f"there is a token {token.id}", hint="ask again")
    if token.name:
        check_name(token.role, token.name, door)
    yield TokenCreated(now, token)
    return ledger.registry.tokens[token.id]


def delete_token(ledger: Ledger, token: TokenId, now: datetime) -> Command[None]:
    """Nobody comes in with it any more, nor hears what became of a request made with it."""
    if token not in ledger.registry.tokens:
        raise NotFound(f"no token {token!r}", hint="see `kubelend get tokens`")
    yield TokenRemoved(now, token)


def check_token(ledger: Ledger, token: TokenId, digest: str) -> Token:
    """The token that somebody shows. Without its secret nothing is learnt, nor by the time it takes."""
    found = ledger.registry.tokens.get(token)
    kept = _NO_DIGEST if found is None else found.digest
    if not hmac.compare_digest(kept.encode(), digest.encode()) or found is None:
        raise TokenRefused(
            "this token is not known here", hint="ask an administrator for a new one"
        )
    return found


def check_name(role: Role, name: str, door: Door) -> None:
    """Refuse a cluster that may not join, whatever it shows."""
    if role is Role.CLUSTER and not _matches(name, door.allow):
        raise Forbidden(f"no cluster {name!r} may join here", hint="see --allow-join of the broker")


def judge(ledger: Ledger, newcomer: Newcomer, token: Token, door: Door, now: datetime) -> Judgement:
    """Let in, wait or refuse; the token's secret has been checked."""
    _check_meant(token, newcomer)
    check_name(newcomer.role, newcomer.name, door)
    known = ledger.registry.members.get(member_id(newcomer.role, newcomer.name))
    if known is not None and known.token == token.id and _has_asked(known, newcomer.key):
        return Judgement(known, None, known.is_in_with(newcomer.key))
    _check_usable(token, now)
    used = replace(token, uses_left=token.uses_left - 1)
    if known is not None:
        return _returning(known, newcomer, used, now)
    is_new = newcomer.role is not Role.CLUSTER or _is_unheard_of(ledger, ClusterId(newcomer.name))
    at_once = is_new and (bool(token.name) or _is_expected(newcomer, door))
    return Judgement(_new_member(newcomer, token, now, at_once=at_once), used, at_once)


def join(
    ledger: Ledger, judged: Judgement, certificate: Certificate | None, now: datetime
) -> Command[Member]:
    """Write down what was judged; with the certificate, if it is let in."""
    member = judged.member
    if judged.token is not None:
        yield TokenUsed(now, judged.token)
    if ledger.registry.members.get(member.id) != member:
        yield MemberAccepted(now, member) if judged.let_in else JoinRequested(now, member)
    if certificate is not None:
        known = ledger.registry.members[member.id]
        yield CertificateIssued(now, known.certified(certificate, _advertised_until(ledger, known)))
    return ledger.registry.members[member.id]


def accept(
    ledger: Ledger,
    role: Role,
    name: str,
    key: str,
    by: str,
    now: datetime,
    *,
    keep_old: bool = False,
) -> Command[Member]:
    """Say yes to who waits, or to who was revoked: what it shows from then on is believed again.

    With a key, only to that one. If another key was in, its certificates are refused from now on, unless
    they are kept. Saying it again changes nothing.
    """
    found = ledger.registry.member(role, name)
    if key and key != (found.asks or found.key):
        raise Conflict(
            f"another key asks to join as {role} {name}", hint="compare it: `kubelend get members`"
        )
    if _is_another_key(found) and not keep_old:
        gone = found.revoked("another key was accepted", by, now)
        yield MemberRevoked(now, gone)
        found = replace(gone, asks=found.asks)
    if found.asks or not found.was_let_in:
        yield MemberAccepted(now, _accepted(found, by, now))
        yield from _reopen(ledger, role, name, now)
    return ledger.registry.member(role, name)


def reject(ledger: Ledger, role: Role, name: str, now: datetime) -> Command[None]:
    """Say no to who waits. One that was in before stays what it is."""
    found = ledger.registry.member(role, name)
    if not found.asks:
        raise Conflict(
            f"{role} {name} does not ask to join", hint="to keep it out: `kubelend revoke`"
        )
    if found.standing is Standing.PENDING:
        yield MemberRemoved(now, found.id)
    else:
        yield JoinRejected(now, replace(found, asks=""))


def check_renewal(ledger: Ledger, role: Role, name: str) -> Member | None:
    """The member that wants a newer certificate, if its older one came from here; none who is revoked."""
    found = ledger.registry.members.get(member_id(role, name))
    if found is not None and found.standing is Standing.REVOKED:
        raise Revoked(f"{role} {name} is revoked", hint="join anew with a token")
    return found


def certify(
    ledger: Ledger,
    holder: Newcomer,
    certificate: Certificate,
    now: datetime,
    shown_until: datetime | None = None,
) -> Command[Member]:
    """It showed an older certificate of the same name, which ends then, and gets a newer one."""
    found = check_renewal(ledger, holder.role, holder.name)
    if found is None or found.standing is Standing.PENDING:
        waiting = "" if found is None else found.asks
        found = Member(
            holder.role,
            holder.name,
            Standing.ACCEPTED,
            now,
            asks=waiting,
            token=None if found is None else found.token,
            decided_at=now,
            decided_by=BY_CERTIFICATE,
        )
    yield CertificateIssued(now, replace(found, key=holder.key).certified(certificate, shown_until))
    return ledger.registry.members[found.id]


def _check_meant(token: Token, newcomer: Newcomer) -> None:
    if token.role is not newcomer.role:
        raise TokenRefused(
            f"this token is for a {token.role}, not for a {newcomer.role}",
            hint=f"join with --role {token.role}, or ask for another token",
        )
    if token.name not in {"", newcomer.name}:
        raise TokenRefused(
            f"this token is for {token.name!r} alone", hint="join by that name, or ask for another"
        )


def _check_usable(token: Token, now: datetime) -> None:
    if token.expires_at <= now:
        raise TokenRefused(
            f"this token was good until {token.expires_at:%Y-%m-%dT%H:%M:%SZ}",
            hint="ask an administrator for a new one",
        )
    if token.uses_left <= 0:
        raise TokenRefused("this token has been used up", hint="ask an administrator for a new one")


def _has_asked(known: Member, key: str) -> bool:
    return known.asks == key or known.is_in_with(key)


def _returning(known: Member, newcomer: Newcomer, used: Token, now: datetime) -> Judgement:
    if known.is_in_with(newcomer.key):
        return Judgement(replace(known, token=used.id), used, True)
    if known.asks not in {"", newcomer.key}:
        raise Conflict(
            f"another key asks to join as {known.role} {known.name} already",
            hint="an administrator has to say yes or no to it: `kubelend approve` or `kubelend deny`",
        )
    asking = replace(known, asks=newcomer.key, asked_at=now, token=used.id)
    return Judgement(asking, used, False)


def _is_unheard_of(ledger: Ledger, cluster: ClusterId) -> bool:
    """One with a certificate from elsewhere has the name already, though it never joined."""
    return cluster not in ledger.clusters and next(ledger.touching(cluster), None) is None


def _is_expected(newcomer: Newcomer, door: Door) -> bool:
    return newcomer.role is Role.CLUSTER and _matches(newcomer.name, door.auto_accept)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    # A name may have brackets, which mean something else in a pattern.
    return name in patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def _new_member(newcomer: Newcomer, token: Token, now: datetime, *, at_once: bool) -> Member:
    if not at_once:
        return Member(
            newcomer.role,
            newcomer.name,
            Standing.PENDING,
            now,
            asks=newcomer.key,
            token=token.id,
        )
    return Member(
        newcomer.role,
        newcomer.name,
        Standing.ACCEPTED,
        now,
        key=newcomer.key,
        token=token.id,
        decided_at=now,
        decided_by=token.created_by,
    )


def _is_another_key(found: Member) -> bool:
    return found.standing is Standing.ACCEPTED and found.asks not in {"", found.key}


def _advertised_until(ledger: Ledger, member: Member) -> datetime | None:
    """When the certificate ends with which a cluster advertised, which may be from elsewhere."""
    found = ledger.clusters.get(ClusterId(member.name)) if member.role is Role.CLUSTER else None
    return None if found is None else found.certificate_until


def _accepted(found: Member, by: str, now: datetime) -> Member:
    # The old key of a revoked one is not taken back with it.
    is_in = found.standing is Standing.ACCEPTED
    return replace(
        found,
        standing=Standing.ACCEPTED,
        key=found.asks or (found.key if is_in else ""),
        asks="",
        decided_at=now,
        decided_by=by,
        reason="",
        forget_at=None,
    )


def _reopen(ledger: Ledger, role: Role, name: str, now: datetime) -> Command[None]:
    """A cluster that was closed because it was revoked, and for nothing else."""
    found = ledger.clusters.get(ClusterId(name)) if role is Role.CLUSTER else None
    if found is not None and (found.cordon or "").startswith(REVOKED):
        yield Uncordoned(now, found.id)
