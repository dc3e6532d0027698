"""The route table of the REST API and of the enrolment listener, and path matching.

The server binds a handler to each route, the client builds its requests from them, and the OpenAPI document
and the table of roles are generated from them, so that all of them agree.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Annotated, Any, Final, NamedTuple
from urllib.parse import unquote

from msgspec import Meta

from kubelend.core import errors
from kubelend.core.errors import MethodNotAllowed, NotFound
from kubelend.core.members import MembershipStatus
from kubelend.wire import admin_bodies, bodies, json_types, validation
from kubelend.wire.route import (
    API,
    BODY_ERRORS,
    COMMON_ERRORS,
    EVENT_STREAM,
    IDEMPOTENCY_KEY,
    LAST_EVENT_ID,
    MAX_FINISHED,
    MAX_KEY_LENGTH,
    NUMBERED_PAGE_PARAMETERS,
    PAGE_PARAMETERS,
    UNROUTED_ERRORS,
    Access,
    Parameter,
    Route,
)

ENROLMENT_PREFIX: Final = "/enrol/v1"


class EnrolmentRoute(NamedTuple):
    """One method on one path. The name is used in logs and metrics."""

    name: str
    method: str
    path: str


AUTHORITIES_ROUTE: Final = EnrolmentRoute(
    "enrol_authorities", "GET", f"{ENROLMENT_PREFIX}/authorities"
)
"""The broker's authorities in PEM form. Public; a client trusts only what matches its pin."""

JOIN_ROUTE: Final = EnrolmentRoute("join", "POST", f"{ENROLMENT_PREFIX}/join")
"""Takes a `JoinRequest`; responds with 200 and `JoinResult`, or 202 and `JoinPending`."""

ENROLMENT_ERRORS: Final[tuple[json_types.ErrorClass, ...]] = (
    *COMMON_ERRORS,
    *UNROUTED_ERRORS,
    *BODY_ERRORS,
    errors.TokenRefused,
    errors.Conflict,
    errors.LimitExceeded,
)
"""Errors that the enrolment listener can answer."""

ENROLMENT_ROUTES: Final = (AUTHORITIES_ROUTE, JOIN_ROUTE)
ENROLMENT_ROUTE_NAMES: Final = frozenset(route.name for route in ENROLMENT_ROUTES)
PEM_TYPE: Final = "application/x-pem-file"


def _route(
    method: str,
    name: str,
    path: str,
    summary: str,
    access: Access,
    result: Any,
    body: Any = None,
    **more: Any,
) -> Route:
    """A route below `API` that responds with 200 and `result`, or 204 if it is None; a dict has all."""
    responses = result if isinstance(result, dict) else {200: result} if result else {204: None}
    return Route(name, method, API + path, summary, access, responses, body, **more)


_get, _post, _put, _delete = (partial(_route, each) for each in ("GET", "POST", "PUT", "DELETE"))

_LIST_ERRORS = (errors.InvalidInput, errors.Forbidden)
_OBJECT_ERRORS = (errors.Forbidden, errors.NotFound)
_TRANSITION_ERRORS = (*_OBJECT_ERRORS, errors.WrongPhase, errors.IdentityInUse)


ABOUT_ROUTES: tuple[Route, ...] = (
    _get("version", "/version", "Get the version of the broker", Access.ANYONE, bodies.Version),
    _get(
        "grant_keys",
        "/keys",
        "Get the public keys that verify grants, as a JWK set",
        Access.ANYONE,
        bodies.KeySet,
    ),
    Route(
        "openapi",
        "GET",
        "/openapi.json",
        "Get this OpenAPI document",
        Access.ANYONE,
        {200: dict[str, Any]},
    ),
    Route(
        "healthz",
        "GET",
        "/healthz",
        "Liveness probe",
        Access.ANYONE,
        {200: str},
        media_type="text/plain",
    ),
    Route(
        "readyz",
        "GET",
        "/readyz",
        "Readiness probe; the body says why the broker is not ready",
        Access.ANYONE,
        {200: str, 503: str},
        media_type="text/plain",
    ),
)


