"""The routes of the enrolment listener, where nobody has a certificate yet. There are no others there."""

from __future__ import annotations

from typing import Final, NamedTuple

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

ROUTES: Final = (AUTHORITIES, JOIN)
NAMES: Final = frozenset(route.name for route in ROUTES)
PEM_TYPE: Final = "application/x-pem-file"
