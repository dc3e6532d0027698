"""Borrowing, from the request to its end."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kubelend.core import errors
from kubelend.wire import bodies, grant_bodies, patterns
from kubelend.wire.route import (
    API,
    IDEMPOTENCY_KEY,
    MAX_KEY_LENGTH,
    MOST_OVER,
    NUMBERED_PAGE,
    Access,
    Parameter,
    Route,
)

_KEY = Parameter(
    IDEMPOTENCY_KEY,
    "The same key gives the same reservation, however often it is sent",
    "header",
    Annotated[str, Meta(max_length=MAX_KEY_LENGTH, extra_json_schema=patterns.PRINTABLE)],
)
_DRY_RUN = Parameter("dryRun", "`true`: decide and answer, but change nothing", schema=bool)
_CANDIDATES = Parameter(
    "limit",
    "How many clusters to look at closely, at most 100",
    schema=Annotated[int, Meta(ge=0, le=100)],
)
_PHASES = Annotated[str, Meta(extra_json_schema=patterns.PHASES)]

ROUTES: tuple[Route, ...] = (
    Route(
        "reserve",
        "POST",
        f"{API}/reservations",
        "Borrow: lock an amount on the best cluster",
        Access.CLUSTER,
        {200: bodies.Explanation, 201: bodies.Reservation, 202: bodies.Reservation},
        bodies.ReservationRequest,
        (_KEY, _DRY_RUN, _CANDIDATES._replace(description="With `dryRun`: as for explain")),
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
        harmless_twice=True,  # by its idempotency key
    ),
    Route(
        "list_reservations",
        "GET",
        f"{API}/reservations",
        "The reservations that concern the caller; all of them for viewers and admins",
        Access.ANYONE,
        {200: bodies.ReservationList},
        parameters=(
            Parameter(
                "role",
                "Only those where the cluster is that; people name the cluster too. Without `limit`:"
                f" all that are open and the newest {MOST_OVER} that are over, in one page",
                schema=Annotated[str, Meta(extra_json_schema=patterns.SIDE)],
            ),
            Parameter("phase", "Only these phases, separated by commas", schema=_PHASES),
            Parameter("cluster", "Only those of this requester or provider"),
            *NUMBERED_PAGE,
        ),
        errors=(errors.InvalidInput, errors.Forbidden),
    ),
    Route(
        "get_reservation",
        "GET",
        f"{API}/reservations/{{reservation}}",
        "One reservation, also after it has ended",
        Access.OWNER,
        {200: bodies.Reservation},
        errors=(errors.NotFound,),
    ),
    Route(
        "grant",
        "GET",
        f"{API}/reservations/{{reservation}}/grant",
        "The reservation, signed: what requester and provider show each other",
        Access.PARTY,
        {200: grant_bodies.SignedGrant},
        errors=(errors.Forbidden, errors.NotFound, errors.WrongPhase),
    ),
    Route(
        "release",
        "DELETE",
        f"{API}/reservations/{{reservation}}",
        "Give it back; once or many times, the effect is the same",
        Access.REQUESTER,
        {200: bodies.Reservation},
        errors=(errors.Forbidden, errors.NotFound, errors.IdentityInUse),
    ),
    Route(
        "activate",
        "POST",
        f"{API}/reservations/{{reservation}}/activate",
        "Say that it is in use",
        Access.REQUESTER,
        {200: bodies.Reservation},
        errors=(errors.Forbidden, errors.NotFound, errors.WrongPhase, errors.IdentityInUse),
        harmless_twice=True,
    ),
    Route(
        "renew",
        "POST",
        f"{API}/reservations/{{reservation}}/renew",
        "Keep it for longer, counted from now",
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
        harmless_twice=True,
    ),
    Route(
        "explain_reservation",
        "GET",
        f"{API}/reservations/{{reservation}}/explain",
        "Where a request like this would fit now, and why not elsewhere",
        Access.OWNER,
        {200: bodies.Explanation},
        parameters=(_CANDIDATES,),
        errors=(errors.InvalidInput, errors.NotFound),
    ),
    Route(
        "explain",
        "POST",
        f"{API}/explain",
        "Where a request would fit, and why not elsewhere; nothing changes",
        Access.CLUSTER,
        {200: bodies.Explanation},
        bodies.ReservationRequest,
        (_CANDIDATES,),
        (errors.InvalidInput, errors.InvalidQuantity, errors.InvalidDuration),
        harmless_twice=True,
    ),
)
