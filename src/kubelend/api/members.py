"""Handlers of members, join tokens and certificate renewal."""

from __future__ import annotations

from aiohttp import web

from kubelend.api.calls import RequestContext, json_response, paginate
from kubelend.broker.membership import PresentedCertificate
from kubelend.core.errors import Conflict, InvalidIdentity, InvalidInput, NotFound
from kubelend.core.members import MemberId, MembershipStatus
from kubelend.core.roles import Role
from kubelend.pki import identities, lifetimes
from kubelend.pki.identities import Caller
from kubelend.wire import certificate_bodies, membership_bodies, texts
from kubelend.wire.membership_conversion import from_member

NO_CONTENT = 204


async def list_members(call: RequestContext) -> web.StreamResponse:
    limit, after = call.page_size(), MemberId(call.request.query.get("continue", ""))
    found = await call.app.membership.members(after, limit + 1, _query_status(call))
    members, more = paginate(found, limit, lambda member: member.id)
    return json_response(
        membership_bodies.MemberList([from_member(member) for member in members], more)
    )


async def approve_member(call: RequestContext) -> web.StreamResponse:
    body = await call.optional_body(membership_bodies.AcceptRequest)
    role, name = _member_in_path(call)
    member = await call.app.membership.approve(
        role, name, body.key, call.caller.name, keep_old=body.keep_old
    )
    return json_response(from_member(member))


async def deny_member(call: RequestContext) -> web.StreamResponse:
    await call.app.membership.deny(*_member_in_path(call))
    return web.Response(status=NO_CONTENT)


async def revoke_member(call: RequestContext) -> web.StreamResponse:
    body = await call.optional_body(membership_bodies.RevokeRequest)
    role, name = _other_member_in_path(call)
    why = texts.check_plain(body.reason, "reason")
    done = await call.app.membership.revoke(
        role, name, reason=why, by=call.caller.name, release=body.release
    )
    return json_response(
        membership_bodies.Revocation(
            from_member(done.member),
            done.was_known,
            list(done.released),
            list(done.drained),
            list(done.left_behind.tokens),
            list(done.left_behind.members),
        )
    )


async def remove_member(call: RequestContext) -> web.StreamResponse:
    role, name = _other_member_in_path(call)
    done = await call.app.membership.remove(role, name, call.caller.name)
    return json_response(
        membership_bodies.Removal(
            done.member is not None,
            None if done.member is None else done.member.forget_at,
            list(done.left_behind.tokens),
            list(done.left_behind.members),
        )
    )


async def renew_certificate(call: RequestContext) -> web.StreamResponse:
    """Renews the caller's own certificate; only the key of the signing request is used."""
    body = await call.body(certificate_bodies.CertificateRequest)
    caller = call.caller
    issued = await call.app.membership.renew(
        caller.role, caller.name, body.request, _presented_certificate(caller)
    )
    return json_response(certificate_bodies.IssuedCertificate(issued.chain, issued.authorities))


def _presented_certificate(caller: Caller) -> PresentedCertificate:
    if caller.since is None or caller.until is None:
        raise InvalidIdentity("the certificate has no expiry time")
    return PresentedCertificate(lifetimes.min_lifetime(caller.since, caller.until), caller.until)


def _member_in_path(call: RequestContext) -> tuple[Role, str]:
    role, name = call.path_param("role"), call.path_param("name")
    if role not in list(Role):
        raise NotFound(f"unknown role {role[:24]!r}", hint=f"use one of {', '.join(Role)}")
    try:
        identities.check_common_name(name)
    except InvalidIdentity as problem:
        raise NotFound(f"invalid name {name[:64]!r}", hint=problem.message) from None
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
    text = call.request.query.get("standing")
    if text is None:
        return None
    if text not in list(MembershipStatus):
        known = ", ".join(MembershipStatus)
        raise InvalidInput(f"standing: {text[:24]!r} is unknown", hint=f"use one of {known}")
    return MembershipStatus(text)
