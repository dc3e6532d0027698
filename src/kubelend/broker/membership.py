"""Use cases of membership: tokens, joining, renewal, approval, revocation and removal.

A certificate is signed after the decision and before its events, without an `await` in between: what cannot
be signed changes nothing, and a signed certificate is handed out only after its commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import islice
from typing import NamedTuple

from kubelend.broker.ports import CertificateAuthority, Issued, SigningRequest
from kubelend.broker.writer import LedgerWriter
from kubelend.core import enrolment
from kubelend.core.commands import Command
from kubelend.core.enrolment import Applicant, JoinPolicy, Removal, Revocation
from kubelend.core.errors import Conflict, Forbidden, InvalidInput
from kubelend.core.ledger import Ledger
from kubelend.core.lifecycle import Role
from kubelend.core.members import (
    BY_CERTIFICATE,
    Member,
    MemberId,
    MembershipStatus,
    Token,
    TokenId,
)


class PresentedCertificate(NamedTuple):
    """The certificate with which a member requests its renewal."""

    lifetime: timedelta
    expires_at: datetime


class Membership:
    """Manages members. Without a certificate authority none can join, but any can be revoked."""

    def __init__(
        self, writer: LedgerWriter, authority: CertificateAuthority | None, join_policy: JoinPolicy
    ) -> None:
        self._writer = writer
        self._authority = authority
        self._join_policy = join_policy
        self.enrol_port = 0
        """Port of the enrolment listener; 0 if there is none."""
        self.api_port = 0
        """Port of the REST API."""

    @property
    def authority(self) -> CertificateAuthority:
        if self._authority is None:
            raise Conflict(
                "this broker issues no certificates",
                hint="start it with --ca-path, or issue elsewhere",
            )
        return self._authority

    # -- tokens

    async def create_token(self, token: Token) -> Token:
        _ = self.authority
        return await self._writer.execute(
            lambda ledger, now: enrolment.create_token(ledger, token, self._join_policy, now)
        )

    async def delete_token(self, token: TokenId) -> None:
        await self._writer.execute(lambda ledger, now: enrolment.delete_token(ledger, token, now))

    async def tokens(self) -> list[Token]:
        """Returns all tokens, oldest first."""
        known = await self._writer.read(lambda ledger: list(ledger.member_index.tokens.values()))
        return sorted(known, key=lambda token: token.created_at)

    # -- joining and renewal

    async def join(
        self, token: TokenId, digest: str, role: Role | None, name: str, csr: str
    ) -> Issued | Member:
        """Returns a certificate, or the member that waits for approval."""
        authority = self.authority

        def command(ledger: Ledger, now: datetime) -> Command[Issued | Member]:
            # The token first: without a valid one, no signature is checked.
            shown = enrolment.check_token(ledger, token, digest)
            applicant = authority.parse_csr(csr)
            _check_csr_identity(applicant, role, name)
            decision = enrolment.decide_join(
                ledger, _join_applicant(applicant), shown, self._join_policy, now
            )
            if not decision.is_approved:
                return (yield from enrolment.join_member(ledger, decision, None, now))
            issued = authority.issue(applicant, now, decision.member.revoked_at)
            yield from enrolment.join_member(ledger, decision, issued.certificate, now)
            return issued

        answer = await self._writer.execute(command)
        return await self._wait_until_valid(answer) if isinstance(answer, Issued) else answer

    async def renew(
        self, role: Role, name: str, csr: str, presented: PresentedCertificate
    ) -> Issued:
        """Renews a certificate for the same name and role.

        A member that did not join here gets the lifetime of the presented certificate at most, because its
        issuer chose that.
        """
        authority = self.authority

        def command(ledger: Ledger, now: datetime) -> Command[Issued]:
            applicant = authority.parse_csr(csr)
            if (applicant.role, applicant.name) != (role, name):
                raise Forbidden(
                    f"the request is for {applicant.role} {applicant.name!r}, not for {role} {name!r}",
                    hint="ask for a certificate in your own name",
                )
            known = enrolment.check_certificate_renewal(ledger, role, name)
            not_before = None if known is None else known.revoked_at
            longest = None if known is not None and known.was_admitted else presented.lifetime
            issued = authority.issue(applicant, now, not_before, longest)
            holder = _join_applicant(applicant)
            yield from enrolment.issue_certificate(
                ledger, holder, issued.certificate, now, presented.expires_at
            )
            return issued

        return await self._wait_until_valid(await self._writer.execute(command))

    # -- administrators

    async def approve(
        self, role: Role, name: str, key: str, by: str, *, keep_old: bool = False
    ) -> Member:
        return await self._writer.execute(
            lambda ledger, now: enrolment.approve_member(
                ledger, role, name, key, by, now, keep_old=keep_old
            )
        )

    async def deny(self, role: Role, name: str) -> None:
        await self._writer.execute(lambda ledger, now: enrolment.deny_join(ledger, role, name, now))

    async def revoke(
        self, role: Role, name: str, *, reason: str, by: str, release: bool
    ) -> Revocation:
        return await self._writer.execute(
            lambda ledger, now: enrolment.revoke_member(
                ledger, role, name, reason=reason, by=by, release=release, now=now
            )
        )

    async def remove(self, role: Role, name: str, by: str) -> Removal:
        return await self._writer.execute(
            lambda ledger, now: enrolment.remove_member(ledger, role, name, by, now)
        )

    async def members(
        self,
        after: MemberId,
        limit: int,
        status: MembershipStatus | None = None,
        *,
        outdated: bool = False,
    ) -> list[Member]:
        """Returns a page, ordered by role and name; of one membership status, or all.

        With `outdated`, only those that have not renewed since a step of a CA rotation.
        """

        def page(ledger: Ledger) -> list[Member]:
            known = [*ledger.member_index.members.values()]
            if outdated:
                known = [
                    one for one in (*known, *_unknown_members(ledger)) if self._is_outdated(one)
                ]
            later = (one for one in known if one.id > after)
            wanted = (one for one in later if status in {None, one.status})
            return list(islice(sorted(wanted, key=lambda one: one.id), limit))

        return await self._writer.read(page)

    def _is_outdated(self, member: Member) -> bool:
        if member.status is not MembershipStatus.APPROVED:
            return False
        if (
            member.certificate is None
        ):  # from elsewhere, or the member has not fetched its first one
            return not member.was_admitted
        return not self.authority.is_current(member.certificate)

    async def _wait_until_valid(self, issued: Issued) -> Issued:
        """Waits until the certificate is valid: after a revocation it starts with the next second."""
        early = (issued.not_before - self._writer.clock()).total_seconds()
        if early > 0:
            await asyncio.sleep(min(early, 1.0))
        return issued


def _unknown_members(ledger: Ledger) -> Iterator[Member]:
    """Yields the clusters that advertise with a certificate which the broker has not issued."""
    for cluster in ledger.clusters.values():
        member = Member(
            Role.CLUSTER,
            cluster.id,
            MembershipStatus.APPROVED,
            cluster.received_at,
            decided_by=BY_CERTIFICATE,
        )
        if member.id not in ledger.member_index.members:
            yield member


def _join_applicant(applicant: SigningRequest) -> Applicant:
    return Applicant(applicant.role, applicant.name, applicant.key)


def _check_csr_identity(applicant: SigningRequest, role: Role | None, name: str) -> None:
    if (applicant.role, applicant.name) != (role or applicant.role, name):
        raise InvalidInput(
            f"the certificate request is for {applicant.role} {applicant.name!r}",
            hint="use the same name and role in both",
        )
