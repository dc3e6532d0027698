"""Enrolment: join tokens, decisions on join requests, certificates, revocation and removal.
Commands as in `commands`.

An applicant presents a token and the public key to be certified. A repeated request with the same
token and key is a retry and costs no second use: the response was lost, or the applicant waits for
approval. A token alone never assigns an existing name to another key.
"""

from __future__ import annotations

import hmac
from datetime import datetime, timedelta
from typing import NamedTuple

from msgspec.structs import replace

from kubelend.core import commands, lending
from kubelend.core.commands import Command
from kubelend.core.errors import Conflict, Forbidden, NotFound, Revoked, TokenRefused
from kubelend.core.events import (
    CertificateIssued,
    Cordoned,
    JoinDenied,
    JoinRequested,
    MemberApproved,
    MemberRemoved,
    MemberRevoked,
    Released,
    TokenCreated,
    TokenRemoved,
    TokenUsed,
    Uncordoned,
)
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import FINAL, Phase, Reason, Role
from kubelend.core.members import (
    BY_CERTIFICATE,
    Certificate,
    Member,
    MemberId,
    MembershipStatus,
    Token,
    TokenId,
    member_id,
)
from kubelend.core.models import ClusterId, Record, ReservationId

JOINABLE_ROLES = (Role.CLUSTER, Role.VIEWER, Role.ADMIN)
"""Roles that can join with a token. A proxy acts for everyone: only the CA issues its certificate."""

MAX_TOKENS = 1000
MIN_TOKEN_TTL, MAX_TOKEN_TTL = timedelta(seconds=1), timedelta(days=30)

REVOKED_CORDON_PREFIX = "revoked"
"""Prefix of the cordon reason of a revoked cluster."""

_NO_DIGEST = "0" * 64
"""Compared instead of the digest of an unknown token, so that the check takes constant time."""


class JoinPolicy(Record, frozen=True):
    """Which clusters may join, by patterns such as `edge-*`. Users need tokens bound to their names."""

    allow: tuple[str, ...] = ("*",)
    """Names that may join."""
    auto_approve: tuple[str, ...] = ()
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
    is_approved: bool
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
    stored = _NO_DIGEST if found is None else found.digest
    if not hmac.compare_digest(stored.encode(), digest.encode()) or found is None:
        raise TokenRefused(
            "unknown token or wrong secret", hint="ask an administrator for a new token"
        )
    return found


def check_join_allowed(role: Role, name: str, join_policy: JoinPolicy) -> None:
    """Raises `Forbidden` for a cluster whose name may not join."""
    if role is Role.CLUSTER and not lending.matches_any(name, join_policy.allow):
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
    is_approved = known is not None and known.is_approved_with_key(applicant.key)
    if (
        known is not None
        and known.token == token.id
        and (is_approved or known.pending_key == applicant.key)
    ):
        return JoinDecision(known, None, is_approved)
    _check_token_usable(token, now)
    used = replace(token, uses_left=token.uses_left - 1)
    if known is not None:
        return _decide_known_member(known, applicant, used, now)
    is_cluster = applicant.role is Role.CLUSTER
    is_new = not is_cluster or not _is_known_cluster(ledger, applicant.name)
    is_expected = is_cluster and lending.matches_any(applicant.name, join_policy.auto_approve)
    at_once = is_new and (bool(token.name) or is_expected)
    return JoinDecision(_new_member(applicant, token, now, at_once=at_once), used, at_once)


def join_member(
    ledger: Ledger, decision: JoinDecision, certificate: Certificate | None, now: datetime
) -> Command[Member]:
    """Records a join decision, with the certificate if the applicant is accepted."""
    member = decision.member
    if decision.token is not None:
        yield TokenUsed(now, decision.token)
    if ledger.member_index.members.get(member.id) != member:
        yield MemberApproved(now, member) if decision.is_approved else JoinRequested(now, member)
    if certificate is not None:
        known = ledger.member_index.members[member.id]
        yield CertificateIssued(
            now, known.with_certificate(certificate, _advertised_until(ledger, known))
        )
    return ledger.member_index.members[member.id]