ADVERTISEMENT_ROUTES: tuple[Route, ...] = (
    _post(
        "publish",
        "/advertisements",
        "Publish the caller's advertisement",
        Access.CLUSTER,
        bodies.PublishResult,
        bodies.Advertisement,
        errors=(
            errors.InvalidInput,
            errors.InvalidQuantity,
            errors.InvalidDuration,
            errors.Forbidden,
            errors.IdentityInUse,
        ),
        idempotent=True,
    ),
    _get(
        "get_advertisement",
        "/advertisements/{cluster}",
        "Get a cluster's advertisement, with the reserved amounts",
        Access.OWNER,
        bodies.Advertisement,
        errors=_OBJECT_ERRORS,
    ),
)


AUDIT_ROUTES: tuple[Route, ...] = (
    _get(
        "audit_log",
        "/audit",
        "List the audit log, newest first: all changes and rejected requests",
        Access.READER,
        admin_bodies.AuditLog,
        parameters=(
            Parameter("actor", "Filter by caller"),
            Parameter("action", "Filter by event or route"),
            Parameter("subject", "Filter by subject: kind/name or a name"),
            Parameter(
                "refused", "`true`: only rejected requests; `false`: only changes", schema=bool
            ),
            Parameter(
                "since", "Only lines at or after this time (RFC 3339)", schema=bodies.Timestamp
            ),
            Parameter("until", "Only lines before this time (RFC 3339)", schema=bodies.Timestamp),
            *NUMBERED_PAGE_PARAMETERS,
        ),
        errors=_LIST_ERRORS,
    ),
)


CLUSTER_ROUTES: tuple[Route, ...] = (
    _get(
        "list_clusters",
        "/clusters",
        "List clusters with their status",
        Access.READER,
        bodies.ClusterList,
        parameters=PAGE_PARAMETERS,
        errors=_LIST_ERRORS,
    ),
    _get(
        "get_cluster",
        "/clusters/{cluster}",
        "Get a cluster with its status",
        Access.OWNER,
        bodies.Cluster,
        errors=_OBJECT_ERRORS,
    ),
    _post(
        "cordon",
        "/clusters/{cluster}/cordon",
        "Cordon a cluster: no new reservations are placed on it",
        Access.ADMIN,
        bodies.Cluster,
        bodies.CordonRequest,
        errors=(errors.InvalidInput, *_OBJECT_ERRORS),
        idempotent=True,
    ),
    _post(
        "uncordon",
        "/clusters/{cluster}/uncordon",
        "Uncordon a cluster",
        Access.ADMIN,
        bodies.Cluster,
        errors=_OBJECT_ERRORS,
        idempotent=True,
    ),
    _post(
        "drain",
        "/clusters/{cluster}/drain",
        "Cordon a cluster and move its reservations to others; those that fit nowhere else are released",
        Access.ADMIN,
        bodies.DrainResult,
        bodies.CordonRequest,
        errors=(errors.InvalidInput, *_OBJECT_ERRORS),
    ),
    _delete(
        "remove_cluster",
        "/clusters/{cluster}",
        "Delete a cluster without active reservations",
        Access.ADMIN,
        None,
        errors=(*_OBJECT_ERRORS, errors.Conflict),
    ),
)


_EVENT_ID_SCHEMA = Annotated[str, Meta(extra_json_schema=json_types.EVENT_ID)]

INSTRUCTION_ROUTES: tuple[Route, ...] = (
    _get(
        "instructions",
        "/instructions",
        "List the reservations that the calling provider has to hold: those in phase Reserved",
        Access.CLUSTER,
        list[bodies.Reservation],
    ),
    _get(
        "stream",
        "/instructions/stream",
        "Stream instructions for the calling requester or provider as server-sent events",
        Access.CLUSTER,
        bodies.Instruction,
        parameters=(
            Parameter(LAST_EVENT_ID, "Resume after this event", "header", _EVENT_ID_SCHEMA),
        ),
        errors=(errors.InvalidInput, errors.IdentityInUse, errors.LimitExceeded),
        media_type=EVENT_STREAM,
    ),
    _post(
        "acknowledge",
        "/instructions/{reservation}/acknowledge",
        "Acknowledge that the provider holds the resources, and report whether its nodes keep them",
        Access.PROVIDER,
        bodies.Reservation,
        bodies.AcknowledgeRequest,
        errors=(errors.InvalidInput, *_TRANSITION_ERRORS),
        idempotent=True,
    ),
    _put(
        "exchange_handshake",
        "/reservations/{reservation}/handshake",
        "Send the caller's part of the peering handshake, and get the other side's",
        Access.PARTY,
        bodies.HandshakeResult,
        bodies.Handshake,
        errors=(errors.InvalidInput, *_TRANSITION_ERRORS),
    ),
    _post(
        "refuse",
        "/instructions/{reservation}/refuse",
        "Refuse a reservation as its provider; the next best cluster is tried",
        Access.PROVIDER,
        bodies.Reservation,
        bodies.RefuseRequest,
        errors=(errors.InvalidInput, *_TRANSITION_ERRORS),
        idempotent=True,
    ),
)


