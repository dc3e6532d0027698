"""What clusters have to do for each other."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kubelend.core import errors
from kubelend.wire import bodies, patterns
from kubelend.wire.route import API, EVENT_STREAM, LAST_EVENT_ID, Access, Parameter, Route

_EVENT_ID = Annotated[str, Meta(extra_json_schema=patterns.EVENT_ID)]

ROUTES: tuple[Route, ...] = (
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
        parameters=(Parameter(LAST_EVENT_ID, "Go on after this event", "header", _EVENT_ID),),
        errors=(errors.InvalidInput, errors.IdentityInUse, errors.LimitExceeded),
        media_type=EVENT_STREAM,
    ),
    Route(
        "acknowledge",
        "POST",
        f"{API}/instructions/{{reservation}}/acknowledge",
        "The provider has set the capacity aside",
        Access.PROVIDER,
        {200: bodies.Reservation},
        errors=(errors.Forbidden, errors.NotFound, errors.WrongPhase, errors.IdentityInUse),
        harmless_twice=True,
    ),
    Route(
        "refuse",
        "POST",
        f"{API}/instructions/{{reservation}}/refuse",
        "The provider will not serve it: the next best cluster is tried",
        Access.PROVIDER,
        {200: bodies.Reservation},
        bodies.RefuseRequest,
        errors=(
            errors.InvalidInput,
            errors.Forbidden,
            errors.NotFound,
            errors.WrongPhase,
            errors.IdentityInUse,
        ),
        harmless_twice=True,
    ),
)
