"""Commands that revoke and remove members, with the consequences for their reservations."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import NamedTuple

from msgspec.structs import replace

from kubelend.core import commands, enrolment
from kubelend.core.commands import Command
from kubelend.core.errors import NotFound
from kubelend.core.events import Cordoned, MemberRemoved, MemberRevoked, Released, TokenRemoved
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import FINAL, Phase, Reason
from kubelend.core.members import Member, MemberId, MembershipStatus, TokenId, member_id
from kubelend.core.models import ClusterId, Reservation, ReservationId
from kubelend.core.roles import Role

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
    left_behind: LeftBehind


class Removal(NamedTuple):
    """Result of a removal."""

    member: Member | None
    """The remaining record, which keeps its certificates rejected; None if none is needed."""
    left_behind: LeftBehind


class LeftBehind(NamedTuple):
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
    if known is None or not _is_revoked_permanently(known) or known.asks:
        before = known or Member(role, name, MembershipStatus.REVOKED, now)
        yield MemberRevoked(now, before.as_revoked(reason, by, now))
    legacy = yield from _delete_tokens_of(ledger, role, name, now)
    released: list[ReservationId] = []
    drained: list[ReservationId] = []
    if role is Role.CLUSTER:
        released = yield from _release_borrowed(
            ledger, ClusterId(name), now, waiting_only=not release
        )
        drained = yield from _cordon_revoked(ledger, ClusterId(name), reason, now, drain=release)
    return Revocation(ledger.member_index.member(role, name), was_known, released, drained, legacy)


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
    end = _last_certificate_end(member, None if cluster is None else cluster.certificate_until)
    if cluster is not None:
        yield from commands.remove_cluster(ledger, cluster.id, now)
    legacy = yield from _delete_tokens_of(ledger, role, name, now)
    if member is None:
        return Removal(None, legacy)
    was_revoked = member.revoked_at is not None and member.forget_at is None
    if not was_revoked and (end is None or end <= now):
        yield MemberRemoved(now, member.id)
        return Removal(None, legacy)
    revoked = member
    if member.standing is not MembershipStatus.REVOKED:
        revoked = member.as_revoked("removed", by, now)
    forget_at = None if was_revoked else end
    yield MemberRevoked(now, replace(revoked, asks="", forget_at=forget_at))
    return Removal(ledger.member_index.member(role, name), legacy)


def collect_expired(ledger: Ledger, now: datetime) -> Command[None]:
    """Deletes expired tokens after their retention, and removed members without valid certificates."""
    awaited = {member.token for member in ledger.member_index.members.values() if member.asks}
    for token in list(ledger.member_index.tokens.values()):
        if token.expires_at + EXPIRED_TOKEN_RETENTION <= now and token.id not in awaited:
            yield TokenRemoved(now, TokenId(token.id))
    for member in list(ledger.member_index.members.values()):
        if member.forget_at is not None and member.forget_at <= now and not member.asks:
            yield MemberRemoved(now, member.id)


def _is_revoked_permanently(member: Member) -> bool:
    """Revoked by an administrator; a removed member is deleted at `forget_at`."""
    return member.standing is MembershipStatus.REVOKED and member.forget_at is None


def _delete_tokens_of(ledger: Ledger, role: Role, name: str, now: datetime) -> Command[LeftBehind]:
    """Deletes the tokens of an administrator, who could otherwise join again with them."""
    if role is not Role.ADMIN:
        return LeftBehind()
    registry = ledger.member_index
    tokens = tuple(one.id for one in registry.tokens.values() if one.created_by == name)
    for token in tokens:
        yield TokenRemoved(now, token)
    let_in = sorted(one.id for one in registry.members.values() if one.was_admitted_by(name))
    return LeftBehind(tokens, tuple(let_in))


def _is_known_cluster(ledger: Ledger, name: str) -> bool:
    cluster = ClusterId(name)
    return cluster in ledger.clusters or next(ledger.by_cluster(cluster), None) is not None


def _release_borrowed(
    ledger: Ledger, cluster: ClusterId, now: datetime, *, waiting_only: bool
) -> Command[list[ReservationId]]:
    found = [
        one
        for one in ledger.by_cluster(cluster)
        if one.requester == cluster and _is_releasable(one, waiting_only=waiting_only)
    ]
    for one in found:
        yield Released(now, one.id, Reason.BY_ADMIN, f"Requester {cluster} was revoked")
    return [one.id for one in found]


def _is_releasable(found: Reservation, *, waiting_only: bool) -> bool:
    return found.phase is Phase.PENDING if waiting_only else found.phase not in FINAL


def _cordon_revoked(
    ledger: Ledger, cluster: ClusterId, reason: str, now: datetime, *, drain: bool
) -> Command[list[ReservationId]]:
    """Keeps an administrator's own cordon reason, which also outlasts a re-acceptance."""
    found = ledger.clusters.get(cluster)
    if found is None:
        return []
    text = found.cordon or (
        f"{enrolment.REVOKED_CORDON_PREFIX}: {reason}"
        if reason
        else enrolment.REVOKED_CORDON_PREFIX
    )
    if drain:
        return (yield from commands.drain(ledger, cluster, text, now))
    if found.cordon is None:
        yield Cordoned(now, cluster, text)
    return []


def _last_certificate_end(member: Member | None, advertised: datetime | None) -> datetime | None:
    known = () if member is None else (member.certified_until, member.forget_at)
    return max((end for end in (*known, advertised) if end is not None), default=None)