_POLICY_PATH = "/clusters/{cluster}/policy"
_QUOTA_PATH = "/quotas/{cluster}"
_LIMIT_ERRORS = (errors.InvalidInput, errors.InvalidQuantity, *_OBJECT_ERRORS)

LIMIT_ROUTES: tuple[Route, ...] = (
    _get(
        "list_policies",
        "/policies",
        "List the lending policies, also of clusters that have not advertised yet",
        Access.READER,
        admin_bodies.PolicyList,
        parameters=PAGE_PARAMETERS,
        errors=_LIST_ERRORS,
    ),
    _get(
        "get_policy",
        _POLICY_PATH,
        "Get the lending policies of a cluster: advertised, set by an administrator, and effective",
        Access.OWNER,
        admin_bodies.PolicyStatus,
        errors=_OBJECT_ERRORS,
    ),
    _put(
        "set_policy",
        _POLICY_PATH,
        "Set the administrator's lending policy of a cluster; the stricter of it and the advertised applies",
        Access.ADMIN,
        admin_bodies.PolicyStatus,
        admin_bodies.PolicyRequest,
        errors=_LIMIT_ERRORS,
    ),
    _delete(
        "clear_policy",
        _POLICY_PATH,
        "Delete the administrator's lending policy of a cluster",
        Access.ADMIN,
        None,
        errors=_OBJECT_ERRORS,
    ),
    _get(
        "list_quotas",
        "/quotas",
        "List quotas and their usage",
        Access.READER,
        admin_bodies.QuotaList,
        parameters=PAGE_PARAMETERS,
        errors=_LIST_ERRORS,
    ),
    _get(
        "get_quota",
        _QUOTA_PATH,
        "Get a cluster's quota and its usage",
        Access.OWNER,
        admin_bodies.QuotaStatus,
        errors=_OBJECT_ERRORS,
    ),
    _put(
        "set_quota",
        _QUOTA_PATH,
        "Set a cluster's quota",
        Access.ADMIN,
        admin_bodies.QuotaStatus,
        admin_bodies.QuotaRequest,
        errors=_LIMIT_ERRORS,
    ),
    _delete(
        "clear_quota",
        _QUOTA_PATH,
        "Delete a cluster's quota",
        Access.ADMIN,
        None,
        errors=_OBJECT_ERRORS,
    ),
)


_MEMBERSHIP_STATUS_SCHEMA = Annotated[str, Meta(extra_json_schema={"enum": list(MembershipStatus)})]
_MEMBER_PATH = "/members/{role}/{name}"

