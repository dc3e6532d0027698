"""Index of members and tokens.

The API checks on every call whether a certificate is revoked, which is a single dictionary lookup.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime

from msgspec.structs import replace

from kubelend.core.errors import NotFound, Revoked
from kubelend.core.events import (
    Change,
    MemberChanged,
    MemberRemoved,
    MembershipEvent,
    RecordDeleted,
    TokenChanged,
    TokenRemoved,
)
from kubelend.core.members import Member, MemberId, MembershipStatus, Token, TokenId, member_id
from kubelend.core.roles import Role


class MemberIndex:
    """Members and tokens by ID."""

    def __init__(self, members: Iterable[Member] = (), tokens: Iterable[Token] = ()) -> None:
        self._members = {member.id: member for member in members}
        self._tokens = {token.id: token for token in tokens}

    @property
    def members(self) -> Mapping[MemberId, Member]:
        return self._members

    @property
    def tokens(self) -> Mapping[TokenId, Token]:
        return self._tokens

    def member(self, role: Role, name: str) -> Member:
        found = self._members.get(member_id(role, name))
        if found is None:
            raise NotFound(f"no {role} {name!r} has joined", hint="see `kubelend get members`")
        return found

    def check_not_revoked(self, role: Role, name: str, not_before: datetime) -> None:
        """Raises `Revoked` for a certificate of a revoked member, or one issued before the revocation."""
        found = self._members.get(member_id(role, name))
        if found is None or found.revoked_at is None:
            return
        if found.standing is MembershipStatus.REVOKED or not_before < found.revoked_at:
            raise Revoked(
                f"the certificate of {role} {name} was revoked at {found.revoked_at:%Y-%m-%dT%H:%M:%SZ}",
                hint="join again with a token from an administrator",
            )

    def apply(self, event: MembershipEvent, revision: int) -> Change:
        match event:
            case MemberChanged():
                member = replace(event.member, revision=revision)
                self._members[member.id] = member
                return member
            case MemberRemoved():
                del self._members[event.member]
                return RecordDeleted("member", event.member)
            case TokenChanged():
                token = replace(event.token, revision=revision)
                self._tokens[token.id] = token
                return token
            case TokenRemoved():
                del self._tokens[event.token]
                return RecordDeleted("token", event.token)
        raise TypeError(f"not a membership event: {type(event).__name__}")

    def apply_change(self, change: Member | Token | RecordDeleted) -> None:
        """Applies a replicated change."""
        match change:
            case Member():
                self._members[change.id] = change
            case Token():
                self._tokens[change.id] = change
            case RecordDeleted(kind="member"):
                self._members.pop(MemberId(change.id), None)
            case RecordDeleted():
                self._tokens.pop(TokenId(change.id), None)

    def record_before(self, event: MembershipEvent) -> Member | Token | None:
        """The record that the event will change; None if it is new."""
        match event:
            case MemberChanged():
                return self._members.get(event.member.id)
            case MemberRemoved():
                return self._members.get(event.member)
            case TokenChanged():
                return self._tokens.get(event.token.id)
            case TokenRemoved():
                return self._tokens.get(event.token)
        raise TypeError(f"not a membership event: {type(event).__name__}")
