"""Routes of instructions."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kubelend.core import errors
from kubelend.wire import bodies, patterns
from kubelend.wire.route import API, EVENT_STREAM, LAST_EVENT_ID, Access, Parameter, Route

_EVENT_ID_SCHEMA = Annotated[str, Meta(extra_json_schema=patterns.EVENT_ID)]

INSTRUCTION_ROUTES: tuple[Route, ...] = (
    Route(
        "instructions",
        "GET",
        f"{API}/instructions",
        "List the reservations that the calling provider has to hold: those in phase Reserved",
        Access.CLUSTER,
        {200: list[bodies.Reservation]},
    ),
    Route(
        "stream",
        "GET",
        f"{API}/instructions/stream",
        "Stream instructions for the calling requester or provider as server-sent events",
        Access.CLUSTER,
        {200: bodies.Instruction},
        parameters=(
            Parameter(LAST_EVENT_ID, "Resume after this event", "header", _EVENT_ID_SCHEMA),
        ),
        errors=(errors.InvalidInput, errors.IdentityInUse, errors.LimitExceeded),
        media_type=EVENT_STREAM,
    ),
    Route(
        "acknowledge",
        "POST",
        f"{API}/instructions/{{reservation}}/acknowledge",
        "Acknowledge that the provider holds the resources",
        Access.PROVIDER,
        {200: bodies.Reservation},
        errors=(errors.Forbidden, errors.NotFound, errors.WrongPhase, errors.IdentityInUse),
        idempotent=True,
    ),
    Route(
        "refuse",
        "POST",
        f"{API}/instructions/{{reservation}}/refuse",
        "Refuse a reservation as its provider; the next best cluster is tried",
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
        idempotent=True,
    ),
)