MEMBERSHIP_ROUTES: tuple[Route, ...] = (
    _post(
        "create_token",
        "/tokens",
        "Create a join token; its text is returned only here",
        Access.ADMIN,
        {201: admin_bodies.NewToken},
        admin_bodies.TokenRequest,
        errors=(errors.InvalidInput, errors.InvalidDuration, errors.Forbidden, errors.Conflict),
    ),
    _get(
        "list_tokens",
        "/tokens",
        "List join tokens without their secrets; expired ones for a day",
        Access.ADMIN,
        admin_bodies.TokenList,
        errors=(errors.Forbidden,),
    ),
    _delete(
        "delete_token",
        "/tokens/{token}",
        "Delete a join token",
        Access.ADMIN,
        None,
        errors=_OBJECT_ERRORS,
    ),
    _get(
        "list_members",
        "/members",
        "List members: joined, waiting for approval, or revoked",
        Access.READER,
        admin_bodies.MemberList,
        parameters=(
            Parameter("status", "Filter by membership status", schema=_MEMBERSHIP_STATUS_SCHEMA),
            Parameter(
                "outdated",
                "Only members that have not renewed since a step of a CA rotation",
                schema=bool,
            ),
            *PAGE_PARAMETERS,
        ),
        errors=(*_LIST_ERRORS, errors.Conflict),
    ),
    _post(
        "approve_member",
        _MEMBER_PATH + "/approve",
        "Approve a join request, or a revoked member",
        Access.ADMIN,
        admin_bodies.Member,
        admin_bodies.ApproveRequest,
        errors=(errors.InvalidInput, *_OBJECT_ERRORS, errors.Conflict),
        idempotent=True,
    ),
    _post(
        "deny_member",
        _MEMBER_PATH + "/deny",
        "Deny a join request",
        Access.ADMIN,
        None,
        errors=_OBJECT_ERRORS,
    ),
    _post(
        "revoke_member",
        _MEMBER_PATH + "/revoke",
        "Revoke a member: its certificates are rejected from now on, also on open connections",
        Access.ADMIN,
        admin_bodies.Revocation,
        admin_bodies.RevokeRequest,
        errors=(errors.InvalidInput, *_OBJECT_ERRORS, errors.Conflict),
        idempotent=True,
    ),
    _delete(
        "remove_member",
        _MEMBER_PATH,
        "Delete a member, and its cluster if that has no active reservations; its certificates are rejected",
        Access.ADMIN,
        admin_bodies.Removal,
        errors=(*_OBJECT_ERRORS, errors.Conflict),
    ),
    _post(
        "renew_certificate",
        "/certificates",
        "Renew the caller's certificate, with the same name and role",
        Access.ANYONE,
        admin_bodies.IssuedCertificate,
        admin_bodies.CertificateRequest,
        errors=(errors.InvalidInput, errors.Forbidden, errors.Conflict),
        idempotent=True,
    ),
)


_KEY_PARAMETER = Parameter(
    IDEMPOTENCY_KEY,
    "Idempotency key: repeated requests with the same key return the same reservation",
    "header",
    Annotated[str, Meta(max_length=MAX_KEY_LENGTH, extra_json_schema=json_types.PRINTABLE)],
)
_DRY_RUN_PARAMETER = Parameter(
    "dryRun", "`true`: return the placement without reserving", schema=bool
)
_CANDIDATES_PARAMETER = Parameter(
    "limit",
    "Maximum number of clusters to evaluate in detail, up to 100",
    schema=Annotated[int, Meta(ge=0, le=100)],
)
_PHASES_SCHEMA = Annotated[str, Meta(extra_json_schema=json_types.PHASES)]

