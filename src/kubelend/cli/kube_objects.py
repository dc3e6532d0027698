"""Converts objects of a cluster to the bodies of the REST interface, and requests to objects. Pure.

ResourceRequests, Reservations and ProviderInstructions all become reservations, so that commands print
them alike. `KindAdapter` has what differs between the two kinds that one can borrow with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from fractions import Fraction
from typing import Final, Generic, NamedTuple

from msgspec.structs import replace

from kubelend.core import resources
from kubelend.kube import resources as kube_resources
from kubelend.kube.resources import Resource
from kubelend.stores.kubernetes import objects
from kubelend.wire import bodies, conversion
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation, ReservationSpec
from kubelend.wire.cluster_namespaces import IDEMPOTENCY_ANNOTATION
from kubelend.wire.objects import (
    Condition,
    Kind,
    Metadata,
    ProviderInstruction,
    ReservationInstruction,
    ResourceRequest,
    ResourceRequestSpec,
)

_FINAL = frozenset({"Released", "Failed", "Expired"})
_HOLDS = {"": "Reserved", "Held": "Reserved", "Withdrawn": "Released", "Refused": "Failed"}
_USES = {"Ready": "Active", "Finished": "Released"}
_UNKNOWN = datetime(1970, 1, 1, tzinfo=UTC)


class RequestBody(bodies.Reservation, frozen=True):
    """A reservation made by a ResourceRequest: `id` is the object's name, not the reservation's."""

    reservation_name: str = ""


class InstructedBody(RequestBody, frozen=True):
    """A reservation as the cluster's instructions describe it: what `get borrowed` and `get lent` list."""

    node_name: str = ""
    """The virtual node of the requester's cluster, if there is one."""
    used: bodies.Amounts | None = None
    """Sum of the requests of its pods; None if that is not known."""


def body_from_reservation(found: Reservation) -> bodies.Reservation:
    spec, status = found.spec, found.status
    # As the broker defaults it: the name of the namespace, unless that is a cluster namespace.
    default_requester = found.metadata.namespace if status.instruction is None else ""
    return bodies.Reservation(
        id=found.metadata.name,
        requester_id=spec.requester_id or default_requester,
        target_cluster_id=status.target_cluster_id or spec.target_cluster_id,
        requested_resources=spec.requested_resources,
        status=bodies.copy_fields(
            status,
            bodies.ReservationStatus,
            phase=status.phase or "Pending",
            message=status.message if status.phase else "Not reconciled by a broker yet",
        ),
        created_at=_created_at(found.metadata),
        priority=spec.priority,
        duration=spec.duration,
    )


def body_from_request(found: ResourceRequest) -> RequestBody:
    """The body of a ResourceRequest. Expired is a reason of Released, as at the broker."""
    spec, status = found.spec, found.status
    is_expired = status.phase == "Expired"
    return RequestBody(
        id=found.metadata.name,
        requester_id="",
        target_cluster_id=status.target_cluster_id or spec.target_cluster_id,
        requested_resources=spec.amounts,
        status=bodies.ReservationStatus(
            phase="Released" if is_expired else status.phase or "Pending",
            message=status.message if status.phase else "Not reconciled by an agent yet",
            reason="Expired" if is_expired else status.reason,
            expires_at=status.expires_at,
            finished_at=status.last_update_time if status.phase in _FINAL else None,
            held=_held(status.conditions),
        ),
        created_at=_created_at(found.metadata),
        priority=spec.priority,
        duration=spec.duration,
        reservation_name=status.reservation_name,
    )


def body_from_use(found: ReservationInstruction) -> InstructedBody:
    """A reservation that this cluster may use."""
    body = _instructed_body(found, _USES.get(found.status.phase, "Reserved"))
    target, node = found.spec.target_cluster_id, found.status.node_name
    return replace(body, target_cluster_id=target, node_name=node)


def with_use(found: bodies.Reservation, use: ReservationInstruction | None) -> InstructedBody:
    """The reservation of a ResourceRequest, with what only its ReservationInstruction has."""
    if use is None:
        return bodies.copy_fields(found, InstructedBody)
    return bodies.copy_fields(
        found, InstructedBody, cost=use.spec.cost, node_name=use.status.node_name
    )


def body_from_instruction(found: ProviderInstruction) -> InstructedBody:
    """A reservation that this cluster provides."""
    body = _instructed_body(found, _HOLDS.get(found.status.phase, found.status.phase))
    return replace(body, requester_id=found.spec.requester_cluster_id)


