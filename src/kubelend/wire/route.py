"""The Route record: access, request and response types, errors; headers and limits of the REST API."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, NamedTuple

from msgspec import Meta

from kubelend.core import errors
from kubelend.wire import json_types


class Access(StrEnum):
    """Callers that may use a route, besides having a verified certificate."""

    ANYONE = "anyone"  # every verified certificate
    CLUSTER = "cluster"  # a cluster, for itself
    OWNER = "owner"  # the clusters that the object in the path concerns; viewers and admins
    PARTY = "party"  # the two clusters that the reservation in the path concerns
    REQUESTER = "requester"  # the cluster that borrowed what is in the path; admins
    PROVIDER = "provider"  # the cluster that lends what is in the path
    READER = "reader"  # viewers and admins
    ADMIN = "admin"  # admins


BODY_ERRORS: Final[tuple[json_types.ErrorClass, ...]] = (errors.TooSlow, errors.BodyTooLarge)
"""Errors of every route with a body."""

COMMON_ERRORS: Final[tuple[json_types.ErrorClass, ...]] = (
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

UNROUTED_ERRORS: Final[tuple[json_types.ErrorClass, ...]] = (
    errors.InvalidInput,
    errors.NotFound,
    errors.MethodNotAllowed,
)
"""Errors of a request without a route: not HTTP, or another path or method."""


class Parameter(NamedTuple):
    """An optional query parameter or header."""

    name: str
    description: str
    location: str = "query"
    schema: Any = str


class Route(NamedTuple):
    """One method on one path."""

    name: str
    method: str
    path: str
    summary: str
    access: Access
    responses: dict[int, Any]
    body: Any = None
    parameters: tuple[Parameter, ...] = ()
    errors: tuple[json_types.ErrorClass, ...] = ()
    media_type: str = "application/json"
    idempotent: bool = False
    """Whether a POST is idempotent."""

    @property
    def declared_errors(self) -> tuple[json_types.ErrorClass, ...]:
        """Errors of this route besides those of all routes: its own, and those of reading a body."""
        return self.errors if self.body is None else (*self.errors, *BODY_ERRORS)

    @property
    def is_repeatable(self) -> bool:
        """Whether the client may retry the request after a lost response."""
        return self.method in {"GET", "PUT", "DELETE"} or self.idempotent


API = "/api/v1"
EVENT_STREAM = "text/event-stream"
IDEMPOTENCY_KEY = "Idempotency-Key"
LAST_EVENT_ID = "Last-Event-ID"
AGENT_HEADER = "Kubelend-Agent"
"""Header with the instance ID of the calling agent, new at each start. Other callers do not send it."""
MAX_KEY_LENGTH = 255
MAX_PAGE_SIZE = 1000
MAX_FINISHED = 100
"""Maximum number of finished reservations in a response without paging."""

_LIMIT = Parameter(
    "limit",
    f"Maximum number of results, up to {MAX_PAGE_SIZE}",
    schema=Annotated[int, Meta(ge=0, le=MAX_PAGE_SIZE)],
)
PAGE_PARAMETERS = (_LIMIT, Parameter("continue", "Continue token of the previous page"))
NUMBERED_PAGE_PARAMETERS = (
    _LIMIT,
    Parameter(
        "continue",
        "Continue token of the previous page",
        schema=Annotated[int, Meta(ge=0, le=2**63 - 1)],
    ),
)


def check_idempotency_key(key: str) -> str:
    """Return the idempotency key if it can be sent in a header; raise an error otherwise."""
    if len(key) > MAX_KEY_LENGTH or not (key.isascii() and key.isprintable()):
        raise errors.InvalidInput(
            f"{key[:40]!r} is not a valid idempotency key",
            hint=f"use up to {MAX_KEY_LENGTH} printable ASCII characters",
        )
    return key