def approve_member(
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
    if key and key != (found.pending_key or found.key):
        raise Conflict(
            f"another key has requested to join as {role} {name}",
            hint="compare the keys with `kubelend get members`",
        )
    is_in = found.status is MembershipStatus.APPROVED
    if is_in and found.pending_key not in {"", found.key} and not keep_old:
        gone = found.as_revoked("another key was accepted", by, now)
        yield MemberRevoked(now, gone)
        found = replace(gone, pending_key=found.pending_key)
    if found.pending_key or not found.was_admitted:
        yield MemberApproved(now, _approved_member(found, by, now))
        yield from _uncordon_revoked(ledger, role, name, now)
    return ledger.member_index.member(role, name)


def deny_join(ledger: Ledger, role: Role, name: str, now: datetime) -> Command[None]:
    """Rejects a join request. An existing membership is unchanged."""
    found = ledger.member_index.member(role, name)
    if not found.pending_key:
        raise NotFound(
            f"{role} {name} has no pending join request",
            hint="to deny access, use `kubelend revoke`",
        )
    if found.status is MembershipStatus.PENDING:
        yield MemberRemoved(now, found.id)
    else:
        yield JoinDenied(now, replace(found, pending_key=""))


def check_certificate_renewal(ledger: Ledger, role: Role, name: str) -> Member | None:
    """The member that renews its certificate, if it has a record; raises `Revoked`."""
    found = ledger.member_index.members.get(member_id(role, name))
    if found is not None and found.status is MembershipStatus.REVOKED:
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
    if found is None or found.status is MembershipStatus.PENDING:
        waiting = "" if found is None else found.pending_key
        found = Member(
            holder.role,
            holder.name,
            MembershipStatus.APPROVED,
            now,
            pending_key=waiting,
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


def _decide_known_member(
    known: Member, applicant: Applicant, used: Token, now: datetime
) -> JoinDecision:
    if known.is_approved_with_key(applicant.key):
        return JoinDecision(replace(known, token=used.id), used, True)
    if known.pending_key not in {"", applicant.key}:
        raise Conflict(
            f"another key has already requested to join as {known.role} {known.name}",
            hint="an administrator has to decide first: `kubelend approve` or `deny`",
        )
    asking = replace(known, pending_key=applicant.key, requested_at=now, token=used.id)
    return JoinDecision(asking, used, False)


def _is_known_cluster(ledger: Ledger, name: str) -> bool:
    """True also for a cluster that never joined but uses a certificate from another CA."""
    cluster = ClusterId(name)
    return cluster in ledger.clusters or next(ledger.by_cluster(cluster), None) is not None


def _new_member(applicant: Applicant, token: Token, now: datetime, *, at_once: bool) -> Member:
    role, name, key = applicant.role, applicant.name, applicant.key
    member = Member(role, name, MembershipStatus.PENDING, now, pending_key=key, token=token.id)
    return _approved_member(member, token.created_by, now) if at_once else member


def _advertised_until(ledger: Ledger, member: Member) -> datetime | None:
    """Expiry of the certificate with which a cluster advertised, which may be from another CA."""
    found = ledger.clusters.get(ClusterId(member.name)) if member.role is Role.CLUSTER else None
    return None if found is None else found.certificate_until


def _approved_member(found: Member, by: str, now: datetime) -> Member:
    # The previous key of a revoked member is not accepted again.
    is_in = found.status is MembershipStatus.APPROVED
    return replace(
        found,
        status=MembershipStatus.APPROVED,
        key=found.pending_key or (found.key if is_in else ""),
        pending_key="",
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


EXPIRED_TOKEN_RETENTION = timedelta(days=1)
"""How long an expired token is listed, and a lost join response can be requested again with it."""


class Revocation(NamedTuple):
    """Result of a revocation."""

    member: Member
    was_known: bool
    """Whether the name was known; if not, it may be a typing error."""
    released: list[ReservationId]
    """Released reservations of the member as a requester."""
    drained: list[ReservationId]
    """Reservations on the member as a provider: moved or released."""
    admin_actions: AdminActions


class Removal(NamedTuple):
    """Result of a removal."""

    member: Member | None
    """The remaining record, which keeps its certificates rejected; None if none is needed."""
    admin_actions: AdminActions


class AdminActions(NamedTuple):
    """Tokens and members that a revoked or removed administrator created: possible ways back in."""

    tokens: tuple[TokenId, ...] = ()
    """Tokens it created; deleted."""
    members: tuple[MemberId, ...] = ()
    """Members it approved, by a token or by name. They stay and should be reviewed."""


def revoke_member(
    ledger: Ledger,
    role: Role,
    name: str,
    *,
    reason: str,
    by: str,
    release: bool,
    now: datetime,
) -> Command[Revocation]:
    """Rejects all certificates of a member, and prevents new placements from and on it.

    With `release`, what it borrowed is released and what it lends is moved; otherwise both stay
    until they end. Waiting requests are released in any case.
    """
    known = ledger.member_index.members.get(member_id(role, name))
    was_known = known is not None or (role is Role.CLUSTER and _is_known_cluster(ledger, name))
    # A removed member is revoked only until `forget_at`.
    is_revoked = known is not None and known.status is MembershipStatus.REVOKED
    if known is None or not is_revoked or known.forget_at is not None or known.pending_key:
        before = known or Member(role, name, MembershipStatus.REVOKED, now)
        yield MemberRevoked(now, before.as_revoked(reason, by, now))
    admin_actions = yield from _delete_tokens_of(ledger, role, name, now)
    released: list[ReservationId] = []
    drained: list[ReservationId] = []
    if role is Role.CLUSTER:
        released = yield from _release_borrowed(
            ledger, ClusterId(name), now, waiting_only=not release
        )
        drained = yield from _cordon_revoked(ledger, ClusterId(name), reason, now, drain=release)
    return Revocation(
        ledger.member_index.member(role, name), was_known, released, drained, admin_actions
    )


def remove_member(
    ledger: Ledger, role: Role, name: str, by: str, now: datetime
) -> Command[Removal]:
    """Removes a member, and its cluster if it has no live reservations.

    The record of a member with certificates stays revoked until the last has expired, because
    without a record they would be accepted again. The record of a member that was ever revoked
    stays until an administrator accepts it, because its certificates are not all known.
    """
    member = ledger.member_index.members.get(member_id(role, name))
    cluster = ledger.clusters.get(ClusterId(name)) if role is Role.CLUSTER else None
    if member is None and cluster is None:
        raise NotFound(f"no {role} {name!r} exists", hint="see `kubelend get members`")
    known = () if member is None else (member.certified_until, member.forget_at)
    ends = (*known, None if cluster is None else cluster.certificate_until)
    end = max((end for end in ends if end is not None), default=None)
    if cluster is not None:
        yield from commands.remove_cluster(ledger, cluster.id, now)
    admin_actions = yield from _delete_tokens_of(ledger, role, name, now)
    if member is None:
        return Removal(None, admin_actions)
    was_revoked = member.revoked_at is not None and member.forget_at is None
    if not was_revoked and (end is None or end <= now):
        yield MemberRemoved(now, member.id)
        return Removal(None, admin_actions)
    revoked = member
    if member.status is not MembershipStatus.REVOKED:
        revoked = member.as_revoked("removed", by, now)
    forget_at = None if was_revoked else end
    yield MemberRevoked(now, replace(revoked, pending_key="", forget_at=forget_at))
    return Removal(ledger.member_index.member(role, name), admin_actions)


def collect_expired(ledger: Ledger, now: datetime) -> Command[None]:
    """Deletes expired tokens after their retention, and removed members without valid certificates."""
    awaited = {
        member.token for member in ledger.member_index.members.values() if member.pending_key
    }
    for token in list(ledger.member_index.tokens.values()):
        if token.expires_at + EXPIRED_TOKEN_RETENTION <= now and token.id not in awaited:
            yield TokenRemoved(now, TokenId(token.id))
    for member in list(ledger.member_index.members.values()):
        if member.forget_at is not None and member.forget_at <= now and not member.pending_key:
            yield MemberRemoved(now, member.id)


def _delete_tokens_of(
    ledger: Ledger, role: Role, name: str, now: datetime
) -> Command[AdminActions]:
    """Deletes the tokens of an administrator, who could otherwise join again with them."""
    if role is not Role.ADMIN:
        return AdminActions()
    members = ledger.member_index
    tokens = tuple(one.id for one in members.tokens.values() if one.created_by == name)
    for token in tokens:
        yield TokenRemoved(now, token)
    admitted = sorted(
        one.id for one in members.members.values() if one.was_admitted and one.decided_by == name
    )
    return AdminActions(tokens, tuple(admitted))


def _release_borrowed(
    ledger: Ledger, cluster: ClusterId, now: datetime, *, waiting_only: bool
) -> Command[list[ReservationId]]:
    found = [
        one
        for one in ledger.by_cluster(cluster)
        if one.requester == cluster
        and (one.phase is Phase.PENDING if waiting_only else one.phase not in FINAL)
    ]
    for one in found:
        yield Released(now, one.id, Reason.BY_ADMIN, f"Requester {cluster} was revoked")
    return [one.id for one in found]


def _cordon_revoked(
    ledger: Ledger, cluster: ClusterId, reason: str, now: datetime, *, drain: bool
) -> Command[list[ReservationId]]:
    """Keeps an administrator's own cordon reason, which also outlasts a re-acceptance."""
    found = ledger.clusters.get(cluster)
    if found is None:
        return []
    text = found.cordon or REVOKED_CORDON_PREFIX + (f": {reason}" if reason else "")
    if drain:
        return (yield from commands.drain(ledger, cluster, text, now))
    if found.cordon is None:
        yield Cordoned(now, cluster, text)
    return []
