"""What a route is: who may call it, what goes in, what comes out. `wire.routes` lists all of them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, NamedTuple

from msgspec import Meta

from kubelend.core import errors
from kubelend.wire import codes


class Access(StrEnum):
    """Who may call a route, beside being verified by certificate."""

    ANYONE = "anyone"  # every verified certificate
    CLUSTER = "cluster"  # a cluster, for itself
    OWNER = "owner"  # the clusters that the object in the path concerns; viewers and admins
    PARTY = "party"  # the two clusters that the reservation in the path concerns
    REQUESTER = "requester"  # the cluster that borrowed what is in the path; admins
    PROVIDER = "provider"  # the cluster that lends what is in the path
    READER = "reader"  # viewers and admins
    ADMIN = "admin"  # admins


OF_BODIES: Final[tuple[codes.Kind, ...]] = (errors.TooSlow, errors.BodyTooLarge)
"""What any route with a body can answer."""

OF_ANY_ROUTE: Final[tuple[codes.Kind, ...]] = (
    errors.InvalidIdentity,
    errors.Forbidden,
    errors.Revoked,
    errors.RateLimited,
    errors.KubelendError,
    errors.Unavailable,
    errors.StoreFailed,
    errors.NotReady,
    errors.NotLeader,
)

OF_ANY_PATH: Final[tuple[codes.Kind, ...]] = (
    errors.InvalidInput,
    errors.NotFound,
    errors.MethodNotAllowed,
)
"""What is answered to a request that comes to no route: it is no HTTP, or has another path or method."""


class Parameter(NamedTuple):
    """A value in the query or a header; all of them are optional."""

    name: str
    description: str
    place: str = "query"
    schema: Any = str


class Route(NamedTuple):
    """One method on one path."""

    name: str
    method: str
    path: str
    summary: str
    access: Access
    answers: dict[int, Any]
    body: Any = None
    parameters: tuple[Parameter, ...] = ()
    errors: tuple[codes.Kind, ...] = ()
    media_type: str = "application/json"
    harmless_twice: bool = False
    """Of a POST: said twice, it changes what once would have changed. Others could answer differently."""

    @property
    def named_errors(self) -> tuple[codes.Kind, ...]:
        """Those that it can answer beside what any route can: its own, and those of reading a body."""
        return self.errors if self.body is None else (*self.errors, *OF_BODIES)

    @property
    def is_repeatable(self) -> bool:
        """Whether sending it again, after an answer was lost, does no harm."""
        return self.method in {"GET", "PUT", "DELETE"} or self.harmless_twice


API = "/api/v1"
EVENT_STREAM = "text/event-stream"
IDEMPOTENCY_KEY = "Idempotency-Key"
LAST_EVENT_ID = "Last-Event-ID"
AGENT = "Kubelend-Agent"
"""Which agent calls: a name that it gives itself at its start. Callers that are no agents have none."""
MAX_KEY_LENGTH = 255
LONGEST_PAGE = 1000
MOST_OVER = 100
"""How many reservations that are over a client is shown which asks for no page."""

_LIMIT = Parameter(
    "limit",
    f"How many at most, up to {LONGEST_PAGE}",
    schema=Annotated[int, Meta(ge=0, le=LONGEST_PAGE)],
)
PAGE = (_LIMIT, Parameter("continue", "Where the page before ended"))
NUMBERED_PAGE = (
    _LIMIT,
    Parameter(
        "continue", "Where the page before ended", schema=Annotated[int, Meta(ge=0, le=2**63 - 1)]
    ),
)


def checked_key(key: str) -> str:
    """An idempotency key travels in a header, which does not take every character."""
    if len(key) > MAX_KEY_LENGTH or not (key.isascii() and key.isprintable()):
        raise errors.InvalidInput(
            f"{key[:40]!r} is no idempotency key",
            hint=f"use up to {MAX_KEY_LENGTH} printable ASCII characters",
        )
    return key
