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
    MembershipStatus,
    Token,
    TokenId,
    member_id,
)
from kubelend.core.models import ClusterId, Record
from kubelend.core.roles import Role

JOINABLE_ROLES = (Role.CLUSTER, Role.VIEWER, Role.ADMIN)
"""Roles that can join with a token. A proxy acts for everyone, so its certificate is issued at the
CA only.
"""

MAX_TOKENS = 1000
MIN_TOKEN_TTL, MAX_TOKEN_TTL = timedelta(seconds=1), timedelta(days=30)

REVOKED_CORDON_PREFIX = "revoked"
"""Prefix of the cordon reason of a revoked cluster."""

_NO_DIGEST = "0" * 64
"""Compared instead of the digest of an unknown token, so that the check takes constant time."""


class JoinPolicy(Record, frozen=True):
    """Which clusters may join, by patterns such as `edge-*`. Users join with tokens bound to their
    names.
    """

    allow: tuple[str, ...] = ("*",)
    """Names that may join."""
    auto_accept: tuple[str, ...] = ()
    """Names accepted without approval, even if the token is not bound to them."""


class Applicant(Record, frozen=True):
    """The subject of a join request, from its CSR."""

    role: Role
    name: str
    key: str
    """The pin of its public key."""


class JoinDecision(NamedTuple):
    """Decision on a join request, before anything is changed."""

    member: Member
    token: Token | None
    """The token after this use; None if no use is consumed."""
    is_accepted: bool
    """Whether a certificate is issued now; otherwise the applicant waits."""


def create_token(
    ledger: Ledger, token: Token, join_policy: JoinPolicy, now: datetime
) -> Command[Token]:
    """Creates a join token."""
    if token.role not in JOINABLE_ROLES:
        raise Forbidden(
            f"role {token.role} cannot join with a token", hint="see `kubelend ca issue`"
        )
    if len(ledger.member_index.tokens) >= MAX_TOKENS:
        raise Conflict(
            f"limit of {MAX_TOKENS} tokens reached",
            hint="delete unused tokens, see `kubelend get tokens`",
        )
    if token.id in ledger.member_index.tokens:
        raise Conflict(f"token {token.id} already exists", hint="retry the request")
    if token.name:
        check_join_allowed(token.role, token.name, join_policy)
    yield TokenCreated(now, token)
    return ledger.member_index.tokens[token.id]


def delete_token(ledger: Ledger, token: TokenId, now: datetime) -> Command[None]:
    """Deletes a token. Join requests made with it can no longer be queried."""
    if token not in ledger.member_index.tokens:
        raise NotFound(f"no token {token!r}", hint="see `kubelend get tokens`")
    yield TokenRemoved(now, token)


def check_token(ledger: Ledger, token: TokenId, digest: str) -> Token:
    """Returns the presented token after a constant-time comparison of its secret."""
    found = ledger.member_index.tokens.get(token)
    kept = _NO_DIGEST if found is None else found.digest
    if not hmac.compare_digest(kept.encode(), digest.encode()) or found is None:
        raise TokenRefused(
            "unknown token or wrong secret", hint="ask an administrator for a new token"
        )
    return found


def check_join_allowed(role: Role, name: str, join_policy: JoinPolicy) -> None:
    """Raises `Forbidden` for a cluster whose name may not join."""
    if role is Role.CLUSTER and not _matches_patterns(name, join_policy.allow):
        raise Forbidden(
            f"cluster {name!r} is not allowed to join", hint="see --allow-join of the broker"
        )


def decide_join(
    ledger: Ledger, applicant: Applicant, token: Token, join_policy: JoinPolicy, now: datetime
) -> JoinDecision:
    """Decides on a join request: accept, wait or refuse. The token's secret has been checked."""
    _check_token_scope(token, applicant)
    check_join_allowed(applicant.role, applicant.name, join_policy)
    known = ledger.member_index.members.get(member_id(applicant.role, applicant.name))
    if known is not None and known.token == token.id and _has_applied(known, applicant.key):
        return JoinDecision(known, None, known.is_accepted_with_key(applicant.key))
    _check_token_usable(token, now)
    used = replace(token, uses_left=token.uses_left - 1)
    if known is not None:
        return _decide_known_member(known, applicant, used, now)
    is_new = applicant.role is not Role.CLUSTER or _is_unknown_cluster(
        ledger, ClusterId(applicant.name)
    )
    at_once = is_new and (bool(token.name) or _is_auto_accepted(applicant, join_policy))
    return JoinDecision(_new_member(applicant, token, now, at_once=at_once), used, at_once)


def join_member(
    ledger: Ledger, decision: JoinDecision, certificate: Certificate | None, now: datetime
) -> Command[Member]:
    """Records a join decision, with the certificate if the applicant is accepted."""
    member = decision.member
    if decision.token is not None:
        yield TokenUsed(now, decision.token)
    if ledger.member_index.members.get(member.id) != member:
        yield MemberAccepted(now, member) if decision.is_accepted else JoinRequested(now, member)
    if certificate is not None:
        known = ledger.member_index.members[member.id]
        yield CertificateIssued(
            now, known.with_certificate(certificate, _advertised_until(ledger, known))
        )
    return ledger.member_index.members[member.id]


