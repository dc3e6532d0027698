"""The route table of the REST API and of the enrolment listener, and path matching.

The server binds a handler to each route, the client builds its requests from them, and the OpenAPI document
and the table of roles are generated from them, so that all of them agree.
"""

from __future__ import annotations

from kubelend.wire.route import Route
from kubelend.wire.tables import (
    about,
    advertisements,
    audit,
    clusters,
    instructions,
    limits,
    membership,
    reservations,
)

ROUTES: tuple[Route, ...] = (
    *advertisements.ADVERTISEMENT_ROUTES,
    *reservations.RESERVATION_ROUTES,
    *instructions.INSTRUCTION_ROUTES,
    *clusters.CLUSTER_ROUTES,
    *limits.LIMIT_ROUTES,
    *membership.MEMBERSHIP_ROUTES,
    *audit.AUDIT_ROUTES,
    *about.ABOUT_ROUTES,
)

ROUTES_BY_NAME = {route.name: route for route in ROUTES}
