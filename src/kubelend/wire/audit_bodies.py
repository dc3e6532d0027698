"""The journal's lines as the REST interface shows them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kubelend.wire.bodies import Body, Timestamp


class Actor(Body, frozen=True):
    """Who did it: by certificate, and from which address."""

    name: str
    role: str
    remote: str = ""
    via: Annotated[str, Meta(description="The proxy that passed the call on")] = ""


class AuditLine(Body, frozen=True):
    """One line: who did what, or was refused it."""

    number: Annotated[int, Meta(ge=1)]
    at: Timestamp
    actor: Actor
    action: Annotated[str, Meta(description="An event, or the route that was refused")]
    subject: Annotated[str, Meta(description="kind/name")]
    digest: Annotated[str, Meta(description="SHA-256 over the digest before and this line's text")]
    before: dict[str, Any] = msgspec.field(default_factory=dict)
    after: dict[str, Any] = msgspec.field(default_factory=dict)
    code: Annotated[str, Meta(description="Why it was refused; absent if it was done")] = ""
    message: str = ""


class AuditLog(Body, frozen=True):
    """Lines, newest first; `next` continues with older ones."""

    lines: list[AuditLine]
    next: str = ""
