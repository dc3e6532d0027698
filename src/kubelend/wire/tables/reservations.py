"""Borrowing, from the request to its end."""

from __future__ import annotations

from kubelend.core import errors
from kubelend.wire import bodies
from kubelend.wire.route import API, IDEMPOTENCY_KEY, PAGE, Access, Parameter, Route

_KEY = Parameter(
    IDEMPOTENCY_KEY, "The same key gives the same reservation, however often it is sent", "header"
)
_DRY_RUN = Parameter("dryRun", "`true`: decide and answer, but change nothing", schema=bool)

ROUTES: tuple[Route, ...] = (
    Route(
        "reserve",
        "POST",
        f"{API}/reservations",
        "Borrow: lock an amount on the best cluster",
        Access.CLUSTER,
        {200: bodies.Explanation, 201: bodies.Reservation, 202: bodies.Reservation},
        bodies.ReservationRequest,
        (_KEY, _DRY_RUN),
        (errors.InvalidInput, errors.Forbidden, errors.NoCapacity, errors.KeyReused),
    ),
    Route(
        "list_reservations",
        "GET",
        f"{API}/reservations",
        "The reservations that concern the caller; all of them for viewers and admins",
        Access.ANYONE,
        {200: bodies.ReservationList},
        parameters=(
            Parameter("role", "`requester` or `provider`: only those where the caller is that"),
            Parameter("phase", "Only these phases, separated by commas"),
            Parameter("cluster", "Only those of this requester or provider"),
            *PAGE,
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
        "release",
        "DELETE",
        f"{API}/reservations/{{reservation}}",
        "Give it back; once or many times, the effect is the same",
        Access.OWNER,
        {200: bodies.Reservation},
        errors=(errors.Forbidden, errors.NotFound),
    ),
    Route(
        "activate",
        "POST",
        f"{API}/reservations/{{reservation}}/activate",
        "Say that it is in use",
        Access.OWNER,
        {200: bodies.Reservation},
        errors=(errors.Forbidden, errors.NotFound, errors.WrongPhase),
    ),
    Route(
        "renew",
        "POST",
        f"{API}/reservations/{{reservation}}/renew",
        "Keep it for longer, counted from now",
        Access.OWNER,
        {200: bodies.Reservation},
        bodies.RenewRequest,
        errors=(errors.InvalidInput, errors.Forbidden, errors.NotFound, errors.WrongPhase),
    ),
    Route(
        "explain_reservation",
        "GET",
        f"{API}/reservations/{{reservation}}/explain",
        "Where a request like this would fit now, and why not elsewhere",
        Access.OWNER,
        {200: bodies.Explanation},
        parameters=(
            Parameter("limit", "How many clusters to look at closely, at most 100", schema=int),
        ),
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
        (Parameter("limit", "How many clusters to look at closely, at most 100", schema=int),),
        (errors.InvalidInput,),
    ),
)
