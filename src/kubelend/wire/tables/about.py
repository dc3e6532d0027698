"""The broker itself."""

from __future__ import annotations

from typing import Any

from kubelend.wire import bodies, grant_bodies
from kubelend.wire.route import API, Access, Route

ROUTES: tuple[Route, ...] = (
    Route(
        "version",
        "GET",
        f"{API}/version",
        "Which broker answers",
        Access.ANYONE,
        {200: bodies.Version},
    ),
    Route(
        "grant_keys",
        "GET",
        f"{API}/keys",
        "The public keys with which grants can be verified, as a JWK set",
        Access.ANYONE,
        {200: grant_bodies.KeySet},
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
