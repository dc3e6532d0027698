"""Handler of audit log searches."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import msgspec
from aiohttp import web

from kubelend.api.request import JsonResponse, RequestContext
from kubelend.core.audit_log import AuditRecord
from kubelend.core.errors import InvalidInput
from kubelend.wire.admin_bodies import Actor, AuditLine, AuditLog

MAX_LINE_NUMBER = 2**63 - 1


async def audit_log(call: RequestContext) -> web.StreamResponse:
    before = call.query_int("continue", 0, MAX_LINE_NUMBER) or None
    found = await call.app.audit_log.search(_line_filter(call), before, call.page_size())
    more = "" if found.before is None else str(found.before)
    return JsonResponse(
        AuditLog([_audit_line_body(record, digest) for record, digest in found.lines], more)
    )


def _audit_line_body(record: AuditRecord, digest: bytes) -> AuditLine:
    return AuditLine(
        number=record.number,
        at=record.at,
        actor=Actor(record.actor.name, record.actor.role, record.actor.remote, record.actor.via),
        action=record.action,
        subject=record.subject,
        digest=digest.hex(),
        before=record.before,
        after=record.after,
        code=record.code,
        message=record.message,
    )


def _line_filter(call: RequestContext) -> Callable[[AuditRecord], bool]:
    query = call.request.query
    actor, action, subject = query.get("actor"), query.get("action"), query.get("subject")
    since, until = _query_time(call, "since"), _query_time(call, "until")
    refused = call.query_bool("refused") if "refused" in query else None

    def wanted(record: AuditRecord) -> bool:
        return (
            (actor is None or record.actor.name == actor)
            and (action is None or record.action == action)
            and (subject is None or _is_about(record, subject))
            and (refused is None or bool(record.code) is refused)
            and (since is None or record.at >= since)
            and (until is None or record.at < until)
        )

    return wanted


def _is_about(record: AuditRecord, subject: str) -> bool:
    """Whether an entry is about the subject; reservations match their requester and target, too."""
    parties = {record.subject, record.subject.partition("/")[2]}
    parties |= {
        str(facts.get(role)) for facts in (record.before, record.after) for role in _CLUSTER_FACTS
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
