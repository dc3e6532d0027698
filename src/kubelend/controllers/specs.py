"""What the specs of the broker's objects ask for and offer, as bodies of the REST interface. Pure.

The same words mean the same in the broker's namespace, in a mailbox and over REST.
"""

from __future__ import annotations

from kubelend.wire import bodies
from kubelend.wire.broker_objects import ClusterAdvertisementSpec, ReservationSpec


def advertisement(spec: ClusterAdvertisementSpec) -> bodies.Advertisement:
    """Reserved and available are never taken from it."""
    amounts = spec.resources
    return bodies.Advertisement(
        cluster_id=spec.cluster_id,
        resources=bodies.Metrics(amounts.capacity, amounts.allocatable, amounts.allocated),
        cluster_name=spec.cluster_name,
        timestamp=spec.timestamp,
        cost=spec.cost,
        labels=spec.labels,
        region=spec.region,
        valid_for=spec.valid_for,
        endpoint_url=spec.endpoint_url,
        policy=spec.policy,
    )


def request(spec: ReservationSpec) -> bodies.ReservationRequest:
    return bodies.ReservationRequest(
        requested_resources=spec.requested_resources,
        priority=spec.priority,
        duration=spec.duration,
        wait=spec.wait,
        policy=spec.policy,
        weights=spec.weights,
        target_cluster_id=spec.target_cluster_id,
        constraints=spec.constraints,
    )
