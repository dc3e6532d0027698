"""Routes of join tokens, members and certificate renewal."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kubelend.core import errors
from kubelend.core.members import MembershipStatus
from kubelend.wire import certificate_bodies, membership_bodies
from kubelend.wire.route import API, PAGE_PARAMETERS, Access, Parameter, Route

_MEMBERSHIP_STATUS_SCHEMA = Annotated[str, Meta(extra_json_schema={"enum": list(MembershipStatus)})]
_MEMBER_PATH = f"{API}/members/{{role}}/{{name}}"

MEMBERSHIP_ROUTES: tuple[Route, ...] = (
    Route(
        "create_token",
        "POST",
        f"{API}/tokens",
        "Create a join token; its text is returned only here",
        Access.ADMIN,
        {201: membership_bodies.NewToken},
        membership_bodies.TokenRequest,
        errors=(errors.InvalidInput, errors.InvalidDuration, errors.Forbidden, errors.Conflict),
    ),
    Route(
        "list_tokens",
        "GET",
        f"{API}/tokens",
        "List join tokens without their secrets; expired ones for a day",
        Access.ADMIN,
        {200: membership_bodies.TokenList},
        errors=(errors.Forbidden,),
    ),
    Route(
        "delete_token",
        "DELETE",
        f"{API}/tokens/{{token}}",
        "Delete a join token",
        Access.ADMIN,
        {204: None},
        errors=(errors.Forbidden, errors.NotFound),
    ),
    Route(
        "list_members",
        "GET",
        f"{API}/members",
        "List members: joined, waiting for approval, or revoked",
        Access.READER,
        {200: membership_bodies.MemberList},
        parameters=(
            Parameter("standing", "Filter by membership status", schema=_MEMBERSHIP_STATUS_SCHEMA),
            *PAGE_PARAMETERS,
        ),
        errors=(errors.InvalidInput, errors.Forbidden),
    ),
    Route(
        "accept_member",
        "POST",
        f"{_MEMBER_PATH}/accept",
        "Approve a join request, or a revoked member",
        Access.ADMIN,
        {200: membership_bodies.Member},
        membership_bodies.AcceptRequest,
        errors=(errors.InvalidInput, errors.Forbidden, errors.NotFound, errors.Conflict),
        idempotent=True,
    ),
    Route(
        "reject_member",
        "POST",
        f"{_MEMBER_PATH}/reject",
        "Deny a join request",
        Access.ADMIN,
        {204: None},
        errors=(errors.Forbidden, errors.NotFound, errors.Conflict),
    ),
    Route(
        "revoke_member",
        "POST",
        f"{_MEMBER_PATH}/revoke",
        "Revoke a member: its certificates are rejected from now on, also on open connections",
        Access.ADMIN,
        {200: membership_bodies.Revocation},
        membership_bodies.RevokeRequest,
        errors=(errors.InvalidInput, errors.Forbidden, errors.NotFound, errors.Conflict),
        idempotent=True,
    ),
    Route(
        "remove_member",
        "DELETE",
        _MEMBER_PATH,
        "Delete a member, and its cluster if that has no active reservations; its certificates are rejected",
        Access.ADMIN,
        {200: membership_bodies.Removal},
        errors=(errors.Forbidden, errors.NotFound, errors.Conflict),
    ),
    Route(
        "renew_certificate",
        "POST",
        f"{API}/certificates",
        "Renew the caller's certificate, with the same name and role",
        Access.ANYONE,
        {200: certificate_bodies.IssuedCertificate},
        certificate_bodies.CertificateRequest,
        errors=(errors.InvalidInput, errors.Forbidden, errors.Conflict),
        idempotent=True,
    ),
)
