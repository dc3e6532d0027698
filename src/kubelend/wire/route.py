"""What a route is: who may call it, what goes in, what comes out. `wire.routes` lists all of them."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

from kubelend.core import errors


class Access(StrEnum):
    """Who may call a route, beside being verified by certificate."""

    ANYONE = "anyone"  # every verified certificate
    CLUSTER = "cluster"  # a cluster, for itself
    OWNER = "owner"  # the clusters that a reservation or advertisement concerns; viewers, admins
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
IDEMPOTENCY_KEY = "Idempotency-Key"
LAST_EVENT_ID = "Last-Event-ID"
MAX_KEY_LENGTH = 255

PAGE = (
    Parameter("limit", "How many at most, up to 1000", schema=int),
    Parameter("continue", "Where the page before ended"),
)
