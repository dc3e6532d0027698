"""Handler of audit log searches."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import msgspec
from aiohttp import web

from kubelend.api.request import RequestContext, json_response
from kubelend.core.audit_log import AuditRecord
from kubelend.core.errors import InvalidInput
from kubelend.wire.admin_bodies import Actor, AuditLine, AuditLog

MAX_LINE_NUMBER = 2**63 - 1


async def audit_log(call: RequestContext) -> web.StreamResponse:
    before = call.query_int("continue", 0, MAX_LINE_NUMBER) or None
    found = await call.app.audit_log.search(_line_filter(call), before, call.page_size())
    more = "" if found.before is None else str(found.before)
    return json_response(
        AuditLog([_audit_line_body(told, digest) for told, digest in found.lines], more)
    )


def _audit_line_body(told: AuditRecord, digest: bytes) -> AuditLine:
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


def _line_filter(call: RequestContext) -> Callable[[AuditRecord], bool]:
    query = call.request.query
    actor, action, subject = query.get("actor"), query.get("action"), query.get("subject")
    since, until = _query_time(call, "since"), _query_time(call, "until")
    refused = call.query_bool("refused") if "refused" in query else None

    def wanted(told: AuditRecord) -> bool:
        return (
            (actor is None or told.actor.name == actor)
            and (action is None or told.action == action)
            and (subject is None or _is_about(told, subject))
            and (refused is None or bool(told.code) is refused)
            and (since is None or told.at >= since)
            and (until is None or told.at < until)
        )

    return wanted


def _is_about(told: AuditRecord, subject: str) -> bool:
    """Whether an entry is about the subject; reservations match their requester and target, too."""
    parties = {told.subject, told.subject.partition("/")[2]}
    parties |= {
        str(facts.get(role)) for facts in (told.before, told.after) for role in _CLUSTER_FACTS
    }
    return subject in parties


_CLUSTER_FACTS = ("requester", "target")


def _query_time(call: RequestContext, name: str) -> datetime | None:
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
