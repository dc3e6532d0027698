"""Joining, renewing and being put out, as use cases: each is a command or a question for the single writer.

A certificate is signed between a judgement and its events, in one stretch: what cannot be signed has
changed nothing, and what was signed is handed out only when it is written down.
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
    """The certificate with which somebody asks for a newer one."""

    life: timedelta
    until: datetime


class Membership:
    """Who belongs. Without an authority nobody can join, but everybody can be put out."""

    def __init__(self, writer: Writer, authority: CertificateAuthority | None, door: Door) -> None:
        self._writer = writer
        self._authority = authority
        self._door = door
        self.enrol_port = 0
        """Where newcomers are let in; 0 if nowhere."""
        self.api_port = 0
        """Where they call once they are in."""

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
        """All of them, the oldest first."""
        return await self._writer.read(
            lambda ledger: sorted(ledger.registry.tokens.values(), key=lambda one: one.created_at)
        )

    # -- newcomers and holders

    async def join(
        self, token: TokenId, digest: str, role: Role | None, name: str, request: str
    ) -> Issued | Member:
        """A certificate, or the member that waits for an administrator."""
        authority = self.authority

        def command(ledger: Ledger, now: datetime) -> Command[Issued | Member]:
            # The token first: without one, nobody makes us check signatures.
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
        """A newer certificate for who has shown one; in the same name, whatever the request says.

        Whom nobody let in here gets none that lives longer: who issued the older one chose its life.
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
        """A page in the order of roles and names; those of one standing, or all."""

        def page(ledger: Ledger) -> list[Member]:
            later = (one for one in ledger.registry.members.values() if one.id > after)
            wanted = (one for one in later if standing in {None, one.standing})
            return list(islice(sorted(wanted, key=lambda one: one.id), limit))

        return await self._writer.read(page)

    async def _once_valid(self, issued: Issued) -> Issued:
        """After a return it may start with the next second: its holder would be refused until then."""
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
            hint="name the same in both",
        )
