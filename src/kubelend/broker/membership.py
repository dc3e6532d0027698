"""Use cases of membership: tokens, joining, renewal, approval, revocation and removal.

A certificate is signed after the decision and before its events, without an `await` in between: what cannot
be signed changes nothing, and a signed certificate is handed out only after its commit.
"""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from itertools import islice
from typing import NamedTuple

from kubelend.broker.ports import Applicant, CertificateAuthority, Issued
from kubelend.broker.writer import Writer
from kubelend.core import enrolment, revocation
from kubelend.core.commands import Command
from kubelend.core.enrolment import Door, Newcomer
from kubelend.core.errors import Conflict, Forbidden, InvalidInput
from kubelend.core.ledger import Ledger
from kubelend.core.members import Member, MemberId, Standing, Token, TokenId
from kubelend.core.revocation import Removal, Revocation
from kubelend.core.roles import Role


class Shown(NamedTuple):
    """The certificate with which a member requests its renewal."""

    life: timedelta
    until: datetime


class Membership:
    """Manages members. Without a certificate authority none can join, but any can be revoked."""

    def __init__(self, writer: Writer, authority: CertificateAuthority | None, door: Door) -> None:
        self._writer = writer
        self._authority = authority
        self._door = door
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
        return await self._writer.change(
            lambda ledger, now: enrolment.create_token(ledger, token, self._door, now),
            lambda _, made: made,
        )

    async def delete_token(self, token: TokenId) -> None:
        await self._writer.change(
            lambda ledger, now: enrolment.delete_token(ledger, token, now), lambda _, none: none
        )

    async def tokens(self) -> list[Token]:
        """Returns all tokens, oldest first."""
        return await self._writer.read(
            lambda ledger: sorted(ledger.registry.tokens.values(), key=lambda one: one.created_at)
        )

    # -- joining and renewal

    async def join(
        self, token: TokenId, digest: str, role: Role | None, name: str, request: str
    ) -> Issued | Member:
        """Returns a certificate, or the member that waits for approval."""
        authority = self.authority

        def command(ledger: Ledger, now: datetime) -> Command[Issued | Member]:
            # The token first: without a valid one, no signature is checked.
            shown = enrolment.check_token(ledger, token, digest)
            applicant = authority.read(request)
            _check_claims(applicant, role, name)
            judged = enrolment.judge(ledger, _newcomer(applicant), shown, self._door, now)
            issued = None
            if judged.let_in:
                issued = authority.issue(applicant, now, judged.member.revoked_at)
            certificate = None if issued is None else issued.certificate
            member = yield from enrolment.join(ledger, judged, certificate, now)
            return issued or member

        answer = await self._writer.change(command, lambda _, answer: answer)
        return await self._once_valid(answer) if isinstance(answer, Issued) else answer

    async def renew(self, role: Role, name: str, request: str, shown: Shown) -> Issued:
        """Renews a certificate for the same name and role.

        A member that did not join here gets the lifetime of the presented certificate at most, because its
        issuer chose that.
        """
        authority = self.authority

        def command(ledger: Ledger, now: datetime) -> Command[Issued]:
            applicant = authority.read(request)
            if (applicant.role, applicant.name) != (role, name):
                raise Forbidden(
                    f"the request is for {applicant.role} {applicant.name!r}, not for {role} {name!r}",
                    hint="ask for a certificate in your own name",
                )
            known = enrolment.check_renewal(ledger, role, name)
            not_before = None if known is None else known.revoked_at
            longest = None if known is not None and known.was_let_in else shown.life
            issued = authority.issue(applicant, now, not_before, longest)
            holder = _newcomer(applicant)
            yield from enrolment.certify(ledger, holder, issued.certificate, now, shown.until)
            return issued

        return await self._once_valid(
            await self._writer.change(command, lambda _, answer: answer),
        )

    # -- administrators

    async def accept(
        self, role: Role, name: str, key: str, by: str, *, keep_old: bool = False
    ) -> Member:
        return await self._writer.change(
            lambda ledger, now: enrolment.accept(
                ledger, role, name, key, by, now, keep_old=keep_old
            ),
            lambda _, member: member,
        )

    async def reject(self, role: Role, name: str) -> None:
        await self._writer.change(
            lambda ledger, now: enrolment.reject(ledger, role, name, now), lambda _, none: none
        )

    async def revoke(
        self, role: Role, name: str, *, why: str, by: str, release: bool
    ) -> Revocation:
        return await self._writer.change(
            lambda ledger, now: revocation.revoke(
                ledger, role, name, why=why, by=by, release=release, now=now
            ),
            lambda _, done: done,
        )

    async def remove(self, role: Role, name: str, by: str) -> Removal:
        return await self._writer.change(
            lambda ledger, now: revocation.remove(ledger, role, name, by, now),
            lambda _, done: done,
        )

    async def members(
        self, after: MemberId, limit: int, standing: Standing | None = None
    ) -> list[Member]:
        """Returns a page, ordered by role and name; of one membership status, or all."""

        def page(ledger: Ledger) -> list[Member]:
            later = (one for one in ledger.registry.members.values() if one.id > after)
            wanted = (one for one in later if standing in {None, one.standing})
            return list(islice(sorted(wanted, key=lambda one: one.id), limit))

        return await self._writer.read(page)

    async def _once_valid(self, issued: Issued) -> Issued:
        """Waits until the certificate is valid: after a revocation it starts with the next second."""
        early = (issued.starts_at - self._writer.clock()).total_seconds()
        if early > 0:
            await asyncio.sleep(min(early, 1.0))
        return issued


def _newcomer(applicant: Applicant) -> Newcomer:
    return Newcomer(applicant.role, applicant.name, applicant.key)


def _check_claims(applicant: Applicant, role: Role | None, name: str) -> None:
    if (applicant.role, applicant.name) != (role or applicant.role, name):
        raise InvalidInput(
            f"the certificate request is for {applicant.role} {applicant.name!r}",
            hint="use the same name and role in both",
        )
