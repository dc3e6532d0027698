"""Handlers of join tokens."""

from __future__ import annotations

from datetime import datetime, timedelta

from aiohttp import web

from kubelend.api.calls import RequestContext, json_response
from kubelend.api.members import NO_CONTENT
from kubelend.core import durations
from kubelend.core.enrolment import MAX_TOKEN_TTL, MIN_TOKEN_TTL
from kubelend.core.errors import InvalidIdentity, InvalidInput
from kubelend.core.members import Token, TokenId
from kubelend.core.roles import Role
from kubelend.pki import profiles, tokens
from kubelend.pki.tokens import NewToken
from kubelend.wire import conversion, membership_bodies, membership_conversion
from kubelend.wire.membership_bodies import TokenRequest

CREATED = 201


async def create_token(call: RequestContext) -> web.StreamResponse:
    body = await call.optional_body(TokenRequest)
    made = tokens.new_token()
    record = _token_record(body, made, call.caller.name, call.broker.clock())
    membership = call.app.membership
    stored = await membership.create_token(record)
    authority = membership.authority
    answer = membership_bodies.NewToken(
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
    return json_response(answer, CREATED)


async def list_tokens(call: RequestContext) -> web.StreamResponse:
    now = call.broker.clock()
    found = await call.app.membership.tokens()
    return json_response(
        membership_bodies.TokenList([membership_conversion.from_token(one, now) for one in found])
    )


async def delete_token(call: RequestContext) -> web.StreamResponse:
    await call.app.membership.delete_token(TokenId(call.path_param("token")))
    return web.Response(status=NO_CONTENT)


def _token_record(body: TokenRequest, made: NewToken, by: str, now: datetime) -> Token:
    role = Role(body.role)
    _check_token_name(body.name, role)
    return Token(
        id=TokenId(made.id),
        digest=made.digest,
        role=role,
        created_at=now,
        created_by=by,
        expires_at=now + _token_ttl(body.ttl),
        uses_left=body.uses,
        name=body.name,
    )


def _token_ttl(text: str) -> timedelta:
    asked = conversion.positive_duration(text or membership_bodies.DEFAULT_TTL, "ttl")
    if asked > MAX_TOKEN_TTL:
        raise InvalidInput(
            f"ttl: {text} is more than {durations.format_duration_short(MAX_TOKEN_TTL)}",
            hint="create another token when it is needed",
        )
    if asked < MIN_TOKEN_TTL:
        raise InvalidInput(
            f"ttl: {text} is less than {durations.format_duration_short(MIN_TOKEN_TTL)}"
        )
    return asked


def _check_token_name(name: str, role: Role) -> None:
    """Rejects an invalid name when the token is created, and not when it is used."""
    try:
        if name:
            profiles.client_profile(name, role)
    except InvalidIdentity as problem:
        raise InvalidInput(f"name: {problem.message}", hint=problem.hint) from None
