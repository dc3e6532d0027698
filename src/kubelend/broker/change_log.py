"""Logs each decision and each change of state once, at info, after it is durable.

The writer calls `log_changes` after each commit. Every change comes with its audit entry, and the entry
selects the text: a new command needs no logging code. Only the leader commits, so followers log nothing.
What is decided without a change (a rejected request) or consists of several changes (a drain) has a
function here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import lru_cache
from typing import Any, Final, cast

import structlog

from kubelend.core import audit_log, events, resources
from kubelend.core.audit_log import BROKER_ACTOR, Actor, AuditEntry
from kubelend.core.errors import KeyReused, KubelendError, NoCapacity
from kubelend.core.events import Change
from kubelend.core.lifecycle import Phase, Reason, Role
from kubelend.core.members import Member, MembershipStatus, Token
from kubelend.core.models import Cluster, ClusterId, Request, Reservation, ReservationId
from kubelend.core.resources import Resources

LogLine = tuple[str, dict[str, Any]]
"""A constant text and its keys."""

UNKNOWN_ACTION: Final = "Ledger changed"
"""For an action without a text of its own."""

log = structlog.get_logger("kubelend.broker")


def log_changes(changes: Iterable[Change]) -> None:
    """Logs durable changes. Rejections among the audit entries are logged where they are made."""
    if not log.is_enabled_for(logging.INFO):
        return
    write = log.info  # bound once: the lazy logger of structlog is slower than what it does
    for entry in changes:
        if isinstance(entry, AuditEntry) and not entry.code:
            text, fields = LINES.get(entry.action, _unknown)(entry)
            write(text, **fields, actor=_actor(entry.actor))


def log_rejected(request: Request, error: KubelendError, actor: Actor) -> None:
    """Logs a request that was not placed, with the number of clusters for each rejection reason."""
    if not log.is_enabled_for(logging.INFO):
        return
    # The message of KeyReused contains the idempotency key, which is the caller's secret.
    fields: dict[str, Any] = {} if isinstance(error, KeyReused) else {"error": error.message}
    if isinstance(error, NoCapacity) and error.explanation is not None:
        found = error.explanation
        reasons = {str(reason): count for reason, count in found.rejections.items()}
        fields = {"clusters": found.total, "rejections": reasons}
    log.info(
        "Reservation rejected",
        requester=request.requester,
        **_amounts(request.resources),
        reason=error.code,
        **fields,
        actor=_actor(actor),
    )


def log_renewal_rejected(reservation: ReservationId, error: KubelendError, actor: Actor) -> None:
    log.info(
        "Reservation renewal rejected",
        reservation=reservation,
        reason=error.code,
        error=error.message,
        actor=_actor(actor),
    )


def log_drained(cluster: ClusterId, reservations: int, actor: Actor) -> None:
    """Logs the end of a drain; each reservation that was moved or released has its own line."""
    log.info("Cluster drained", cluster=cluster, reservations=reservations, actor=_actor(actor))


def _actor(actor: Actor) -> str:
    return actor.name if actor is BROKER_ACTOR else f"{actor.role}/{actor.name}"


def _amounts(requested: Resources) -> dict[str, Any]:
    """Extended resources apart: their names are the users', and must not replace a key of the line."""
    amounts: dict[str, Any] = {
        "cpu": _quantity("cpu", requested.cpu),
        "memory": _quantity("memory", requested.memory),
    }
    if requested.gpu:
        amounts["gpu"] = _quantity("gpu", requested.gpu)
    if requested.storage:
        amounts["storage"] = _quantity("storage", requested.storage)
    if requested.extended:
        amounts["extended"] = {
            name: _quantity(name, amount) for name, amount in requested.extended.items()
        }
    return amounts


_quantity = lru_cache(maxsize=4096)(resources.format_amount)


