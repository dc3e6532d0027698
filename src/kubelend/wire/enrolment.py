"""The routes of the enrolment listener, where nobody has a certificate yet. There are no others there."""

from __future__ import annotations

from typing import Final, NamedTuple

from kubelend.core import errors
from kubelend.wire import codes

PREFIX: Final = "/enrol/v1"


class EnrolmentRoute(NamedTuple):
    """One method on one path; the name is that of logs and metrics."""

    name: str
    method: str
    path: str


AUTHORITIES: Final = EnrolmentRoute("enrol_authorities", "GET", f"{PREFIX}/authorities")
"""Whom to trust, in PEM form. Anybody may ask; a newcomer believes only what its pin is for."""

JOIN: Final = EnrolmentRoute("join", "POST", f"{PREFIX}/join")
"""`JoinRequest` in; 200 and `Joined`, or 202 and `JoinWaits`, out."""

ERRORS: Final[tuple[codes.Kind, ...]] = (
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
"""What can be answered instead, on this listener."""

ROUTES: Final = (AUTHORITIES, JOIN)
NAMES: Final = frozenset(route.name for route in ROUTES)
PEM_TYPE: Final = "application/x-pem-file"
