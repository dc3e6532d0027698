"""Handlers of members, join tokens, certificate renewal and audit log searches."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from http import HTTPStatus

import msgspec
from aiohttp import web

from kubelend.api import request
from kubelend.api.request import JsonResponse, RequestContext, paginate
from kubelend.broker.membership import PresentedCertificate
from kubelend.core import durations
from kubelend.core.audit_log import AuditRecord
from kubelend.core.enrolment import MAX_TOKEN_TTL, MIN_TOKEN_TTL
from kubelend.core.errors import Conflict, InvalidIdentity, InvalidInput, NotFound
from kubelend.core.lifecycle import Role
from kubelend.core.members import MemberId, MembershipStatus, Token, TokenId
from kubelend.pki import identity, tokens, x509
from kubelend.wire import admin_bodies, admin_conversion, conversion, validation
from kubelend.wire.admin_bodies import Actor, AuditLine, AuditLog, TokenRequest
from kubelend.wire.admin_conversion import from_member


async def list_members(call: RequestContext) -> web.StreamResponse:
    limit, after = call.page_size(), MemberId(call.request.query.get("continue", ""))
    outdated = call.query_bool("outdated")
    found = await call.app.membership.members(
        after, limit + 1, _query_status(call), outdated=outdated
    )
    members, more = paginate(found, limit, lambda member: member.id)
    return JsonResponse(admin_bodies.MemberList([from_member(member) for member in members], more))


async def approve_member(call: RequestContext) -> web.StreamResponse:
    body = await call.body(admin_bodies.ApproveRequest, optional=True)
    role, name = _member_in_path(call)
    member = await call.app.membership.approve(
        role, name, body.key, call.caller.name, keep_old=body.keep_old
    )
    return JsonResponse(from_member(member))


async def deny_member(call: RequestContext) -> web.StreamResponse:
    await call.app.membership.deny(*_member_in_path(call))
    return web.Response(status=HTTPStatus.NO_CONTENT)


async def revoke_member(call: RequestContext) -> web.StreamResponse:
    body = await call.body(admin_bodies.RevokeRequest, optional=True)
    role, name = _other_member_in_path(call)
    reason = validation.check_plain(body.reason, "reason")
    done = await call.app.membership.revoke(
        role, name, reason=reason, by=call.caller.name, release=body.release
    )
    return JsonResponse(
        admin_bodies.Revocation(
            from_member(done.member),
            done.was_known,
            list(done.released),
            list(done.drained),
            list(done.admin_actions.tokens),
            list(done.admin_actions.members),
        )
    )


async def remove_member(call: RequestContext) -> web.StreamResponse:
    role, name = _other_member_in_path(call)
    done = await call.app.membership.remove(role, name, call.caller.name)
    return JsonResponse(
        admin_bodies.Removal(
            done.member is not None,
            None if done.member is None else done.member.forget_at,
            list(done.admin_actions.tokens),
            list(done.admin_actions.members),
        )
    )


async def renew_certificate(call: RequestContext) -> web.StreamResponse:
    """Renews the caller's own certificate; only the key of the signing request is used."""
    body = await call.body(admin_bodies.CertificateRequest)
    caller = call.caller
    if caller.since is None or caller.until is None:
        raise InvalidIdentity("the certificate has no expiry time")
    presented = PresentedCertificate(x509.min_lifetime(caller.since, caller.until), caller.until)
    issued = await call.app.membership.renew(caller.role, caller.name, body.request, presented)
    return JsonResponse(admin_bodies.IssuedCertificate(issued.chain, issued.authorities))


def _member_in_path(call: RequestContext) -> tuple[Role, str]:
    role, name = call.path_param("role"), call.path_param("name")
    if role not in list(Role):
        raise NotFound(f"unknown role {role[:24]!r}", hint=f"use one of {', '.join(Role)}")
    request.check_path_name(name, "name")
    return Role(role), name


def _other_member_in_path(call: RequestContext) -> tuple[Role, str]:
    role, name = _member_in_path(call)
    if (role, name) == (call.caller.role, call.caller.name):
        raise Conflict(
            "administrators cannot revoke or remove themselves",
            hint="ask another administrator",
        )
    return role, name


def _query_status(call: RequestContext) -> MembershipStatus | None:
    text = call.request.query.get("status")
    if text is None:
        return None
    if text not in list(MembershipStatus):
        known = ", ".join(MembershipStatus)
        raise InvalidInput(f"status: {text[:24]!r} is unknown", hint=f"use one of {known}")
    return MembershipStatus(text)


