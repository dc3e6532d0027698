"""The two sides on which one can borrow by objects: the agent's cluster, and the broker's. Pure.

They differ in the kind of object and in who answers it. `object_clerks` does the same with either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, NamedTuple

from kubelend.cli import object_bodies
from kubelend.kube import resources
from kubelend.kube.resources import Resource
from kubelend.stores import kube_objects
from kubelend.wire import bodies
from kubelend.wire.broker_objects import Reservation
from kubelend.wire.objects import Kind, Metadata, ResourceRequest


class Side(NamedTuple, Generic[Kind]):
    """How to borrow with one kind of object."""

    resource: Resource[Kind]
    wanted: Callable[[Metadata, bodies.ReservationRequest], Kind]
    """The object that asks for something."""
    told: Callable[[Kind], bodies.Reservation]
    """What one says."""
    is_answered: Callable[[Kind], bool]
    """Whether it was decided, or is waiting because it was told to."""
    broker_name: Callable[[Kind], str]
    """What the broker calls it."""
    is_shown: Callable[[Kind], bool]
    labels: str
    """Of those that are shown in lists."""
    answering: str
    """Who has to be there for it."""


def _request_is_answered(found: ResourceRequest) -> bool:
    """Pending without a reservation is an agent that has not reached its broker yet."""
    status = found.status
    return bool(status.reservation_name) or status.phase not in ("", "Pending")


AGENT: Final = Side(
    resource=resources.of(ResourceRequest),
    wanted=object_bodies.resource_request,
    told=object_bodies.of_request,
    is_answered=_request_is_answered,
    broker_name=lambda found: found.status.reservation_name,
    is_shown=lambda _: True,
    labels="",
    answering="an agent that serves this namespace",
)
"""A ResourceRequest: the agent borrows in its cluster's name."""

BROKER: Final = Side(
    resource=resources.of(Reservation),
    wanted=object_bodies.reservation,
    told=object_bodies.of_reservation,
    is_answered=lambda found: bool(found.status.phase),
    broker_name=lambda found: found.metadata.name,
    # With a question it is an agent's, in its mailbox: the reservation itself is beside the broker.
    is_shown=lambda found: found.spec.request is None,
    labels=f"{kube_objects.ARCHIVED}!=true",
    answering="a broker with --broker-interface=kubernetes that serves this namespace",
)
"""A Reservation in the broker's own namespace."""