def accept_member(
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
    found = ledger.member_index.member(role, name)
    if key and key != (found.asks or found.key):
        raise Conflict(
            f"another key has requested to join as {role} {name}",
            hint="compare the keys with `kubelend get members`",
        )
    if _replaces_key(found) and not keep_old:
        gone = found.as_revoked("another key was accepted", by, now)
        yield MemberRevoked(now, gone)
        found = replace(gone, asks=found.asks)
    if found.asks or not found.was_admitted:
        yield MemberAccepted(now, _accepted_member(found, by, now))
        yield from _uncordon_revoked(ledger, role, name, now)
    return ledger.member_index.member(role, name)


def reject_join(ledger: Ledger, role: Role, name: str, now: datetime) -> Command[None]:
    """Rejects a join request. An existing membership is unchanged."""
    found = ledger.member_index.member(role, name)
    if not found.asks:
        raise Conflict(
            f"{role} {name} has no pending join request",
            hint="to deny access, use `kubelend revoke`",
        )
    if found.standing is MembershipStatus.PENDING:
        yield MemberRemoved(now, found.id)
    else:
        yield JoinRejected(now, replace(found, asks=""))


def check_certificate_renewal(ledger: Ledger, role: Role, name: str) -> Member | None:
    """The member that renews its certificate, if it has a record; raises `Revoked`."""
    found = ledger.member_index.members.get(member_id(role, name))
    if found is not None and found.standing is MembershipStatus.REVOKED:
        raise Revoked(f"{role} {name} is revoked", hint="join again with a token")
    return found


def issue_certificate(
    ledger: Ledger,
    holder: Applicant,
    certificate: Certificate,
    now: datetime,
    shown_until: datetime | None = None,
) -> Command[Member]:
    """Records a renewed certificate for the holder of a valid one, which expires at `shown_until`."""
    found = check_certificate_renewal(ledger, holder.role, holder.name)
    if found is None or found.standing is MembershipStatus.PENDING:
        waiting = "" if found is None else found.asks
        found = Member(
            holder.role,
            holder.name,
            MembershipStatus.ACCEPTED,
            now,
            asks=waiting,
            token=None if found is None else found.token,
            decided_at=now,
            decided_by=BY_CERTIFICATE,
        )
    yield CertificateIssued(
        now, replace(found, key=holder.key).with_certificate(certificate, shown_until)
    )
    return ledger.member_index.members[found.id]


def _check_token_scope(token: Token, applicant: Applicant) -> None:
    if token.role is not applicant.role:
        raise TokenRefused(
            f"the token is for role {token.role}, not for role {applicant.role}",
            hint=f"join with --role {token.role}, or ask for another token",
        )
    if token.name not in {"", applicant.name}:
        raise TokenRefused(
            f"the token is bound to {token.name!r}",
            hint="join with that name, or ask for another token",
        )


def _check_token_usable(token: Token, now: datetime) -> None:
    if token.expires_at <= now:
        raise TokenRefused(
            f"the token expired at {token.expires_at:%Y-%m-%dT%H:%M:%SZ}",
            hint="ask an administrator for a new token",
        )
    if token.uses_left <= 0:
        raise TokenRefused(
            "the token has no uses left", hint="ask an administrator for a new token"
        )


def _has_applied(known: Member, key: str) -> bool:
    return known.asks == key or known.is_accepted_with_key(key)


def _decide_known_member(
    known: Member, applicant: Applicant, used: Token, now: datetime
) -> JoinDecision:
    if known.is_accepted_with_key(applicant.key):
        return JoinDecision(replace(known, token=used.id), used, True)
    if known.asks not in {"", applicant.key}:
        raise Conflict(
            f"another key has already requested to join as {known.role} {known.name}",
            hint="an administrator has to decide first: `kubelend approve` or `reject`",
        )
    asking = replace(known, asks=applicant.key, asked_at=now, token=used.id)
    return JoinDecision(asking, used, False)


def _is_unknown_cluster(ledger: Ledger, cluster: ClusterId) -> bool:
    """False also for a cluster that never joined but uses a certificate from another CA."""
    return cluster not in ledger.clusters and next(ledger.by_cluster(cluster), None) is None


def _is_auto_accepted(applicant: Applicant, join_policy: JoinPolicy) -> bool:
    return applicant.role is Role.CLUSTER and _matches_patterns(
        applicant.name, join_policy.auto_accept
    )


def _matches_patterns(name: str, patterns: tuple[str, ...]) -> bool:
    # Exact names first: a name may contain brackets.
    return name in patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def _new_member(applicant: Applicant, token: Token, now: datetime, *, at_once: bool) -> Member:
    if not at_once:
        return Member(
            applicant.role,
            applicant.name,
            MembershipStatus.PENDING,
            now,
            asks=applicant.key,
            token=token.id,
        )
    return Member(
        applicant.role,
        applicant.name,
        MembershipStatus.ACCEPTED,
        now,
        key=applicant.key,
        token=token.id,
        decided_at=now,
        decided_by=token.created_by,
    )


def _replaces_key(found: Member) -> bool:
    return found.standing is MembershipStatus.ACCEPTED and found.asks not in {"", found.key}


def _advertised_until(ledger: Ledger, member: Member) -> datetime | None:
    """Expiry of the certificate with which a cluster advertised, which may be from another CA."""
    found = ledger.clusters.get(ClusterId(member.name)) if member.role is Role.CLUSTER else None
    return None if found is None else found.certificate_until


def _accepted_member(found: Member, by: str, now: datetime) -> Member:
    # The previous key of a revoked member is not accepted again.
    is_in = found.standing is MembershipStatus.ACCEPTED
    return replace(
        found,
        standing=MembershipStatus.ACCEPTED,
        key=found.asks or (found.key if is_in else ""),
        asks="",
        decided_at=now,
        decided_by=by,
        reason="",
        forget_at=None,
    )


def _uncordon_revoked(ledger: Ledger, role: Role, name: str, now: datetime) -> Command[None]:
    """Uncordons a cluster that was cordoned only because of its revocation."""
    found = ledger.clusters.get(ClusterId(name)) if role is Role.CLUSTER else None
    if found is not None and (found.cordon or "").startswith(REVOKED_CORDON_PREFIX):
        yield Uncordoned(now, found.id)
