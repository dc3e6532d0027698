"""Handlers of members, join tokens and certificate renewal."""

from __future__ import annotations

from aiohttp import web

from kubelend.api.calls import Call, cut, json
from kubelend.broker.membership import Shown
from kubelend.core.errors import Conflict, InvalidIdentity, InvalidInput, NotFound
from kubelend.core.members import MemberId, Standing
from kubelend.core.roles import Role
from kubelend.pki import identities, lifetimes
from kubelend.pki.identities import Caller
from kubelend.wire import certificate_bodies, membership_bodies, texts
from kubelend.wire.membership_conversion import from_member

NO_CONTENT = 204


async def list_members(call: Call) -> web.StreamResponse:
    limit, after = call.page_size(), MemberId(call.request.query.get("continue", ""))
    found = await call.context.membership.members(after, limit + 1, _standing(call))
    members, more = cut(found, limit, lambda member: member.id)
    return json(membership_bodies.MemberList([from_member(member) for member in members], more))


async def accept_member(call: Call) -> web.StreamResponse:
    body = await call.optional_body(membership_bodies.AcceptRequest)
    role, name = _who(call)
    member = await call.context.membership.accept(
        role, name, body.key, call.caller.name, keep_old=body.keep_old
    )
    return json(from_member(member))


async def reject_member(call: Call) -> web.StreamResponse:
    await call.context.membership.reject(*_who(call))
    return web.Response(status=NO_CONTENT)


async def revoke_member(call: Call) -> web.StreamResponse:
    body = await call.optional_body(membership_bodies.RevokeRequest)
    role, name = _other(call)
    why = texts.checked(body.reason, "reason")
    done = await call.context.membership.revoke(
        role, name, why=why, by=call.caller.name, release=body.release
    )
    return json(
        membership_bodies.Revocation(
            from_member(done.member),
            done.was_known,
            list(done.released),
            list(done.drained),
            list(done.legacy.tokens),
            list(done.legacy.members),
        )
    )


async def remove_member(call: Call) -> web.StreamResponse:
    role, name = _other(call)
    done = await call.context.membership.remove(role, name, call.caller.name)
    return json(
        membership_bodies.Removal(
            done.member is not None,
            None if done.member is None else done.member.forget_at,
            list(done.legacy.tokens),
            list(done.legacy.members),
        )
    )


async def renew_certificate(call: Call) -> web.StreamResponse:
    """Renews the caller's own certificate; only the key of the signing request is used."""
    body = await call.body(certificate_bodies.CertificateRequest)
    caller = call.caller
    issued = await call.context.membership.renew(
        caller.role, caller.name, body.request, _shown(caller)
    )
    return json(certificate_bodies.IssuedCertificate(issued.chain, issued.authorities))


def _shown(caller: Caller) -> Shown:
    if caller.since is None or caller.until is None:
        raise InvalidIdentity("the certificate has no expiry time")
    return Shown(lifetimes.least_life(caller.since, caller.until), caller.until)


def _who(call: Call) -> tuple[Role, str]:
    role, name = call.named("role"), call.named("name")
    if role not in list(Role):
        raise NotFound(f"unknown role {role[:24]!r}", hint=f"use one of {', '.join(Role)}")
    try:
        identities.check_name(name)
    except InvalidIdentity as problem:
        raise NotFound(f"invalid name {name[:64]!r}", hint=problem.message) from None
    return Role(role), name


def _other(call: Call) -> tuple[Role, str]:
    role, name = _who(call)
    if (role, name) == (call.caller.role, call.caller.name):
        raise Conflict(
            "administrators cannot revoke or remove themselves",
            hint="ask another administrator",
        )
    return role, name


def _standing(call: Call) -> Standing | None:
    text = call.request.query.get("standing")
    if text is None:
        return None
    if text not in list(Standing):
        known = ", ".join(Standing)
        raise InvalidInput(f"standing: {text[:24]!r} is unknown", hint=f"use one of {known}")
    return Standing(text)
