"""Events of ResourceRequests and instructions: one for each step that a status update has made. Pure.

`kubectl describe` shows them. The same steps are logged; conditions and phases have the present state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from kubelend.agent import conditions, holds
from kubelend.agent.conditions import (
    FINISHED,
    NO_PEERING,
    NOT_RESERVED,
    PEERED,
    PEERING_FAILED,
    READY,
)
from kubelend.agent.ports import Readiness
from kubelend.agent.resource_requests import REQUESTING_REASON
from kubelend.wire.events import EventRecord
from kubelend.wire.objects import ProviderInstruction, ReservationInstruction, ResourceRequest

_NORMAL_PHASES: Final = frozenset({"Reserved", "Active", "Released", "Expired"})
ACCEPTED: Final = "Accepted"
"""The cluster has accepted a reservation: its amount is counted."""
_ENDED: Final = frozenset({FINISHED, NOT_RESERVED})
"""Reasons of a condition that is False because the reservation has ended, which has an Event of its own."""


def request_events(before: ResourceRequest, after: ResourceRequest) -> Iterator[EventRecord]:
    was, now = before.status, after.status
    if now.sent_request is not None and was.sent_request is None:
        yield _normal("Requested", _requested_text(after), after)
    fields = ("phase", "reservation_name", "target_cluster_id")
    if any(getattr(was, name) != getattr(now, name) for name in fields):
        yield from _phase_events(before, after)
    elif now.phase == "Pending" and now.reason not in (was.reason, REQUESTING_REASON):
        yield EventRecord("Warning", now.reason, now.message, after)
    yield from _held_events(before, after)
    yield from _peering_events(before, after)


def _phase_events(before: ResourceRequest, after: ResourceRequest) -> Iterator[EventRecord]:
    was, now = before.status, after.status
    if now.phase == "Failed":
        reason = "Failed" if now.reservation_name else "Rejected"
        yield EventRecord("Warning", reason, now.message, after)
    elif now.phase == "Pending" and now.reservation_name:
        yield _normal("Queued", now.message, after)
    elif now.phase == "Reserved" and was.target_cluster_id not in ("", now.target_cluster_id):
        yield _normal("Moved", now.message, after)
    elif now.phase in _NORMAL_PHASES:
        yield _normal(now.phase, now.message, after)


def instruction_events(
    before: ReservationInstruction, after: ReservationInstruction
) -> Iterator[EventRecord]:
    was, now = before.status, after.status
    if now.delivered and not was.delivered:
        yield _normal("Delivered", after.spec.message, after)
    for cluster in sorted({*now.started_cluster_ids} - {*was.started_cluster_ids}):
        yield _normal("PeeringStarted", f"Connecting to cluster {cluster}", after)
    yield from _held_events(before, after)
    yield from _peering_events(before, after)
    if now.phase == FINISHED != was.phase:
        yield _normal(FINISHED, now.message, after)
    for cluster in sorted({*was.started_cluster_ids} - {*now.started_cluster_ids}):
        yield _normal("Disconnected", f"Disconnected from cluster {cluster}", after)


_DISCONNECT_EVENTS: Final[dict[str, Literal["Normal", "Warning"]]] = {
    "Draining": "Normal",
    "ProviderUnreachable": "Warning",
    "ForceUnpeering": "Warning",
}
"""Types of the Events about steps of a disconnection. Other steps have none."""


def disconnect_event(
    readiness: Readiness, cluster: str, about: ReservationInstruction
) -> EventRecord | None:
    kind = _DISCONNECT_EVENTS.get(readiness.step)
    message = f"Disconnecting from cluster {cluster}: {readiness.reason}"
    return None if kind is None else EventRecord(kind, readiness.step, message, about)


def hold_events(before: ProviderInstruction, after: ProviderInstruction) -> Iterator[EventRecord]:
    """Held is the Event of placeholders, once they really hold it."""
    phase = after.status.phase
    if phase != before.status.phase:
        kind: Literal["Normal", "Warning"] = "Warning" if phase == holds.REFUSED else "Normal"
        reason = ACCEPTED if phase == holds.HELD else phase
        yield EventRecord(kind, reason, after.status.message or after.spec.message, after)
    was, now = holds.find_held_condition(before), holds.find_held_condition(after)
    is_new = now is not None and (was is None or was.reason != now.reason)
    if now is not None and is_new and now.reason == holds.OVERCOMMITTED:
        yield EventRecord("Warning", now.reason, now.message, after)


def _held_events(
    before: ResourceRequest | ReservationInstruction,
    after: ResourceRequest | ReservationInstruction,
) -> Iterator[EventRecord]:
    """Of the condition Held, which is the provider's."""
    was = conditions.find(before.status.conditions, conditions.HELD)
    now = conditions.find(after.status.conditions, conditions.HELD)
    if now is None or now.reason in _ENDED or (was is not None and was.reason == now.reason):
        return
    kind: Literal["Normal", "Warning"] = (
        "Normal" if now.status == "True" or now.reason == holds.NOT_CONFIGURED else "Warning"
    )
    yield EventRecord(kind, now.reason, f"Provider: {now.message}", after)


def _peering_events(
    before: ResourceRequest | ReservationInstruction,
    after: ResourceRequest | ReservationInstruction,
) -> Iterator[EventRecord]:
    """Of the conditions Peered and Ready, which both kinds have."""
    peered = conditions.find(after.status.conditions, PEERED)
    was_peered = conditions.is_true(before.status.conditions, PEERED)
    if peered is not None and peered.status == "True" and not was_peered:
        yield _normal(PEERED, f"Clusters are {peered.message}", after)
    was = conditions.find(before.status.conditions, READY)
    now = conditions.find(after.status.conditions, READY)
    if now is None:
        return
    was_ready = was is not None and was.status == "True"
    if now.status == "True" and not was_ready:
        yield _normal(READY, f"Resources are ready: {now.message}", after)
    elif was_ready and now.status != "True" and now.reason not in _ENDED:
        yield EventRecord("Warning", "NotReady", f"No longer ready: {now.message}", after)
    elif now.reason == PEERING_FAILED and (was is None or was.message != now.message):
        yield EventRecord("Warning", PEERING_FAILED, now.message, after)
    elif now.reason == NO_PEERING and (was is None or was.reason != NO_PEERING):
        yield EventRecord(
            "Warning", NO_PEERING, f"The reservation is not usable: {now.message}", after
        )


def _requested_text(about: ResourceRequest) -> str:
    spec = about.spec
    return f"Requested {spec.requested_cpu} CPU / {spec.requested_memory} Memory from the broker"


def _normal(
    reason: str, message: str, about: ResourceRequest | ReservationInstruction
) -> EventRecord:
    return EventRecord("Normal", reason, message, about)