def _time(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat()


def _unknown(entry: AuditEntry) -> LogLine:
    return UNKNOWN_ACTION, {"action": entry.action, "subject": entry.subject}


# -- reservations


def _of_reservation(text: str) -> Callable[[AuditEntry], LogLine]:
    return lambda entry: (text, _about(_reservation(entry)))


def _requested(entry: AuditEntry) -> LogLine:
    found = _reservation(entry)
    if found.phase is Phase.PENDING:
        return "Reservation queued", {
            "reservation": found.id,
            "requester": found.requester,
            **_amounts(found.request.resources),
            "wait_until": _time(found.wait_until),
            "reason": found.message,
        }
    return "Reservation placed", _placement(found)


def _placed(entry: AuditEntry) -> LogLine:
    found = _reservation(entry)
    fields = _placement(found)
    if found.reason is not Reason.MOVED:
        return "Reservation placed", fields
    if isinstance(entry.before, Reservation):
        fields["previous_cluster"] = entry.before.target
    # Others move it because the provider refused it or is drained; the broker itself only in a failover.
    is_failover = entry.actor is BROKER_ACTOR
    return ("Reservation failed over" if is_failover else "Reservation moved"), fields


def _released(entry: AuditEntry) -> LogLine:
    found = _reservation(entry)
    if found.reason is Reason.EXPIRED:
        return "Reservation expired", _about(found)
    return "Reservation released", {**_about(found), "reason": found.reason}


def _renewed(entry: AuditEntry) -> LogLine:
    found = _reservation(entry)
    return "Reservation renewed", {**_about(found), "expires_at": _time(found.expires_at)}


def _hold_reported(entry: AuditEntry) -> LogLine:
    found = _reservation(entry)
    held = found.held
    fields = {} if held is None else {"reason": held.reason, "message": held.message}
    return "Reservation hold reported", {**_about(found), **fields}


def _failed(entry: AuditEntry) -> LogLine:
    found = _reservation(entry)
    return "Reservation failed", {
        **_about(found),
        "reason": found.reason,
        "message": found.message,
    }


def _reservation(entry: AuditEntry) -> Reservation:
    return cast("Reservation", entry.after)


def _about(found: Reservation) -> dict[str, Any]:
    return {"reservation": found.id, "requester": found.requester, "cluster": found.target}


def _placement(found: Reservation) -> dict[str, Any]:
    return {
        **_about(found),
        **_amounts(found.request.resources),
        "expires_at": _time(found.expires_at),
    }


# -- clusters, and their limits


def _advertised(entry: AuditEntry) -> LogLine:
    cluster = cast("Cluster", entry.after)
    if entry.before is not None:
        return "Cluster advertisement changed", {"cluster": cluster.id}
    amounts = _amounts(cluster.advertisement.allocatable)
    return "Cluster registered", {"cluster": cluster.id, **amounts}


def _cordoned(entry: AuditEntry) -> LogLine:
    cluster = cast("Cluster", entry.after)
    return "Cluster cordoned", {"cluster": cluster.id, "reason": cluster.cordon}


def _of_cluster(text: str) -> Callable[[AuditEntry], LogLine]:
    return lambda entry: (text, {"cluster": _name(entry)})


def _of_limits(field: str) -> Callable[[AuditEntry], LogLine]:
    def line(entry: AuditEntry) -> LogLine:
        verb = "deleted" if getattr(entry.after, field, None) is None else "set"
        return f"{field.title()} {verb}", {"cluster": _name(entry)}

    return line


def _name(entry: AuditEntry) -> str:
    return entry.subject.partition("/")[2]


# -- members and tokens


def _of_member(text: str) -> Callable[[AuditEntry], LogLine]:
    return lambda entry: (text, _about_member(entry))


def _approved(entry: AuditEntry) -> LogLine:
    """Joined with a token (new, or approved before), or approved by an administrator."""
    before, after = cast("Member | None", entry.before), cast("Member", entry.after)
    by_token = before is None or before.decided_at == after.decided_at
    return ("Member joined" if by_token else "Member approved"), _about_member(entry)


def _certified(entry: AuditEntry) -> LogLine:
    certificate, fields = cast("Member", entry.after).certificate, _about_member(entry)
    if certificate is not None:
        fields |= {"serial": certificate.serial, "expires_at": _time(certificate.expires_at)}
    return "Certificate issued", fields


def _revoked(entry: AuditEntry) -> LogLine:
    """A removed member stays revoked until its last certificate has expired."""
    member, fields = cast("Member", entry.after), _about_member(entry)
    if member.forget_at is not None:
        return "Member removed", {**fields, "revoked_until": _time(member.forget_at)}
    return "Member revoked", {**fields, "reason": member.reason}


def _removed(entry: AuditEntry) -> LogLine:
    is_denied = cast("Member", entry.before).status is MembershipStatus.PENDING
    return ("Member denied" if is_denied else "Member removed"), _about_member(entry)


def _about_member(entry: AuditEntry) -> dict[str, Any]:
    member = cast("Member", entry.after or entry.before)
    fields: dict[str, Any] = {"member": f"{member.role}/{member.name}"}
    return fields | {"cluster": member.name} if member.role is Role.CLUSTER else fields


def _of_token(text: str) -> Callable[[AuditEntry], LogLine]:
    def line(entry: AuditEntry) -> LogLine:
        token = cast("Token", entry.after or entry.before)
        return text, {
            "token_id": token.id,
            "role": token.role,
            "uses_left": token.uses_left,
            "expires_at": _time(token.expires_at),
        }

    return line


def _truncated(entry: AuditEntry) -> LogLine:
    return "Audit log truncated", {"last_line": _name(entry).partition(":")[0]}


LINES: Final[dict[str, Callable[[AuditEntry], LogLine]]] = {
    events.Requested.__name__: _requested,
    events.TakenOver.__name__: _of_reservation("Reservation taken over"),
    events.Placed.__name__: _placed,
    events.FailoverBlocked.__name__: _of_reservation("Reservation failover blocked, will retry"),
    events.ProviderRecovered.__name__: _of_reservation("Reservation provider recovered"),
    events.Acknowledged.__name__: _of_reservation("Reservation acknowledged"),
    events.HoldReported.__name__: _hold_reported,
    events.Activated.__name__: _of_reservation("Reservation activated"),
    events.Renewed.__name__: _renewed,
    events.Released.__name__: _released,
    events.Failed.__name__: _failed,
    events.Advertised.__name__: _advertised,
    events.Cordoned.__name__: _cordoned,
    events.Uncordoned.__name__: _of_cluster("Cluster uncordoned"),
    events.ClusterRemoved.__name__: _of_cluster("Cluster removed"),
    events.PolicySet.__name__: _of_limits("policy"),
    events.QuotaSet.__name__: _of_limits("quota"),
    events.JoinRequested.__name__: _of_member("Member join requested"),
    events.JoinDenied.__name__: _of_member("Member denied"),
    events.MemberApproved.__name__: _approved,
    events.CertificateIssued.__name__: _certified,
    events.MemberRevoked.__name__: _revoked,
    events.MemberRemoved.__name__: _removed,
    events.TokenCreated.__name__: _of_token("Token created"),
    events.TokenUsed.__name__: _of_token("Token used"),
    events.TokenRemoved.__name__: _of_token("Token deleted"),
    audit_log.TRUNCATED_ACTION: _truncated,
}
"""Lines by the action of their audit entry."""
