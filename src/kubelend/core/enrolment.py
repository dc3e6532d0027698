"""Enrolment: join tokens, decisions on join requests, certificates, revocation and removal.
Commands as in `commands`.

An applicant presents a token and the public key to be certified. A repeated request with the same
token and key is a retry and costs no second use: the response was lost, or the applicant waits for
approval. A token alone never assigns an existing name to another key.
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
"""Roles that can join with a token. A proxy acts for everyone, so its certificate is issued at the
CA only.
"""

MOST_TOKENS = 1000
SHORTEST_TTL, LONGEST_TTL = timedelta(seconds=1), timedelta(days=30)

REVOKED = "revoked"
"""Prefix of the cordon reason of a revoked cluster."""

_NO_DIGEST = "0" * 64
"""Compared instead of the digest of an unknown token, so that the check takes constant time."""


class Door(Record, frozen=True):
    """Which clusters may join, by patterns such as `edge-*`. Users join with tokens bound to their
    names.
    """

    allow: tuple[str, ...] = ("*",)
    """Names that may join."""
    auto_accept: tuple[str, ...] = ()
    """Names accepted without approval, even if the token is not bound to them."""


class Newcomer(Record, frozen=True):
    """The subject of a join request, from its CSR."""

    role: Role
    name: str
    key: str
    """The pin of its public key."""


class Judgement(NamedTuple):
    """Decision on a join request, before anything is changed."""

    member: Member
    token: Token | None
    """The token after this use; None if no use is consumed."""
    let_in: bool
    """Whether a certificate is issued now; otherwise the applicant waits."""


def create_token(ledger: Ledger, token: Token, door: Door, now: datetime) -> Command[Token]:
    """Creates a join token."""
    if token.role not in JOINING:
        raise Forbidden(
            f"role {token.role} cannot join with a token", hint="see `kubelend ca issue`"
        )
    if len(ledger.registry.tokens) >= MOST_TOKENS:
        raise Conflict(
            f"limit of {MOST_TOKENS} tokens reached",
            hint="delete unused tokens, see `kubelend get tokens`",
        )
    if token.id in ledger.registry.tokens:
        raise Conflict(f"token {token.id} already exists", hint="retry the request")
    if token.name:
        check_name(token.role, token.name, door)
    yield TokenCreated(now, token)
    return ledger.registry.tokens[token.id]


def delete_token(ledger: Ledger, token: TokenId, now: datetime) -> Command[None]:
    """Deletes a token. Join requests made with it can no longer be queried."""
    if token not in ledger.registry.tokens:
        raise NotFound(f"no token {token!r}", hint="see `kubelend get tokens`")
    yield TokenRemoved(now, token)


def check_token(ledger: Ledger, token: TokenId, digest: str) -> Token:
    """Returns the presented token after a constant-time comparison of its secret."""
    found = ledger.registry.tokens.get(token)
    kept = _NO_DIGEST if found is None else found.digest
    if not hmac.compare_digest(kept.encode(), digest.encode()) or found is None:
        raise TokenRefused(
            "unknown token or wrong secret", hint="ask an administrator for a new token"
        )
    return found


def check_name(role: Role, name: str, door: Door) -> None:
    """Raises `Forbidden` for a cluster whose name may not join."""
    if role is Role.CLUSTER and not _matches(name, door.allow):
        raise Forbidden(
            f"cluster {name!r} is not allowed to join", hint="see --allow-join of the broker"
        )


def judge(ledger: Ledger, newcomer: Newcomer, token: Token, door: Door, now: datetime) -> Judgement:
    """Decides on a join request: accept, wait or refuse. The token's secret has been checked."""
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
    """Records a join decision, with the certificate if the applicant is accepted."""
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
    """Accepts a waiting or revoked member.

    With a key, only if that key has applied. Certificates of a previous key are revoked unless
    `keep_old`. Idempotent.
    """
    found = ledger.registry.member(role, name)
    if key and key != (found.asks or found.key):
        raise Conflict(
            f"another key has requested to join as {role} {name}",
            hint="compare the keys with `kubelend get members`",
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
    """Rejects a join request. An existing membership is unchanged."""
    found = ledger.registry.member(role, name)
    if not found.asks:
        raise Conflict(
            f"{role} {name} has no pending join request",
            hint="to deny access, use `kubelend revoke`",
        )
    if found.standing is Standing.PENDING:
        yield MemberRemoved(now, found.id)
    else:
        yield JoinRejected(now, replace(found, asks=""))


def check_renewal(ledger: Ledger, role: Role, name: str) -> Member | None:
    """The member that renews its certificate, if it has a record; raises `Revoked`."""
    found = ledger.registry.members.get(member_id(role, name))
    if found is not None and found.standing is Standing.REVOKED:
        raise Revoked(f"{role} {name} is revoked", hint="join again with a token")
    return found


def certify(
    ledger: Ledger,
    holder: Newcomer,
    certificate: Certificate,
    now: datetime,
    shown_until: datetime | None = None,
) -> Command[Member]:
    """Records a renewed certificate for the holder of a valid one, which expires at `shown_until`."""
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
            f"the token is for role {token.role}, not for role {newcomer.role}",
            hint=f"join with --role {token.role}, or ask for another token",
        )
    if token.name not in {"", newcomer.name}:
        raise TokenRefused(
            f"the token is bound to {token.name!r}",
            hint="join with that name, or ask for another token",
        )


def _check_usable(token: Token, now: datetime) -> None:
    if token.expires_at <= now:
        raise TokenRefused(
            f"the token expired at {token.expires_at:%Y-%m-%dT%H:%M:%SZ}",
            hint="ask an administrator for a new token",
        )
    if token.uses_left <= 0:
        raise TokenRefused(
            "the token has no uses left", hint="ask an administrator for a new token"
        )


def _has_asked(known: Member, key: str) -> bool:
    return known.asks == key or known.is_in_with(key)


def _returning(known: Member, newcomer: Newcomer, used: Token, now: datetime) -> Judgement:
    if known.is_in_with(newcomer.key):
        return Judgement(replace(known, token=used.id), used, True)
    if known.asks not in {"", newcomer.key}:
        raise Conflict(
            f"another key has already requested to join as {known.role} {known.name}",
            hint="an administrator has to decide first: `kubelend approve` or `reject`",
        )
    asking = replace(known, asks=newcomer.key, asked_at=now, token=used.id)
    return Judgement(asking, used, False)


def _is_unheard_of(ledger: Ledger, cluster: ClusterId) -> bool:
    """False also for a cluster that never joined but uses a certificate from another CA."""
    return cluster not in ledger.clusters and next(ledger.touching(cluster), None) is None


def _is_expected(newcomer: Newcomer, door: Door) -> bool:
    return newcomer.role is Role.CLUSTER and _matches(newcomer.name, door.auto_accept)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    # Exact names first: a name may contain brackets.
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
    """Expiry of the certificate with which a cluster advertised, which may be from another CA."""
    found = ledger.clusters.get(ClusterId(member.name)) if member.role is Role.CLUSTER else None
    return None if found is None else found.certificate_until


def _accepted(found: Member, by: str, now: datetime) -> Member:
    # The previous key of a revoked member is not accepted again.
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
    """Uncordons a cluster that was cordoned only because of its revocation."""
    found = ledger.clusters.get(ClusterId(name)) if role is Role.CLUSTER else None
    if found is not None and (found.cordon or "").startswith(REVOKED):
        yield Uncordoned(now, found.id)
