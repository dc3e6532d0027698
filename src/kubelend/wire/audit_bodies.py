"""JSON bodies of the audit log."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kubelend.wire.bodies import Body, Timestamp


class Actor(Body, frozen=True):
    """Authenticated caller and its address."""

    name: str
    role: str
    remote: str = ""
    via: Annotated[str, Meta(description="Proxy that forwarded the request")] = ""


class AuditLine(Body, frozen=True):
    """One audit line: a change, or a rejected request."""

    number: Annotated[int, Meta(ge=1)]
    at: Timestamp
    actor: Actor
    action: Annotated[str, Meta(description="Name of the event, or of the rejected route")]
    subject: Annotated[str, Meta(description="kind/name")]
    digest: Annotated[
        str, Meta(description="SHA-256 over the previous digest and the text of this line")
    ]
    before: dict[str, Any] = msgspec.field(default_factory=dict)
    after: dict[str, Any] = msgspec.field(default_factory=dict)
    code: Annotated[
        str, Meta(description="Error code of a rejected request; absent for a change")
    ] = ""
    message: str = ""


class AuditLog(Body, frozen=True):
    """One page of audit lines, newest first. `next` is the continue token of the following page."""

    lines: list[AuditLine]
    next: str = ""
