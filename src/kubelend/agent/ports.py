"""What an agent needs from the outside, as the smallest interfaces that serve it.

Each has a contract test under tests/contract, which every implementation passes. Errors are those of
`core.errors`: `Unavailable` and its kin for what may be better later, all others for what will not.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from datetime import datetime
from typing import NamedTuple, Protocol

from kubelend.core.nodes import Node
from kubelend.core.pods import Pod
from kubelend.core.resources import Resources
from kubelend.wire import bodies
from kubelend.wire.objects import Kind

Clock = Callable[[], datetime]
"""Gives the time, aware and in UTC. Only composition roots choose one."""


# -- the agent's own cluster


class Snapshot(NamedTuple):
    """All that is there: what the listener knew before is forgotten."""

    nodes: Sequence[Node]
    pods: Sequence[Pod]


class NodeGone(NamedTuple):
    name: str


class PodGone(NamedTuple):
    id: str


Change = Snapshot | Node | NodeGone | Pod | PodGone
"""A node or a pod stands for itself: it is new, or otherwise than before."""


class ClusterSource(Protocol):
    """Nodes and pods of the own cluster."""

    async def identity(self) -> str:
        """A name that stays, for a cluster that was given none: the UID of namespace kube-system."""

    def changes(self) -> AsyncGenerator[Change, None]:
        """First a `Snapshot`, then what changes; after a gap in what it saw a `Snapshot` again.

        It does not end. What keeps it from looking is waited out inside, and reported by `problem`.
        """

    @property
    def problem(self) -> str:
        """Why it cannot see the cluster now; empty if it can."""


class Listed(NamedTuple):
    """All objects of a kind: what the listener knew before is forgotten."""

    objects: Sequence[object]


class Deleted(NamedTuple):
    """It is gone; `found` is what it was at last."""

    found: object


class LocalObjects(Protocol):
    """Objects of the own cluster, kept so that they outlive the agent.

    Spec and status are written apart, as in Kubernetes: `apply` leaves the status as it is, and
    `set_status` everything else. A delete with finalizers left sets `deletion_timestamp`, and the object
    goes with the last finalizer.
    """

    async def list(self, kind: type[Kind]) -> list[Kind]: ...

    async def find(self, kind: type[Kind], key: str) -> Kind | None:
        """By `namespace/name`."""

    async def apply(self, wanted: Kind) -> Kind:
        """Make it, or change its spec, labels, annotations and finalizers. Returns it as it is kept.

        Equal to what is kept: nothing is written. With the `uid` of another object than the kept one, or of
        one that is gone, or with a `resource_version` that is not the kept one's: `Conflict`, for it is not
        what was read. See `agent.editing`.
        """

    async def set_status(self, wanted: Kind) -> Kind | None:
        """Change its status; None if it is gone, or is another by its `uid`. Equal: nothing is written.

        With a `resource_version` that is not the kept one's: `Conflict`, as `apply` has it.
        """

    async def delete(self, kind: type[Kind], key: str) -> None:
        """Have it gone; nothing happens if it is."""

    def watch(self, kind: type[Kind]) -> AsyncGenerator[Kind | Deleted | Listed, None]:
        """First `Listed`, then each object that is new or otherwise, and those `Deleted`. Does not end."""


# -- the broker


class BrokerCommunicator(Protocol):
    """One cluster's conversation with its broker. Errors are the very classes that the broker raised.

    Calls give up by themselves after a while (`BrokerUnreachable`), and are only repeated inside where
    that cannot do a thing twice.
    """

    async def publish(self, advertisement: bodies.Advertisement) -> bodies.Published: ...

    async def request(self, request: bodies.ReservationRequest, key: str) -> bodies.Reservation:
        """The same key gives the same reservation, however often it is asked for."""

    async def activate(self, reservation: str) -> bodies.Reservation: ...

    async def renew(self, reservation: str, duration: str = "") -> bodies.Reservation: ...

    async def release(self, reservation: str) -> bodies.Reservation: ...

    async def find(self, reservation: str) -> bodies.Reservation:
        """One on which this cluster is either side; `NotFound` if there is none."""

    async def instructions(self) -> list[bodies.Reservation]:
        """All unfinished reservations on which this cluster is either side."""

    def stream(self, on_reset: Callable[[], None]) -> AsyncGenerator[bodies.Instruction, None]:
        """Instructions as they come. Ends only by an error: call it again, and it goes on behind the last.

        `on_reset` is called when something may have been missed, and when it is open for the first time.
        """

    async def acknowledge(self, reservation: str) -> bodies.Reservation: ...

    async def refuse(self, reservation: str, reason: str) -> bodies.Reservation: ...

    async def ping(self) -> None:
        """Nothing if the broker answers and is ready; an error says why not."""

    async def close(self) -> None: ...


# -- the other cluster


class Peer(NamedTuple):
    """The other end of one reservation, as the requester sees it."""

    reservation: str
    cluster: str
    """The provider's ID."""
    resources: Resources
    """What was reserved, which is what the virtual node is to offer."""


class Readiness(NamedTuple):
    """Whether the borrowed capacity can be used."""

    is_ready: bool
    reason: str
    """Why not, or what there is: for a person."""


class Peering(Protocol):
    """Joins this cluster with a provider. Every call may be repeated, and is bounded in time."""

    async def connect(self, peer: Peer) -> None:
        """Have the two clusters joined; nothing if they are."""

    async def size(self, peer: Peer) -> None:
        """Have a virtual node offer exactly the peer's resources; after `connect`."""

    async def ready(self, peer: Peer) -> Readiness: ...

    async def disconnect(self, peer: Peer) -> None:
        """Undo what `connect` and `size` made for this reservation; others on the same provider stay."""
