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
from kubelend.core.members import Member, Standing, TokenId, member_id
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
    if known is None or known.standing is not Standing.REVOKED or known.asks:
        yield MemberRevoked(now, _revoked(known, role, name, why, by, now))
    released: list[ReservationId] = []
    drained: list[ReservationId] = []
    if role is Role.CLUSTER:
        released = yield from _give_back(ledger, ClusterId(name), now, waiting_only=not release)
        drained = yield from _close(ledger, ClusterId(name), why, now, drain=release)
    return Revocation(ledger.registry.member(role, name), was_known, released, drained)


def remove(ledger: Ledger, role: Role, name: str, by: str, now: datetime) -> Command[Member | None]:
    """Forget a member, and its cluster if it lends nothing.

    The record of one that has certificates stays until the last has ended: without it they would be
    believed again. It is answered then.
    """
    member = ledger.registry.members.get(member_id(role, name))
    cluster = ledger.clusters.get(ClusterId(name)) if role is Role.CLUSTER else None
    if member is None and cluster is None:
        raise NotFound(f"no {role} {name!r} is known", hint="see `kubelend get members`")
    end = _last_end(member, None if cluster is None else cluster.certificate_until)
    if cluster is not None:
        yield from commands.remove(ledger, cluster.id, now)
    if member is None:
        return None
    if _can_be_forgotten(member, end, now):
        yield MemberRemoved(now, member.id)
        return None
    revoked = member
    if member.standing is not Standing.REVOKED:
        revoked = _revoked(member, role, name, "removed", by, now)
    yield MemberRevoked(now, replace(revoked, asks="", forget_at=end))
    return ledger.registry.member(role, name)


def sweep(ledger: Ledger, now: datetime) -> Command[None]:
    """Drop tokens that are long over, and members that were removed and can come back with nothing."""
    awaited = {member.token for member in ledger.registry.members.values() if member.asks}
    for token in list(ledger.registry.tokens.values()):
        if token.expires_at + LISTED_FOR <= now and token.id not in awaited:
            yield TokenRemoved(now, TokenId(token.id))
    for member in list(ledger.registry.members.values()):
        if member.forget_at is not None and member.forget_at <= now and not member.asks:
            yield MemberRemoved(now, member.id)


def _can_be_forgotten(member: Member, end: datetime | None, now: datetime) -> bool:
    """Whether nothing is kept out by the record: it never had a certificate, or all have ended."""
    return member.revoked_at is None if end is None else end <= now


def _is_heard_of(ledger: Ledger, name: str) -> bool:
    cluster = ClusterId(name)
    return cluster in ledger.clusters or next(ledger.touching(cluster), None) is not None


def _after_all_of(member: Member, now: datetime) -> datetime:
    """Now. But after a return, certificates start on the next whole second, and that may be later."""
    newest = member.certificate
    if newest is None or member.revoked_at is None:
        return now
    return max(now, newest.issued_at + timedelta(seconds=1))


def _revoked(
    known: Member | None, role: Role, name: str, why: str, by: str, now: datetime
) -> Member:
    before = known or Member(role, name, Standing.REVOKED, now)
    return replace(
        before,
        standing=Standing.REVOKED,
        asks="",
        revoked_at=_after_all_of(before, now),
        decided_at=now,
        decided_by=by,
        reason=why,
    )


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
    issued = None if member is None else member.certified_until
    return max((end for end in (issued, advertised) if end is not None), default=None)
