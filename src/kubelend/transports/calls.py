"""Requests to the broker and their responses as values, without I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from kubelend.core.errors import InvalidInput, UnexpectedAnswer
from kubelend.wire import bodies, routes
from kubelend.wire.route import Route

Body = TypeVar("Body")


class PreparedRequest(NamedTuple):
    """One request."""

    route: Route
    target: str
    """Path and query, percent-encoded."""
    body: bytes | None
    headers: Mapping[str, str]


class Response(NamedTuple):
    """A response with a status that the route defines."""

    status: int
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    def decode(self, kind: type[Body]) -> Body:
        try:
            return msgspec.json.decode(self.body, type=kind)
        except msgspec.MsgspecError as error:
            raise UnexpectedAnswer(f"cannot decode the response of the broker: {error}") from error


def make_request(
    name: str,
    *names: str,
    query: Mapping[str, str] | None = None,
    body: bodies.Body | None = None,
    headers: Mapping[str, str] | None = None,
) -> PreparedRequest:
    """Builds the request of a route; `names` fill its path parameters; empty `query` values are omitted."""
    route = routes.ROUTES_BY_NAME[name]
    accept = {"Accept": route.media_type, **(headers or {})}
    if body is None:
        return PreparedRequest(route, _request_target(route, names, query or {}), None, accept)
    accept["Content-Type"] = "application/json"
    return PreparedRequest(
        route, _request_target(route, names, query or {}), msgspec.json.encode(body), accept
    )


def page_query(limit: int, after: str = "") -> dict[str, str]:
    """Returns the query parameters of one page."""
    return {"limit": str(limit) if limit else "", "continue": after}


def _request_target(route: Route, names: tuple[str, ...], query: Mapping[str, str]) -> str:
    rest = iter(names)
    parts = [
        _path_segment(next(rest)) if part[:1] == "{" else part for part in route.path.split("/")
    ]
    wanted = {name: value for name, value in query.items() if value}
    return "/".join(parts) + (f"?{urlencode(wanted)}" if wanted else "")


def _path_segment(name: str) -> str:
    """Encodes a name as one path segment."""
    if not name:
        raise InvalidInput("empty name", hint="pass the name of a cluster or reservation")
    # Dot segments would be resolved, and `quote` does not encode them.
    return name.replace(".", "%2E") if name in {".", ".."} else quote(name, safe="")
