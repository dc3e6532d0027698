"""Every route of the REST interface, once: who may call it, what goes in, what comes out.

The server binds a handler to each name, the client builds its calls from them, and the OpenAPI document
and the table of roles in the documentation are generated from here, so that none of them can differ.
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
    *advertisements.ROUTES,
    *reservations.ROUTES,
    *instructions.ROUTES,
    *clusters.ROUTES,
    *limits.ROUTES,
    *membership.ROUTES,
    *audit.ROUTES,
    *about.ROUTES,
)

BY_NAME = {route.name: route for route in ROUTES}