RESERVATION_ROUTES: tuple[Route, ...] = (
    _post(
        "reserve",
        "/reservations",
        "Reserve resources on the best cluster",
        Access.CLUSTER,
        {200: bodies.Explanation, 201: bodies.Reservation, 202: bodies.Reservation},
        bodies.ReservationRequest,
        parameters=(
            _KEY_PARAMETER,
            _DRY_RUN_PARAMETER,
            _CANDIDATES_PARAMETER._replace(description="With `dryRun`: as in explain"),
        ),
        errors=(
            errors.InvalidInput,
            errors.InvalidQuantity,
            errors.InvalidDuration,
            errors.Forbidden,
            errors.QuotaExceeded,
            errors.NoCapacity,
            errors.KeyReused,
            errors.IdentityInUse,
            errors.QueueFull,
        ),
        idempotent=True,
    ),
    _get(
        "list_reservations",
        "/reservations",
        "List reservations: the caller's own for clusters, all for viewers and admins",
        Access.ANYONE,
        bodies.ReservationList,
        parameters=(
            Parameter(
                "role",
                "Filter by the cluster's role; viewers and admins set `cluster` too. Without `limit`:"
                f" all unfinished and the newest {MAX_FINISHED} finished ones, in one page",
                schema=Annotated[str, Meta(extra_json_schema=json_types.RESERVATION_ROLE)],
            ),
            Parameter("phase", "Filter by phases, comma-separated", schema=_PHASES_SCHEMA),
            Parameter("cluster", "Filter by requester or provider"),
            *NUMBERED_PAGE_PARAMETERS,
        ),
        errors=_LIST_ERRORS,
    ),
    _get(
        "get_reservation",
        "/reservations/{reservation}",
        "Get a reservation, also after it has ended",
        Access.OWNER,
        bodies.Reservation,
        errors=(errors.NotFound,),
    ),
    _get(
        "grant",
        "/reservations/{reservation}/grant",
        "Get the signed grant of a reservation, which requester and provider show each other",
        Access.PARTY,
        bodies.SignedGrant,
        errors=(errors.Forbidden, errors.NotFound, errors.WrongPhase),
    ),
    _delete(
        "release",
        "/reservations/{reservation}",
        "Release a reservation; idempotent",
        Access.REQUESTER,
        bodies.Reservation,
        errors=(errors.Forbidden, errors.NotFound, errors.IdentityInUse),
    ),
    _post(
        "activate",
        "/reservations/{reservation}/activate",
        "Activate a reservation: the requester uses it",
        Access.REQUESTER,
        bodies.Reservation,
        errors=_TRANSITION_ERRORS,
        idempotent=True,
    ),
    _post(
        "renew",
        "/reservations/{reservation}/renew",
        "Renew a reservation for a duration from now",
        Access.REQUESTER,
        bodies.Reservation,
        bodies.RenewRequest,
        errors=(
            errors.InvalidInput,
            errors.InvalidDuration,
            errors.Forbidden,
            errors.QuotaExceeded,
            errors.NotFound,
            errors.WrongPhase,
            errors.IdentityInUse,
        ),
        idempotent=True,
    ),
    _get(
        "explain_reservation",
        "/reservations/{reservation}/explain",
        "Explain where a request like this reservation would fit now, and why not elsewhere",
        Access.OWNER,
        bodies.Explanation,
        parameters=(_CANDIDATES_PARAMETER,),
        errors=(errors.InvalidInput, errors.NotFound),
    ),
    _post(
        "explain",
        "/explain",
        "Explain where a request would fit, and why not elsewhere; changes nothing",
        Access.CLUSTER,
        bodies.Explanation,
        bodies.ReservationRequest,
        parameters=(_CANDIDATES_PARAMETER,),
        errors=(errors.InvalidInput, errors.InvalidQuantity, errors.InvalidDuration),
        idempotent=True,
    ),
)


ROUTES: tuple[Route, ...] = (
    *ADVERTISEMENT_ROUTES,
    *RESERVATION_ROUTES,
    *INSTRUCTION_ROUTES,
    *CLUSTER_ROUTES,
    *LIMIT_ROUTES,
    *MEMBERSHIP_ROUTES,
    *AUDIT_ROUTES,
    *ABOUT_ROUTES,
)

ROUTES_BY_NAME = {route.name: route for route in ROUTES}


class RouteMatch(NamedTuple):
    """A route and the values of its path parameters."""

    route: Route
    names: dict[str, str]


def match_route(method: str, path: str) -> RouteMatch | NotFound | MethodNotAllowed:
    """Return the route of a request, or an error that the caller raises after authentication.

    `path` is still percent-encoded, because a path parameter may contain an encoded slash.
    """
    plain = _STATIC_ROUTES.get((method, path))
    if plain is not None:
        return plain
    candidates = _ROUTES_BY_DEPTH.get(path.count("/"), [])
    matches = [match for route in candidates if (match := _match_path(route, path)) is not None]
    for match in matches:
        if match.route.method == method:
            return match
    if matches:
        allowed = sorted(match.route.method for match in matches)
        return MethodNotAllowed(
            f"method {method} is not allowed for {path}",
            hint=f"use {', '.join(allowed)}",
            allowed=allowed,
        )
    return NotFound(f"no such route: {path}", hint="see /openapi.json")


def _match_path(route: Route, path: str) -> RouteMatch | None:
    names: dict[str, str] = {}
    for expected, part in zip(route.path.split("/"), path.split("/"), strict=True):
        if expected.startswith("{") and validation.is_plain(name := unquote(part)) and name:
            names[expected.strip("{}")] = name
        elif expected != part:
            return None
    return RouteMatch(route, names)


_STATIC_ROUTES = {
    (route.method, route.path): RouteMatch(route, {}) for route in ROUTES if "{" not in route.path
}
for _probe in ("/healthz", "/readyz"):
    # Load balancers probe with HEAD.
    _STATIC_ROUTES["HEAD", _probe] = _STATIC_ROUTES["GET", _probe]
_ROUTES_BY_DEPTH: dict[int, list[Route]] = defaultdict(list)
for _each in ROUTES:
    _ROUTES_BY_DEPTH[_each.path.count("/")].append(_each)
