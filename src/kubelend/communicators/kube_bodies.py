"""Builds the objects of a cluster's namespace from bodies of the REST API."""

from __future__ import annotations

from datetime import timedelta

from msgspec.structs import replace

from kubelend.core import durations
from kubelend.core.errors import InvalidDuration
from kubelend.wire import bodies, mailboxes, quantities
from kubelend.wire.broker_objects import (
    RESERVATION_FINALIZER,
    AdvertisedResources,
    ClusterAdvertisement,
    ClusterAdvertisementSpec,
    Reservation,
    ReservationSpec,
)
from kubelend.wire.objects import AgentRequest, Metadata

_ZERO_QUANTITIES = bodies.Quantities("0", "0")


def cluster_advertisement(
    body: bodies.Advertisement, request: AgentRequest, namespace: str
) -> ClusterAdvertisement:
    """The API server requires `available`; the broker computes its own."""
    amounts = body.resources
    return ClusterAdvertisement(
        Metadata(mailboxes.advertisement_object_name(body.cluster_id), namespace),
        ClusterAdvertisementSpec(
            cluster_id=body.cluster_id,
            resources=AdvertisedResources(
                capacity=amounts.capacity,
                allocated=amounts.allocated or _ZERO_QUANTITIES,
                available=amounts.available or amounts.allocatable or amounts.capacity,
                allocatable=amounts.allocatable,
            ),
            cluster_name=body.cluster_name,
            cost=body.cost,
            timestamp=body.timestamp,
            endpoint_url=body.endpoint_url,
            labels=body.labels,
            region=body.region,
            valid_for=body.valid_for,
            policy=body.policy,
            request=request,
        ),
    )


def with_spec_of(known: ClusterAdvertisement, wanted: ClusterAdvertisement) -> ClusterAdvertisement:
    """The existing object with the spec of the wanted one."""
    return replace(known, spec=wanted.spec)


def reservation_object(
    body: bodies.ReservationRequest, key: str, request: AgentRequest, namespace: str
) -> Reservation:
    """With the broker's finalizer from the start: a deleted object stays until its reservation is
    released.
    """
    metadata = Metadata(
        mailboxes.request_object_name(key),
        namespace,
        finalizers=(RESERVATION_FINALIZER,),
        annotations={mailboxes.IDEMPOTENCY_ANNOTATION: key},
    )
    return Reservation(metadata, replace(reservation_spec(body), request=request))


def reservation_spec(body: bodies.ReservationRequest) -> ReservationSpec:
    """The request as the spec of a Reservation object."""
    return ReservationSpec(
        requested_resources=body.requested_resources,
        target_cluster_id=body.target_cluster_id,
        duration=body.duration,
        priority=body.priority,
        wait=body.wait,
        policy=body.policy,
        weights=body.weights,
        constraints=body.constraints,
    )


def is_same_request(found: Reservation, wanted: Reservation) -> bool:
    return replace(found.spec, request=None) == replace(wanted.spec, request=None)


def check_request(body: bodies.ReservationRequest) -> None:
    """Raises the error of a request that the API server has rejected, by the same class as the REST
    API.
    """
    quantities.parse_reservation_amounts(body.requested_resources)
    if body.duration and durations.parse_duration(body.duration) <= timedelta():
        raise InvalidDuration(f"duration: {body.duration!r} must be greater than zero")
    if body.wait and durations.parse_duration(body.wait) < timedelta():
        raise InvalidDuration(f"wait: {body.wait!r} must not be negative")
