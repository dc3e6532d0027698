"""The journal: who did what, and who was refused what."""

from __future__ import annotations

from kubelend.core import errors
from kubelend.wire import audit_bodies, bodies
from kubelend.wire.route import API, NUMBERED_PAGE, Access, Parameter, Route

ROUTES: tuple[Route, ...] = (
    Route(
        "audit_log",
        "GET",
        f"{API}/audit",
        "The journal, newest first: every change and every refusal",
        Access.READER,
        {200: audit_bodies.AuditLog},
        parameters=(
            Parameter("actor", "Only what this caller did or was refused"),
            Parameter("action", "Only this event or route"),
            Parameter("subject", "Only what concerns this, as kind/name or a name"),
            Parameter("refused", "`true`: only refusals; `false`: only changes", schema=bool),
            Parameter("since", "Not before this time (RFC 3339)", schema=bodies.Timestamp),
            Parameter("until", "Before this time (RFC 3339)", schema=bodies.Timestamp),
            *NUMBERED_PAGE,
        ),
        errors=(errors.InvalidInput, errors.Forbidden),
    ),
)