async def create_token(call: RequestContext) -> web.StreamResponse:
    body = await call.body(TokenRequest, optional=True)
    made, role, now = tokens.new_token(), Role(body.role), call.broker.clock()
    _check_token_name(body.name, role)
    record = Token(
        id=TokenId(made.id),
        digest=made.digest,
        role=role,
        created_at=now,
        created_by=call.caller.name,
        expires_at=now + _token_ttl(body.ttl),
        uses_left=body.uses,
        name=body.name,
    )
    membership = call.app.membership
    stored = await membership.create_token(record)
    authority = membership.authority
    answer = admin_bodies.NewToken(
        token=made.text,
        id=stored.id,
        role=stored.role.value,
        expires_at=stored.expires_at,
        uses=stored.uses_left,
        enrol_port=membership.enrol_port,
        ca_hash=authority.pin,
        certificate_lifetime=durations.format_duration_short(authority.lifetime),
        name=stored.name,
    )
    return JsonResponse(answer, HTTPStatus.CREATED)


async def list_tokens(call: RequestContext) -> web.StreamResponse:
    now = call.broker.clock()
    found = await call.app.membership.tokens()
    return JsonResponse(
        admin_bodies.TokenList([admin_conversion.from_token(one, now) for one in found])
    )


async def delete_token(call: RequestContext) -> web.StreamResponse:
    await call.app.membership.delete_token(TokenId(call.path_param("token")))
    return web.Response(status=HTTPStatus.NO_CONTENT)


def _token_ttl(text: str) -> timedelta:
    requested = conversion.positive_duration(text or admin_bodies.DEFAULT_TTL, "ttl")
    if requested > MAX_TOKEN_TTL:
        raise InvalidInput(
            f"ttl: {text} is more than {durations.format_duration_short(MAX_TOKEN_TTL)}",
            hint="create another token when it is needed",
        )
    if requested < MIN_TOKEN_TTL:
        raise InvalidInput(
            f"ttl: {text} is less than {durations.format_duration_short(MIN_TOKEN_TTL)}"
        )
    return requested


def _check_token_name(name: str, role: Role) -> None:
    """Rejects an invalid name when the token is created, and not when it is used."""
    try:
        if name:
            identity.client_profile(name, role)
    except InvalidIdentity as error:
        raise InvalidInput(f"name: {error.message}", hint=error.hint) from None


MAX_LINE_NUMBER = 2**63 - 1


async def audit_log(call: RequestContext) -> web.StreamResponse:
    before = call.query_int("continue", 0, MAX_LINE_NUMBER) or None
    found = await call.app.audit_log.search(_line_filter(call), before, call.page_size())
    more = "" if found.before is None else str(found.before)
    return JsonResponse(
        AuditLog([_audit_line_body(record, digest) for record, digest in found.lines], more)
    )


def _audit_line_body(record: AuditRecord, digest: bytes) -> AuditLine:
    return AuditLine(
        number=record.number,
        at=record.at,
        actor=Actor(record.actor.name, record.actor.role, record.actor.remote, record.actor.via),
        action=record.action,
        subject=record.subject,
        digest=digest.hex(),
        before=record.before,
        after=record.after,
        code=record.code,
        message=record.message,
    )


def _line_filter(call: RequestContext) -> Callable[[AuditRecord], bool]:
    query = call.request.query
    actor, action, subject = query.get("actor"), query.get("action"), query.get("subject")
    since, until = _query_time(call, "since"), _query_time(call, "until")
    refused = call.query_bool("refused") if "refused" in query else None

    def wanted(record: AuditRecord) -> bool:
        return (
            (actor is None or record.actor.name == actor)
            and (action is None or record.action == action)
            and (subject is None or _is_about(record, subject))
            and (refused is None or bool(record.code) is refused)
            and (since is None or record.at >= since)
            and (until is None or record.at < until)
        )

    return wanted


def _is_about(record: AuditRecord, subject: str) -> bool:
    """Whether an entry is about the subject; reservations match their requester and target, too."""
    parties = {record.subject, record.subject.partition("/")[2]}
    parties |= {
        str(facts.get(role)) for facts in (record.before, record.after) for role in _CLUSTER_FACTS
    }
    return subject in parties


_CLUSTER_FACTS = ("requester", "target")


def _query_time(call: RequestContext, name: str) -> datetime | None:
    text = call.request.query.get(name)
    if text is None:
        return None
    try:
        moment = msgspec.convert(text, datetime)
    except msgspec.ValidationError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise InvalidInput(
            f"{name}: {text[:40]!r} is not a timestamp with a time zone",
            hint="use the form 2026-01-31T12:00:00Z",
        )
    return moment