def _instructed_body(
    found: ReservationInstruction | ProviderInstruction, phase: str
) -> InstructedBody:
    spec, status = found.spec, found.status
    return InstructedBody(
        id=spec.reservation_name,
        requester_id="",
        target_cluster_id="",
        requested_resources=spec.amounts,
        status=bodies.ReservationStatus(
            phase=phase,
            message=status.message or spec.message,
            expires_at=spec.expires_at,
            finished_at=status.finished_at,
            held=_held(status.conditions),
        ),
        created_at=_created_at(found.metadata),
        cost=spec.cost,
        reservation_name=spec.reservation_name,
    )


def _held(conditions: Iterable[Condition]) -> bodies.HoldReport | None:
    """The condition Held, as the provider has reported it or its agent has written it."""
    for one in conditions:
        if one.type == "Held" and one.status != "Unknown":
            return bodies.HoldReport(one.status == "True", one.reason, one.message)
    return None


def body_from_advertisement(found: ClusterAdvertisement) -> bodies.Cluster:
    spec, status, known = found.spec, found.status, found.spec.resources
    is_cordoned = any(one.reason == "ClusterCordoned" for one in status.conditions)
    made = _created_at(found.metadata)
    return bodies.Cluster(
        replace(
            conversion.advertisement_from_spec(spec),
            resources=bodies.copy_fields(
                known, bodies.Metrics, allocatable=known.allocatable or known.capacity
            ),
        ),
        bodies.ClusterStatus(
            phase=status.phase or "Unknown",
            active=status.phase == "Active",
            score=status.score,
            rating=resources.display_band(Fraction(status.score))
            if status.score
            else "not rated yet",
            last_update_time=status.last_update_time or made,
            valid_until=status.valid_until or made,
            cordoned=is_cordoned or bool(status.cordon_reason),
            cordon_reason=status.cordon_reason,
            reservations=status.reservations,
            message=status.message,
        ),
    )


def resource_request_object(
    metadata: Metadata, request: bodies.ReservationRequest
) -> ResourceRequest:
    wanted = request.requested_resources
    return ResourceRequest(
        metadata,
        bodies.copy_fields(
            request,
            ResourceRequestSpec,
            requested_cpu=str(wanted.cpu),
            requested_memory=str(wanted.memory),
            requested_gpu=str(wanted.gpu),
            requested_storage=str(wanted.storage),
            extended_resources={name: str(amount) for name, amount in wanted.extended.items()},
        ),
    )


def _created_at(metadata: Metadata) -> datetime:
    return metadata.creation_timestamp or _UNKNOWN


class KindAdapter(NamedTuple, Generic[Kind]):
    """Adapts the backend to one kind of object that requests resources."""

    resource: Resource[Kind]
    build: Callable[[Metadata, bodies.ReservationRequest], Kind]
    """The object of a request."""
    to_body: Callable[[Kind], bodies.Reservation]
    """The reservation of an object."""
    is_decided: Callable[[Kind], bool]
    """Whether the broker has decided, or accepted the request as pending."""
    reservation_name: Callable[[Kind], str]
    """The name of the reservation at the broker."""
    is_listed: Callable[[Kind], bool]
    labels: str
    """Label selector of the objects that are listed."""
    controller: str
    """What has to run so that objects are reconciled."""


def _request_is_decided(found: ResourceRequest) -> bool:
    """Pending without a reservation is an agent that has not reached its broker yet."""
    status = found.status
    return bool(status.reservation_name) or status.phase not in ("", "Pending")


RESOURCE_REQUESTS: Final = KindAdapter(
    resource=kube_resources.resource_for(ResourceRequest),
    build=resource_request_object,
    to_body=body_from_request,
    is_decided=_request_is_decided,
    reservation_name=lambda found: found.status.reservation_name,
    is_listed=lambda _: True,
    labels="",
    controller="an agent that serves this namespace",
)
"""In an agent's cluster: the agent borrows for the cluster."""

RESERVATIONS: Final = KindAdapter(
    resource=kube_resources.resource_for(Reservation),
    build=lambda metadata, request: Reservation(
        metadata, bodies.copy_fields(request, ReservationSpec)
    ),
    to_body=body_from_reservation,
    is_decided=lambda found: bool(found.status.phase),
    reservation_name=lambda found: found.metadata.name,
    # An agent's request in its cluster namespace is not the reservation itself.
    is_listed=lambda found: IDEMPOTENCY_ANNOTATION not in found.metadata.annotations,
    labels=f"{objects.ARCHIVED_LABEL}!=true",
    controller="a broker with --broker-interface=kubernetes that serves this namespace",
)
"""In the broker's cluster."""
