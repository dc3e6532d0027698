"""Routes of the enrolment listener, where clients have no certificate yet."""

from __future__ import annotations

from typing import Final, NamedTuple

from kubelend.core import errors
from kubelend.wire import codes

ENROLMENT_PREFIX: Final = "/enrol/v1"


class EnrolmentRoute(NamedTuple):
    """One method on one path. The name is used in logs and metrics."""

    name: str
    method: str
    path: str


AUTHORITIES_ROUTE: Final = EnrolmentRoute(
    "enrol_authorities", "GET", f"{ENROLMENT_PREFIX}/authorities"
)
"""The broker's authorities in PEM form. Public; a client trusts only what matches its pin."""

JOIN_ROUTE: Final = EnrolmentRoute("join", "POST", f"{ENROLMENT_PREFIX}/join")
"""Takes a `JoinRequest`; answers 200 with `Joined` or 202 with `JoinWaits`."""

ENROLMENT_ERRORS: Final[tuple[codes.ErrorClass, ...]] = (
    errors.InvalidInput,
    errors.InvalidIdentity,
    errors.TooSlow,
    errors.Forbidden,
    errors.Revoked,
    errors.TokenRefused,
    errors.NotFound,
    errors.MethodNotAllowed,
    errors.Conflict,
    errors.LimitExceeded,
    errors.RateLimited,
    errors.BodyTooLarge,
    errors.KubelendError,
    errors.Unavailable,
    errors.StoreFailed,
    errors.NotReady,
    errors.NotLeader,
)
"""Errors that the enrolment listener can answer."""

ENROLMENT_ROUTES: Final = (AUTHORITIES_ROUTE, JOIN_ROUTE)
ENROLMENT_ROUTE_NAMES: Final = frozenset(route.name for route in ENROLMENT_ROUTES)
PEM_TYPE: Final = "application/x-pem-file"
