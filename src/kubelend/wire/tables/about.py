"""Routes about the broker itself."""

from __future__ import annotations

from typing import Any

from kubelend.wire import bodies, grant_bodies
from kubelend.wire.route import API, Access, Route

ABOUT_ROUTES: tuple[Route, ...] = (
    Route(
        "version",
        "GET",
        f"{API}/version",
        "Get the version of the broker",
        Access.ANYONE,
        {200: bodies.Version},
    ),
    Route(
        "grant_keys",
        "GET",
        f"{API}/keys",
        "Get the public keys that verify grants, as a JWK set",
        Access.ANYONE,
        {200: grant_bodies.KeySet},
    ),
    Route(
        "openapi",
        "GET",
        "/openapi.json",
        "Get this OpenAPI document",
        Access.ANYONE,
        {200: dict[str, Any]},
    ),
    Route(
        "healthz",
        "GET",
        "/healthz",
        "Liveness probe",
        Access.ANYONE,
        {200: str},
        media_type="text/plain",
    ),
    Route(
        "readyz",
        "GET",
        "/readyz",
        "Readiness probe; the body says why the broker is not ready",
        Access.ANYONE,
        {200: str, 503: str},
        media_type="text/plain",
    ),
)
