"""Maps the specs of the broker's objects to bodies of the REST interface. Pure.

Fields mean the same in the broker's namespace, in a cluster namespace and over REST.
"""

from __future__ import annotations

from kubelend.wire import bodies
from kubelend.wire.broker_objects import ClusterAdvertisementSpec, ReservationSpec


def advertisement_from_spec(spec: ClusterAdvertisementSpec) -> bodies.Advertisement:
    """Ignores reserved and available, which the broker computes."""
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


def request_from_spec(spec: ReservationSpec) -> bodies.ReservationRequest:
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
