"""Path matching: the route of a method and path, and its path parameters."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple
from urllib.parse import unquote

from kubelend.core.errors import MethodNotAllowed, NotFound
from kubelend.wire import texts
from kubelend.wire.route import Route
from kubelend.wire.routes import ROUTES


class RouteMatch(NamedTuple):
    """A route and the values of its path parameters."""

    route: Route
    names: dict[str, str]


def match_route(method: str, path: str) -> RouteMatch | NotFound | MethodNotAllowed:
    """Return the route of a request, or an error that the caller raises after authentication.

    `path` is still percent-encoded, because a path parameter may contain an encoded slash.
    """
    plain = _STATIC_ROUTES.get((method, path))
    if plain is not None:
        return plain
    matches = [
        match for route in _routes_of_depth(path) if (match := _match_path(route, path)) is not None
    ]
    for match in matches:
        if match.route.method == method:
            return match
    if matches:
        allowed = sorted(match.route.method for match in matches)
        return MethodNotAllowed(
            f"method {method} is not allowed for {path}",
            hint=f"use {', '.join(allowed)}",
            allowed=allowed,
        )
    return NotFound(f"no such route: {path}", hint="see /openapi.json")


def _routes_of_depth(path: str) -> list[Route]:
    return _ROUTES_BY_DEPTH.get(path.count("/"), [])


def _match_path(route: Route, path: str) -> RouteMatch | None:
    names: dict[str, str] = {}
    for expected, part in zip(route.path.split("/"), path.split("/"), strict=True):
        if expected.startswith("{") and texts.is_plain(name := unquote(part)) and name:
            names[expected.strip("{}")] = name
        elif expected != part:
            return None
    return RouteMatch(route, names)


_STATIC_ROUTES = {
    (route.method, route.path): RouteMatch(route, {}) for route in ROUTES if "{" not in route.path
}
_ROUTES_BY_DEPTH: dict[int, list[Route]] = defaultdict(list)
for _route in ROUTES:
    _ROUTES_BY_DEPTH[_route.path.count("/")].append(_route)
