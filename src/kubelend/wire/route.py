"""What a route is: who may call it, what goes in, what comes out. `wire.routes` lists all of them."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, NamedTuple

from msgspec import Meta

from kubelend.core import errors


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
    errors: tuple[type[errors.KubelendError], ...] = ()
    media_type: str = "application/json"


API = "/api/v1"
EVENT_STREAM = "text/event-stream"
IDEMPOTENCY_KEY = "Idempotency-Key"
LAST_EVENT_ID = "Last-Event-ID"
AGENT = "Kubelend-Agent"
"""Which agent calls: a name that it gives itself at its start. Callers that are no agents have none."""
MAX_KEY_LENGTH = 255

_LIMIT = Parameter(
    "limit", "How many at most, up to 1000", schema=Annotated[int, Meta(ge=0, le=1000)]
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
