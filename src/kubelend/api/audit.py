"""Handler of audit log searches."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import msgspec
from aiohttp import web

from kubelend.api.calls import Call, json
from kubelend.core.errors import InvalidInput
from kubelend.core.journal import Told
from kubelend.wire.audit_bodies import Actor, AuditLine, AuditLog

LARGEST = 2**63 - 1


async def audit_log(call: Call) -> web.StreamResponse:
    before = call.number("continue", 0, LARGEST) or None
    found = await call.context.journal.search(_wanted(call), before, call.page_size())
    more = "" if found.before is None else str(found.before)
    return json(AuditLog([_line(told, digest) for told, digest in found.lines], more))


def _line(told: Told, digest: bytes) -> AuditLine:
    return AuditLine(
        number=told.number,
        at=told.at,
        actor=Actor(told.actor.name, told.actor.role, told.actor.remote, told.actor.via),
        action=told.action,
        subject=told.subject,
        digest=digest.hex(),
        before=told.before,
        after=told.after,
        code=told.code,
        message=told.message,
    )


def _wanted(call: Call) -> Callable[[Told], bool]:
    query = call.request.query
    actor, action, subject = query.get("actor"), query.get("action"), query.get("subject")
    since, until = _moment(call, "since"), _moment(call, "until")
    refused = call.flag("refused") if "refused" in query else None

    def wanted(told: Told) -> bool:
        return (
            (actor is None or told.actor.name == actor)
            and (action is None or told.action == action)
            and (subject is None or _concerns(told, subject))
            and (refused is None or bool(told.code) is refused)
            and (since is None or told.at >= since)
            and (until is None or told.at < until)
        )

    return wanted


def _concerns(told: Told, subject: str) -> bool:
    """Whether an entry is about the subject; reservations match their requester and target, too."""
    parties = {told.subject, told.subject.partition("/")[2]}
    parties |= {str(facts.get(role)) for facts in (told.before, told.after) for role in _PARTIES}
    return subject in parties


_PARTIES = ("requester", "target")


def _moment(call: Call, name: str) -> datetime | None:
    text = call.request.query.get(name)
    if text is None:
        return None
    try:
        moment = msgspec.convert(text, datetime)
    except msgspec.ValidationError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise InvalidInput(
            f"{name}: {text[:40]!r} is not a timestamp with a time zone",
            hint="use the form 2026-01-31T12:00:00Z",
        )
    return moment
