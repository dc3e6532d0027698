"""Who belongs: tokens to join with, members, and the certificates of those who are in."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kubelend.core import errors
from kubelend.core.members import Standing
from kubelend.wire import certificate_bodies, membership_bodies
from kubelend.wire.route import API, PAGE, Access, Parameter, Route

_STANDING = Annotated[str, Meta(extra_json_schema={"enum": list(Standing)})]
_MEMBER = f"{API}/members/{{role}}/{{name}}"

ROUTES: tuple[Route, ...] = (
    Route(
        "create_token",
        "POST",
        f"{API}/tokens",
        "Make a token to join with; its text is told this once",
        Access.ADMIN,
        {201: membership_bodies.NewToken},
        membership_bodies.TokenRequest,
        errors=(errors.InvalidInput, errors.InvalidDuration, errors.Forbidden, errors.Conflict),
    ),
    Route(
        "list_tokens",
        "GET",
        f"{API}/tokens",
        "All tokens, without their secrets; expired ones for a day",
        Access.ADMIN,
        {200: membership_bodies.TokenList},
        errors=(errors.Forbidden,),
    ),
    Route(
        "delete_token",
        "DELETE",
        f"{API}/tokens/{{token}}",
        "Let nobody in with it any more",
        Access.ADMIN,
        {204: None},
        errors=(errors.Forbidden, errors.NotFound),
    ),
    Route(
        "list_members",
        "GET",
        f"{API}/members",
        "Who joined, who waits, and who was put out",
        Access.READER,
        {200: membership_bodies.MemberList},
        parameters=(Parameter("standing", "Only these", schema=_STANDING), *PAGE),
        errors=(errors.InvalidInput, errors.Forbidden),
    ),
    Route(
        "accept_member",
        "POST",
        f"{_MEMBER}/accept",
        "Say yes to who waits, or to who was revoked",
        Access.ADMIN,
        {200: membership_bodies.Member},
        membership_bodies.AcceptRequest,
        errors=(errors.InvalidInput, errors.Forbidden, errors.NotFound, errors.Conflict),
        harmless_twice=True,
    ),
    Route(
        "reject_member",
        "POST",
        f"{_MEMBER}/reject",
        "Say no to who waits",
        Access.ADMIN,
        {204: None},
        errors=(errors.Forbidden, errors.NotFound, errors.Conflict),
    ),
    Route(
        "revoke_member",
        "POST",
        f"{_MEMBER}/revoke",
        "Refuse all its certificates from now on, also on open connections",
        Access.ADMIN,
        {200: membership_bodies.Revocation},
        membership_bodies.RevokeRequest,
        errors=(errors.InvalidInput, errors.Forbidden, errors.NotFound, errors.Conflict),
        harmless_twice=True,
    ),
    Route(
        "remove_member",
        "DELETE",
        _MEMBER,
        "Forget it, and its cluster if that lends nothing; its certificates are refused",
        Access.ADMIN,
        {200: membership_bodies.Removal},
        errors=(errors.Forbidden, errors.NotFound, errors.Conflict),
    ),
    Route(
        "renew_certificate",
        "POST",
        f"{API}/certificates",
        "A newer certificate for the caller, in its own name and role",
        Access.ANYONE,
        {200: certificate_bodies.IssuedCertificate},
        certificate_bodies.CertificateRequest,
        errors=(errors.InvalidInput, errors.Forbidden, errors.Conflict),
        harmless_twice=True,
    ),
)
