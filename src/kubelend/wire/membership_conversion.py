"""Conversion of members and tokens to wire bodies."""

from __future__ import annotations

from datetime import datetime

from kubelend.core import members
from kubelend.wire import membership_bodies as bodies


def from_token(token: members.Token, now: datetime) -> bodies.Token:
    return bodies.Token(
        id=token.id,
        state=_token_state(token, now),
        role=token.role.value,
        uses_left=token.uses_left,
        created_at=token.created_at,
        created_by=token.created_by,
        expires_at=token.expires_at,
        name=token.name,
    )


def from_member(member: members.Member) -> bodies.Member:
    known = member.certificate
    return bodies.Member(
        role=member.role.value,
        name=member.name,
        standing=member.standing.value,
        asked_at=member.asked_at,
        asks=member.asks,
        token=member.token or "",
        decided_at=member.decided_at,
        decided_by=member.decided_by,
        certificate=None if known is None else _from_certificate(known),
        revoked_at=member.revoked_at,
        reason=member.reason,
    )


def _token_state(token: members.Token, now: datetime) -> str:
    if token.expires_at <= now:
        return "Expired"
    return "Valid" if token.uses_left else "Used"


def _from_certificate(known: members.Certificate) -> bodies.MemberCertificate:
    return bodies.MemberCertificate(known.serial, known.issued_at, known.ends_at, known.authority)
