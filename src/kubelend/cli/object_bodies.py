"""Objects of a cluster as the bodies that the broker answers with, so that both are shown alike. Pure.

A ResourceRequest, a Reservation and a ProviderInstruction are all a reservation to whoever reads a table.
"""

from __future__ import annotations

from datetime import UTC, datetime
from fractions import Fraction

from msgspec.structs import replace

from kubelend.communicators import kube_bodies
from kubelend.controllers import specs
from kubelend.core import ratings
from kubelend.wire import bodies
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation
from kubelend.wire.objects import (
    Metadata,
    ProviderInstruction,
    ResourceRequest,
    ResourceRequestSpec,
)

_FINAL = frozenset({"Released", "Failed", "Expired"})
_HOLDS = {"": "Reserved", "Held": "Reserved", "Withdrawn": "Released", "Refused": "Failed"}
_UNKNOWN = datetime(1970, 1, 1, tzinfo=UTC)


class Request(bodies.Reservation, frozen=True):
    """A ResourceRequest; its name is the user's, and the broker has another for it."""

    reservation_name: str = ""


def of_reservation(found: Reservation) -> bodies.Reservation:
    spec, status = found.spec, found.status
    return bodies.Reservation(
        id=found.metadata.name,
        requester_id=spec.requester_id or _namesake(found),
        target_cluster_id=status.target_cluster_id or spec.target_cluster_id,
        requested_resources=spec.requested_resources,
        status=bodies.ReservationStatus(
            phase=status.phase or "Pending",
            message=status.message if status.phase else "No broker has looked at it yet",
            reason=status.reason,
            reserved_at=status.reserved_at,
            expires_at=status.expires_at,
            wait_until=status.wait_until,
            acknowledged_at=status.acknowledged_at,
            activated_at=status.activated_at,
            finished_at=status.finished_at,
        ),
        created_at=_made(found.metadata),
        priority=spec.priority,
        duration=spec.duration,
    )


def of_request(found: ResourceRequest) -> Request:
    """Expired is a reason of Released, as the broker has it."""
    spec, status = found.spec, found.status
    is_expired = status.phase == "Expired"
    return Request(
        id=found.metadata.name,
        requester_id="",
        target_cluster_id=status.target_cluster_id or spec.target_cluster_id,
        requested_resources=spec.amounts,
        status=bodies.ReservationStatus(
            phase="Released" if is_expired else status.phase or "Pending",
            message=status.message if status.phase else "No agent has looked at it yet",
            reason="Expired" if is_expired else status.reason,
            expires_at=status.expires_at,
            finished_at=status.last_update_time if status.phase in _FINAL else None,
        ),
        created_at=_made(found.metadata),
        priority=spec.priority,
        duration=spec.duration,
        reservation_name=status.reservation_name,
    )


def of_instruction(found: ProviderInstruction) -> bodies.Reservation:
    """What this cluster lends."""
    spec, status = found.spec, found.status
    return bodies.Reservation(
        id=spec.reservation_name,
        requester_id=spec.requester_cluster_id,
        target_cluster_id="",
        requested_resources=spec.amounts,
        status=bodies.ReservationStatus(
            phase=_HOLDS.get(status.phase, status.phase),
            message=status.message or spec.message,
            expires_at=spec.expires_at,
            finished_at=status.finished_at,
        ),
        created_at=_made(found.metadata),
    )


def of_cluster(found: ClusterAdvertisement) -> bodies.Cluster:
    spec, status, known = found.spec, found.status, found.spec.resources
    is_closed = any(one.reason == "ClusterCordoned" for one in status.conditions)
    made = _made(found.metadata)
    return bodies.Cluster(
        replace(
            specs.advertisement(spec),
            resources=bodies.Metrics(
                capacity=known.capacity,
                allocatable=known.allocatable or known.capacity,
                allocated=known.allocated,
                reserved=known.reserved,
                available=known.available,
            ),
        ),
        bodies.ClusterStatus(
            phase=status.phase or "Unknown",
            active=status.phase == "Active",
            score=status.score,
            rating=_band(status.score),
            last_update_time=status.last_update_time or made,
            valid_until=status.valid_until or made,
            cordoned=is_closed or bool(status.cordon_reason),
            cordon_reason=status.cordon_reason,
            reservations=status.reservations,
            message=status.message,
        ),
    )


def reservation(metadata: Metadata, request: bodies.ReservationRequest) -> Reservation:
    return Reservation(metadata, kube_bodies.spec(request))


def resource_request(metadata: Metadata, request: bodies.ReservationRequest) -> ResourceRequest:
    wanted = request.requested_resources
    return ResourceRequest(
        metadata,
        ResourceRequestSpec(
            requested_cpu=str(wanted.cpu),
            requested_memory=str(wanted.memory),
            requested_gpu=str(wanted.gpu),
            requested_storage=str(wanted.storage),
            extended_resources={name: str(amount) for name, amount in wanted.extended.items()},
            priority=request.priority,
            duration=request.duration,
            wait=request.wait,
            policy=request.policy,
            weights=request.weights,
            target_cluster_id=request.target_cluster_id,
            constraints=request.constraints,
        ),
    )


def _namesake(found: Reservation) -> str:
    """As the broker has it: who is not named is called as the namespace is, unless it is a mailbox."""
    return found.metadata.namespace if found.status.response is None else ""


def _made(metadata: Metadata) -> datetime:
    return metadata.creation_timestamp or _UNKNOWN


def _band(score: str) -> str:
    return ratings.band(Fraction(score)) if score else "not rated yet"
