"""Routes of the audit log."""

from __future__ import annotations

from kubelend.core import errors
from kubelend.wire import audit_bodies, bodies
from kubelend.wire.route import API, NUMBERED_PAGE_PARAMETERS, Access, Parameter, Route

AUDIT_ROUTES: tuple[Route, ...] = (
    Route(
        "audit_log",
        "GET",
        f"{API}/audit",
        "List the audit log, newest first: all changes and rejected requests",
        Access.READER,
        {200: audit_bodies.AuditLog},
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
        errors=(errors.InvalidInput, errors.Forbidden),
    ),
)
