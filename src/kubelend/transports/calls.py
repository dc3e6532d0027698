"""Calls to the broker as values: what is sent and what came back, without a socket.

`transports.sessions` makes a call from a route, sends it as often as needed, and reads the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from kubelend.core.errors import InvalidInput, UnexpectedAnswer
from kubelend.wire import bodies, routes
from kubelend.wire.route import Route

Body = TypeVar("Body")


class Call(NamedTuple):
    """One request, ready to be sent."""

    route: Route
    target: str
    """Path and query, percent-encoded."""
    body: bytes | None
    headers: Mapping[str, str]


class Answer(NamedTuple):
    """What came back, if it is one of the answers that the route knows."""

    status: int
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", "replace")

    def read(self, kind: type[Body]) -> Body:
        try:
            return msgspec.json.decode(self.body, type=kind)
        except msgspec.MsgspecError as error:
            raise UnexpectedAnswer(f"the broker's answer cannot be read: {error}") from error


def make(
    name: str,
    *names: str,
    query: Mapping[str, str] | None = None,
    body: bodies.Body | None = None,
    headers: Mapping[str, str] | None = None,
) -> Call:
    """The call of a route; `names` fill the places in its path, and what is empty in `query` is left out."""
    route = routes.BY_NAME[name]
    accept = {"Accept": route.media_type, **(headers or {})}
    if body is None:
        return Call(route, _target(route, names, query or {}), None, accept)
    accept["Content-Type"] = "application/json"
    return Call(route, _target(route, names, query or {}), msgspec.json.encode(body), accept)


def page(limit: int, after: str = "") -> dict[str, str]:
    """The query for one page."""
    return {"limit": str(limit) if limit else "", "continue": after}


def _target(route: Route, names: tuple[str, ...], query: Mapping[str, str]) -> str:
    rest = iter(names)
    parts = [_segment(next(rest)) if part[:1] == "{" else part for part in route.path.split("/")]
    wanted = {name: value for name, value in query.items() if value}
    return "/".join(parts) + (f"?{urlencode(wanted)}" if wanted else "")


def _segment(name: str) -> str:
    """A name as one segment of a path, whatever is in it."""
    if not name:
        raise InvalidInput("a name is empty", hint="give the name of a cluster or reservation")
    # Dots alone would walk up the path, and quoting leaves them as they are.
    return name.replace(".", "%2E") if name in {".", ".."} else quote(name, safe="")
