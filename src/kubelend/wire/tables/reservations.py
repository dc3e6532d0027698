"""Routes of reservations."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kubelend.core import errors
from kubelend.wire import bodies, grant_bodies, patterns
from kubelend.wire.route import (
    API,
    IDEMPOTENCY_KEY,
    MAX_FINISHED,
    MAX_KEY_LENGTH,
    NUMBERED_PAGE_PARAMETERS,
    Access,
    Parameter,
    Route,
)

_KEY_PARAMETER = Parameter(
    IDEMPOTENCY_KEY,
    "Idempotency key: repeated requests with the same key return the same reservation",
    "header",
    Annotated[str, Meta(max_length=MAX_KEY_LENGTH, extra_json_schema=patterns.PRINTABLE)],
)
_DRY_RUN_PARAMETER = Parameter(
    "dryRun", "`true`: return the placement without reserving", schema=bool
)
_CANDIDATES_PARAMETER = Parameter(
    "limit",
    "Maximum number of clusters to evaluate in detail, up to 100",
    schema=Annotated[int, Meta(ge=0, le=100)],
)
_PHASES_SCHEMA = Annotated[str, Meta(extra_json_schema=patterns.PHASES)]

RESERVATION_ROUTES: tuple[Route, ...] = (
    Route(
        "reserve",
        "POST",
        f"{API}/reservations",
        "Reserve resources on the best cluster",
        Access.CLUSTER,
        {200: bodies.Explanation, 201: bodies.Reservation, 202: bodies.Reservation},
        bodies.ReservationRequest,
        (
            _KEY_PARAMETER,
            _DRY_RUN_PARAMETER,
            _CANDIDATES_PARAMETER._replace(description="With `dryRun`: as in explain"),
        ),
        (
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
        idempotent=True,  # by its idempotency key
    ),
    Route(
        "list_reservations",
        "GET",
        f"{API}/reservations",
        "List reservations: the caller's own for clusters, all for viewers and admins",
        Access.ANYONE,
        {200: bodies.ReservationList},
        parameters=(
            Parameter(
                "role",
                "Filter by the cluster's role; viewers and admins set `cluster` too. Without `limit`:"
                f" all unfinished and the newest {MAX_FINISHED} finished ones, in one page",
                schema=Annotated[str, Meta(extra_json_schema=patterns.RESERVATION_ROLE)],
            ),
            Parameter("phase", "Filter by phases, comma-separated", schema=_PHASES_SCHEMA),
            Parameter("cluster", "Filter by requester or provider"),
            *NUMBERED_PAGE_PARAMETERS,
        ),
        errors=(errors.InvalidInput, errors.Forbidden),
    ),
    Route(
        "get_reservation",
        "GET",
        f"{API}/reservations/{{reservation}}",
        "Get a reservation, also after it has ended",
        Access.OWNER,
        {200: bodies.Reservation},
        errors=(errors.NotFound,),
    ),
    Route(
        "grant",
        "GET",
        f"{API}/reservations/{{reservation}}/grant",
        "Get the signed grant of a reservation, which requester and provider show each other",
        Access.PARTY,
        {200: grant_bodies.SignedGrant},
        errors=(errors.Forbidden, errors.NotFound, errors.WrongPhase),
    ),
    Route(
        "release",
        "DELETE",
        f"{API}/reservations/{{reservation}}",
        "Release a reservation; idempotent",
        Access.REQUESTER,
        {200: bodies.Reservation},
        errors=(errors.Forbidden, errors.NotFound, errors.IdentityInUse),
    ),
    Route(
        "activate",
        "POST",
        f"{API}/reservations/{{reservation}}/activate",
        "Activate a reservation: the requester uses it",
        Access.REQUESTER,
        {200: bodies.Reservation},
        errors=(errors.Forbidden, errors.NotFound, errors.WrongPhase, errors.IdentityInUse),
        idempotent=True,
    ),
    Route(
        "renew",
        "POST",
        f"{API}/reservations/{{reservation}}/renew",
        "Renew a reservation for a duration from now",
        Access.REQUESTER,
        {200: bodies.Reservation},
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
    Route(
        "explain_reservation",
        "GET",
        f"{API}/reservations/{{reservation}}/explain",
        "Explain where a request like this reservation would fit now, and why not elsewhere",
        Access.OWNER,
        {200: bodies.Explanation},
        parameters=(_CANDIDATES_PARAMETER,),
        errors=(errors.InvalidInput, errors.NotFound),
    ),
    Route(
        "explain",
        "POST",
        f"{API}/explain",
        "Explain where a request would fit, and why not elsewhere; changes nothing",
        Access.CLUSTER,
        {200: bodies.Explanation},
        bodies.ReservationRequest,
        (_CANDIDATES_PARAMETER,),
        (errors.InvalidInput, errors.InvalidQuantity, errors.InvalidDuration),
        idempotent=True,
    ),
)
