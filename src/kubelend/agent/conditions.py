"""Conditions of ReservationInstructions and ResourceRequests. Pure.

    ReservationInstruction   Peered, Ready   from what the peering reports
                             Held            from what the provider reports to the broker
    ResourceRequest          Reserved        from its reservation
                             Peered, Ready, Held   follow those of its ReservationInstruction

Each has the generation of the spec that it was derived from, so that `kubectl wait` is exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Final, NamedTuple

from msgspec.structs import replace

from kubelend.agent.ports import Readiness
from kubelend.core.errors import KubelendError
from kubelend.core.lifecycle import Phase
from kubelend.wire import bodies, objects
from kubelend.wire.objects import (
    Condition,
    ReservationInstruction,
    ReservationInstructionStatus,
    ResourceRequest,
    ResourceRequestStatus,
)

PEERED, READY, RESERVED, HELD = "Peered", "Ready", "Reserved", "Held"
"""Types of conditions. `Ready` is also a phase of a ReservationInstruction, with the same meaning."""
NOT_PEERED, CONNECTING, FINISHED = "NotPeered", "Connecting", "Finished"
"""The other phases of a ReservationInstruction."""

NO_PEERING: Final = "NoPeering"
NO_PEERING_MESSAGE: Final = "no peering is configured"
ACTIVATED: Final = "Activated"
PEERING_FAILED: Final = "PeeringFailed"
NOT_RESERVED: Final = "NotReserved"


class PeeringReport(NamedTuple):
    """The state of the peering with the provider that is wanted now."""

    phase: str
    reason: str
    """Reason of the conditions, in CamelCase."""
    message: str
    is_peered: bool | None = None
    """None if that is not known now: what was known before stays."""
    node: str = ""


def report_connecting(cluster: str) -> PeeringReport:
    return PeeringReport(CONNECTING, "Connecting", f"connecting to {cluster}", is_peered=False)


def report_readiness(found: Readiness) -> PeeringReport:
    if found.is_ready:
        return PeeringReport(READY, "NodeReady", found.reason, is_peered=True, node=found.node)
    reason = "NodeNotReady" if found.is_peered else "Connecting"
    return PeeringReport(CONNECTING, reason, found.reason, found.is_peered, found.node)


def report_failure(error: KubelendError) -> PeeringReport:
    return PeeringReport(CONNECTING, PEERING_FAILED, str(error))


def report_no_peering(*, is_active: bool) -> PeeringReport:
    """Without a peering a reservation is ready if another client has activated it."""
    if is_active:
        message = f"activated by another client; {NO_PEERING_MESSAGE}"
        return PeeringReport(READY, ACTIVATED, message, is_peered=False)
    return PeeringReport(NOT_PEERED, NO_PEERING, NO_PEERING_MESSAGE, is_peered=False)


def report_no_provider() -> PeeringReport:
    return PeeringReport(CONNECTING, "NoProvider", "no provider assigned", is_peered=False)


def with_started(found: ReservationInstruction, cluster: str = "") -> ReservationInstructionStatus:
    """The status with a provider to be disconnected from in the end: that of the spec, if none is given."""
    cluster = cluster or found.spec.target_cluster_id
    started = set_member(found.status.started_cluster_ids, cluster, is_in=True)
    return replace(found.status, started_cluster_ids=started)


def apply_report(
    found: ReservationInstruction, cluster: str, report: PeeringReport, now: datetime
) -> ReservationInstructionStatus:
    """The status with what the peering reports about this provider."""
    status = found.status
    peered = set_member(status.peered_cluster_ids, cluster, is_in=report.is_peered)
    reported = (
        _condition(
            PEERED, cluster in peered, *_peered_reason(cluster in peered, cluster, report), found
        ),
        _condition(READY, report.phase == READY, report.reason, report.message, found),
    )
    return replace(
        status,
        phase=report.phase,
        message=report.message,
        node_name=report.node,
        peered_cluster_ids=peered,
        conditions=objects.merge_conditions(status.conditions, reported, now),
    )


def _peered_reason(is_peered: bool, cluster: str, report: PeeringReport) -> tuple[str, str]:
    """Reason and message of the condition Peered."""
    if is_peered:
        return "Connected", f"peered with {cluster}"
    if report.reason == ACTIVATED:
        return NO_PEERING, NO_PEERING_MESSAGE
    return report.reason, report.message


def apply_disconnecting(
    found: ReservationInstruction, cluster: str, readiness: Readiness, now: datetime
) -> ReservationInstructionStatus:
    """The status while the node is drained and removed. The message of an ended reservation stays."""
    status = found.status
    is_peered = cluster in status.peered_cluster_ids
    known = _condition(PEERED, is_peered, readiness.step, readiness.reason, found)
    return replace(status, conditions=objects.merge_conditions(status.conditions, [known], now))


def apply_hold_report(
    found: ReservationInstruction, held: bodies.HoldReport | None, now: datetime
) -> tuple[Condition, ...]:
    """The conditions with what the provider reports; without a report after a failover it is unknown."""
    known = find(found.status.conditions, HELD)
    if held is not None:
        reported = _condition(HELD, held.held, held.reason, held.message, found)
    elif known is not None:
        message = f"{found.spec.target_cluster_id} has not reported it yet"
        reported = replace(_condition(HELD, False, "NotReported", message, found), status="Unknown")
    else:
        return found.status.conditions
    return objects.merge_conditions(found.status.conditions, [reported], now)


def apply_disconnected(
    found: ReservationInstruction, cluster: str, now: datetime
) -> ReservationInstructionStatus:
    """The status after everything was removed that was created for this provider."""
    status = found.status
    peered = set_member(status.peered_cluster_ids, cluster, is_in=False)
    started = set_member(status.started_cluster_ids, cluster, is_in=False)
    status = replace(status, peered_cluster_ids=peered, started_cluster_ids=started)
    known = find(status.conditions, PEERED)
    if peered or (known is not None and known.status != "True"):
        return status
    gone = _condition(PEERED, False, "Disconnected", f"disconnected from {cluster}", found)
    merged = objects.merge_conditions(status.conditions, [gone], now)
    return replace(status, node_name="", conditions=merged)


def apply_finished(
    found: ReservationInstruction, message: str, now: datetime
) -> ReservationInstructionStatus:
    """The status when the reservation has ended; the peering is removed afterwards."""
    names = [READY] if find(found.status.conditions, HELD) is None else [READY, HELD]
    over = [_condition(name, False, FINISHED, message, found) for name in names]
    merged = objects.merge_conditions(found.status.conditions, over, now)
    return replace(
        found.status, phase=FINISHED, message=message, finished_at=now, conditions=merged
    )


def set_member(known: tuple[str, ...], name: str, *, is_in: bool | None) -> tuple[str, ...]:
    """The names with or without this one; unchanged if `is_in` is None."""
    if is_in is None or not name or (name in known) == is_in:
        return known
    return (*known, name) if is_in else tuple(one for one in known if one != name)


# -- of a ResourceRequest


def apply_request_conditions(
    found: ResourceRequest,
    status: ResourceRequestStatus,
    instruction: ReservationInstruction | None,
    now: datetime,
) -> ResourceRequestStatus:
    """The status with its conditions; `instruction` is that of the reservation, if there is one."""
    derived = list(_request_conditions(found, status, instruction))
    is_deleted = found.metadata.deletion_timestamp is not None
    if status.phase == Phase.RESERVED and derived[-1].reason == NO_PEERING and not is_deleted:
        status = replace(status, message=f"{status.message}; {NO_PEERING_MESSAGE}")
    conditions = objects.merge_conditions(found.status.conditions, derived, now)
    return replace(status, conditions=conditions)


def _request_conditions(
    found: ResourceRequest,
    status: ResourceRequestStatus,
    instruction: ReservationInstruction | None,
) -> Iterator[Condition]:
    is_live = status.phase in (Phase.RESERVED, Phase.ACTIVE)
    reason = status.phase if is_live else status.reason or status.phase
    yield _condition(RESERVED, is_live, reason, status.message, found)
    held = _held_condition(found, instruction, status)
    if held is not None:
        yield held
    for name in (PEERED, READY):
        known = _current_condition(instruction, name, status)
        if not is_live:
            yield _condition(name, False, NOT_RESERVED, "no resources are reserved", found)
        elif known is None:
            message = f"waiting for the peering with {status.target_cluster_id}"
            yield _condition(name, False, "Connecting", message, found)
        else:
            yield _condition(name, known.status == "True", known.reason, known.message, found)


def _held_condition(
    found: ResourceRequest,
    instruction: ReservationInstruction | None,
    status: ResourceRequestStatus,
) -> Condition | None:
    """None if its provider has never reported whether it holds the resources."""
    is_current = (
        instruction is not None
        and instruction.spec.target_cluster_id == status.target_cluster_id
        and status.phase in (Phase.RESERVED, Phase.ACTIVE)
    )
    known = find(instruction.status.conditions, HELD) if instruction and is_current else None
    if known is not None:
        return replace(known, observed_generation=found.metadata.generation)
    if find(found.status.conditions, HELD) is None:
        return None
    return _condition(HELD, False, NOT_RESERVED, "no resources are reserved", found)


def _current_condition(
    instruction: ReservationInstruction | None, type: str, status: ResourceRequestStatus
) -> Condition | None:
    """The instruction's condition, if it is about the present provider.

    After a failover the previous provider's stay until the peering has reported on the new one.
    """
    if instruction is None or instruction.spec.target_cluster_id != status.target_cluster_id:
        return None
    known = find(instruction.status.conditions, type)
    if known is None or known.status != "True":
        return known
    is_peered = status.target_cluster_id in instruction.status.peered_cluster_ids
    is_activated = known.reason == ACTIVATED and status.phase == Phase.ACTIVE
    return known if is_peered or is_activated else None


def find(conditions: Iterable[Condition], type: str) -> Condition | None:
    return next((one for one in conditions if one.type == type), None)


def is_true(conditions: Iterable[Condition], type: str) -> bool:
    return any(one.type == type and one.status == "True" for one in conditions)


def has_reason(conditions: Iterable[Condition], type: str, reason: str) -> bool:
    return any(one.type == type and one.reason == reason for one in conditions)


def _condition(
    type: str, is_true: bool, reason: str, message: str, about: objects.Object
) -> Condition:
    return Condition(
        type, str(is_true), reason, message, observed_generation=about.metadata.generation
    )
