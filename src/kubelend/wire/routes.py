"""Every route of the REST interface, once: who may call it, what goes in, what comes out.

The server binds a handler to each name, the client builds its calls from them, and the OpenAPI document
and the table of roles in the documentation are generated from here, so that none of them can differ.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

from kubelend.core import errors
from kubelend.wire import bodies


class Access(StrEnum):
    """Who may call a route, beside being verified by certificate."""

    ANYONE = "anyone"  # every verified certificate
    CLUSTER = "cluster"  # a cluster, for itself
    OWNER = "owner"  # the clusters that a reservation or advertisement concerns; viewers, admins
    READER = "reader"  # viewers and admins
    ADMIN = "admin"  # admins


class Parameter(NamedTuple):
    """A value in the query or a header; all of them are optional."""

    name: str
    description: str
    place: str = "query"
    schema: Any = str


class Route(NamedTuple):
    """One method on one path."""

    name: str
    method: str
    path: str
    summary: str
    access: Access
    answers: dict[int, Any]
    body: Any = None
    parameters: tuple[Parameter, ...] = ()
    errors: tuple[type[errors.KubelendError], ...] = ()
    media_type: str = "application/json"


API = "/api/v1"
IDEMPOTENCY_KEY = "Idempotency-Key"
LAST_EVENT_ID = "Last-Event-ID"
MAX_KEY_LENGTH = 255

_PAGE = (
    Parameter("limit", "How many at most, up to 1000", schema=int),
    Parameter("continue", "Where the page before ended"),
)
_KEY = Parameter(
    IDEMPOTENCY_KEY, "The same key gives the same reservation, however often it is sent", "header"
)
_DRY_RUN = Parameter("dryRun", "`true`: decide and answer, but change nothing", schema=bool)

ROUTES: tuple[Route, ...] = (
    Route(
        "publish",
        "POST",
        f"{API}/advertisements",
        "Say what this cluster has to offer",
        Access.CLUSTER,
        {200: bodies.Published},
        bodies.Advertisement,
        errors=(errors.InvalidInput, errors.Forbidden),
    ),
    Route(
        "get_advertisement",
        "GET",
        f"{API}/advertisements/{{cluster}}",
        "One cluster's advertisement, with what the broker has reserved there",
        Access.OWNER,
        {200: bodies.Advertisement},
        errors=(errors.Forbidden, errors.NotFound),
    ),
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
            *_PAGE,
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
    Route(
        "instructions",
        "GET",
        f"{API}/instructions",
        "What this cluster has to hold for others: its reservations in phase Reserved",
        Access.CLUSTER,
        {200: list[bodies.Reservation]},
    ),
    Route(
        "stream",
        "GET",
        f"{API}/instructions/stream",
        "The same as it happens, for requester and provider, as server-sent events",
        Access.CLUSTER,
        {200: bodies.Instruction},
        parameters=(Parameter(LAST_EVENT_ID, "Go on after this event", "header"),),
        errors=(errors.InvalidInput,),
        media_type="text/event-stream",
    ),
    Route(
        "acknowledge",
        "POST",
        f"{API}/instructions/{{reservation}}/acknowledge",
        "The provider has set the capacity aside",
        Access.CLUSTER,
        {200: bodies.Reservation},
        errors=(errors.Forbidden, errors.NotFound, errors.WrongPhase),
    ),
    Route(
        "refuse",
        "POST",
        f"{API}/instructions/{{reservation}}/refuse",
        "The provider will not serve it: the next best cluster is tried",
        Access.CLUSTER,
        {200: bodies.Reservation},
        bodies.RefuseRequest,
        errors=(errors.InvalidInput, errors.Forbidden, errors.NotFound, errors.WrongPhase),
    ),
    Route(
        "list_clusters",
        "GET",
        f"{API}/clusters",
        "All clusters and what the broker makes of them",
        Access.READER,
        {200: bodies.ClusterList},
        parameters=_PAGE,
        errors=(errors.InvalidInput, errors.Forbidden),
    ),
    Route(
        "get_cluster",
        "GET",
        f"{API}/clusters/{{cluster}}",
        "One cluster and what the broker makes of it",
        Access.OWNER,
        {200: bodies.Cluster},
        errors=(errors.Forbidden, errors.NotFound),
    ),
    Route(
        "cordon",
        "POST",
        f"{API}/clusters/{{cluster}}/cordon",
        "Close a cluster to new reservations",
        Access.ADMIN,
        {200: bodies.Cluster},
        bodies.CordonRequest,
        errors=(errors.InvalidInput, errors.Forbidden, errors.NotFound),
    ),
    Route(
        "uncordon",
        "POST",
        f"{API}/clusters/{{cluster}}/uncordon",
        "Open it again",
        Access.ADMIN,
        {200: bodies.Cluster},
        errors=(errors.Forbidden, errors.NotFound),
    ),
    Route(
        "drain",
        "POST",
        f"{API}/clusters/{{cluster}}/drain",
        "Close it and move what it lends to others; what fits nowhere else is released",
        Access.ADMIN,
        {200: bodies.Drained},
        bodies.CordonRequest,
        errors=(errors.InvalidInput, errors.Forbidden, errors.NotFound),
    ),
    Route(
        "remove_cluster",
        "DELETE",
        f"{API}/clusters/{{cluster}}",
        "Forget a cluster that lends nothing",
        Access.ADMIN,
        {204: None},
        errors=(errors.Forbidden, errors.NotFound, errors.Conflict),
    ),
    Route(
        "version",
        "GET",
        f"{API}/version",
        "Which broker answers",
        Access.ANYONE,
        {200: bodies.Version},
    ),
    Route(
        "openapi",
        "GET",
        "/openapi.json",
        "This description",
        Access.ANYONE,
        {200: dict[str, Any]},
    ),
    Route(
        "healthz",
        "GET",
        "/healthz",
        "The process is alive",
        Access.ANYONE,
        {200: str},
        media_type="text/plain",
    ),
    Route(
        "readyz",
        "GET",
        "/readyz",
        "The broker can answer, or why not",
        Access.ANYONE,
        {200: str, 503: str},
        media_type="text/plain",
    ),
)

BY_NAME = {route.name: route for route in ROUTES}
