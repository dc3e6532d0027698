"""How somebody is put out, and what becomes of what it lends and borrows; commands as in `commands`."""

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
from kubelend.core.members import Member, MemberId, Standing, TokenId, member_id
from kubelend.core.models import ClusterId, Reservation, ReservationId
from kubelend.core.roles import Role

LISTED_FOR = timedelta(days=1)
"""How long a token is shown as expired, and a lost answer can be asked for again with it."""


class Revocation(NamedTuple):
    """What a revocation did."""

    member: Member
    was_known: bool
    """Whether anybody of that name has been seen; if not, it may be a slip of the pen."""
    released: list[ReservationId]
    """What it had asked for."""
    drained: list[ReservationId]
    """What it lent: moved to others, or released."""
    legacy: Legacy


class Removal(NamedTuple):
    """What is left of who was removed."""

    member: Member | None
    """The record that stays, so that its certificates are refused; None if there is none."""
    legacy: Legacy


class Legacy(NamedTuple):
    """What an administrator leaves behind: ways in for others, or for itself by another name."""

    tokens: tuple[TokenId, ...] = ()
    """That it had made. They are gone."""
    members: tuple[MemberId, ...] = ()
    """That it let in, by a token or by name. They stay: somebody has to look at them."""


def revoke(
    ledger: Ledger,
    role: Role,
    name: str,
    *,
    why: str,
    by: str,
    release: bool,
    now: datetime,
) -> Command[Revocation]:
    """Believe none of its certificates any more, and let nothing new come of it.

    With `release` what it has borrowed is given back and what it lends moves to others; without, both
    stay until they end. What still waits ends in any case: it would be something new.
    """
    known = ledger.registry.members.get(member_id(role, name))
    was_known = known is not None or (role is Role.CLUSTER and _is_heard_of(ledger, name))
    if known is None or not _is_put_out(known) or known.asks:
        before = known or Member(role, name, Standing.REVOKED, now)
        yield MemberRevoked(now, before.revoked(why, by, now))
    legacy = yield from _end_tokens(ledger, role, name, now)
    released: list[ReservationId] = []
    drained: list[ReservationId] = []
    if role is Role.CLUSTER:
        released = yield from _give_back(ledger, ClusterId(name), now, waiting_only=not release)
        drained = yield from _close(ledger, ClusterId(name), why, now, drain=release)
    return Revocation(ledger.registry.member(role, name), was_known, released, drained, legacy)


def remove(ledger: Ledger, role: Role, name: str, by: str, now: datetime) -> Command[Removal]:
    """Forget a member, and its cluster if it lends nothing.

    The record of one that has certificates stays until the last has ended: without it they would be
    believed again. Of one that was ever revoked it stays for good, until an administrator accepts it:
    nobody knows what else it holds.
    """
    member = ledger.registry.members.get(member_id(role, name))
    cluster = ledger.clusters.get(ClusterId(name)) if role is Role.CLUSTER else None
    if member is None and cluster is None:
        raise NotFound(f"no {role} {name!r} is known", hint="see `kubelend get members`")
    end = _last_end(member, None if cluster is None else cluster.certificate_until)
    if cluster is not None:
        yield from commands.remove(ledger, cluster.id, now)
    legacy = yield from _end_tokens(ledger, role, name, now)
    if member is None:
        return Removal(None, legacy)
    was_revoked = member.revoked_at is not None and member.forget_at is None
    if not was_revoked and (end is None or end <= now):
        yield MemberRemoved(now, member.id)
        return Removal(None, legacy)
    revoked = member
    if member.standing is not Standing.REVOKED:
        revoked = member.revoked("removed", by, now)
    forget_at = None if was_revoked else end
    yield MemberRevoked(now, replace(revoked, asks="", forget_at=forget_at))
    return Removal(ledger.registry.member(role, name), legacy)


def sweep(ledger: Ledger, now: datetime) -> Command[None]:
    """Drop tokens that are long over, and members that were removed and can come back with nothing."""
    awaited = {member.token for member in ledger.registry.members.values() if member.asks}
    for token in list(ledger.registry.tokens.values()):
        if token.expires_at + LISTED_FOR <= now and token.id not in awaited:
            yield TokenRemoved(now, TokenId(token.id))
    for member in list(ledger.registry.members.values()):
        if member.forget_at is not None and member.forget_at <= now and not member.asks:
            yield MemberRemoved(now, member.id)


def _is_put_out(member: Member) -> bool:
    """Revoked for good; one that was only removed is to be forgotten some time."""
    return member.standing is Standing.REVOKED and member.forget_at is None


def _end_tokens(ledger: Ledger, role: Role, name: str, now: datetime) -> Command[Legacy]:
    """Or who was put out would come back with a token that it made before."""
    if role is not Role.ADMIN:
        return Legacy()
    registry = ledger.registry
    tokens = tuple(one.id for one in registry.tokens.values() if one.created_by == name)
    for token in tokens:
        yield TokenRemoved(now, token)
    let_in = sorted(one.id for one in registry.members.values() if one.was_let_in_by(name))
    return Legacy(tokens, tuple(let_in))


def _is_heard_of(ledger: Ledger, name: str) -> bool:
    cluster = ClusterId(name)
    return cluster in ledger.clusters or next(ledger.touching(cluster), None) is not None


def _give_back(
    ledger: Ledger, cluster: ClusterId, now: datetime, *, waiting_only: bool
) -> Command[list[ReservationId]]:
    found = [
        one
        for one in ledger.touching(cluster)
        if one.requester == cluster and _is_to_end(one, waiting_only=waiting_only)
    ]
    for one in found:
        yield Released(now, one.id, Reason.BY_ADMIN, f"Requester {cluster} was revoked")
    return [one.id for one in found]


def _is_to_end(found: Reservation, *, waiting_only: bool) -> bool:
    return found.phase is Phase.PENDING if waiting_only else found.phase not in FINAL


def _close(
    ledger: Ledger, cluster: ClusterId, why: str, now: datetime, *, drain: bool
) -> Command[list[ReservationId]]:
    """An administrator's own reason to cordon it stays, and outlives a return."""
    found = ledger.clusters.get(cluster)
    if found is None:
        return []
    text = found.cordon or (f"{enrolment.REVOKED}: {why}" if why else enrolment.REVOKED)
    if drain:
        return (yield from commands.drain(ledger, cluster, text, now))
    if found.cordon is None:
        yield Cordoned(now, cluster, text)
    return []


def _last_end(member: Member | None, advertised: datetime | None) -> datetime | None:
    known = () if member is None else (member.certified_until, member.forget_at)
    return max((end for end in (*known, advertised) if end is not None), default=None)
