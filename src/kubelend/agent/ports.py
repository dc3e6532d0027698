"""The agent's ports: the smallest interfaces through which it uses its cluster, its broker and its
peering.

Every implementation passes the port's contract test under tests/contract. Errors are those of
`core.errors`: subclasses of `Unavailable` are transient, all others are permanent.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from datetime import datetime
from typing import NamedTuple, Protocol

from kubelend.core.pod_requests import Node, Pod
from kubelend.core.resources import Resources
from kubelend.wire import bodies
from kubelend.wire.objects import Kind, ProviderInstruction

Clock = Callable[[], datetime]
"""Returns the current time, timezone-aware and in UTC. Only composition roots choose one."""


# -- the agent's own cluster


class Snapshot(NamedTuple):
    """The complete state; replaces everything that the consumer knew before."""

    nodes: Sequence[Node]
    pods: Sequence[Pod]


class NodeDeleted(NamedTuple):
    name: str


class PodDeleted(NamedTuple):
    id: str


ClusterChange = Snapshot | Node | NodeDeleted | Pod | PodDeleted
"""A node or a pod by itself means that it was added or modified."""


class ClusterSource(Protocol):
    """Nodes and pods of the agent's own cluster."""

    async def identity(self) -> str:
        """A stable name for a cluster without a configured ID: the UID of namespace kube-system."""

    def changes(self) -> AsyncGenerator[ClusterChange, None]:
        """Yields a `Snapshot`, then changes; after a gap in the watch another `Snapshot`.

        Does not end. Failures are retried inside and reported by `problem`.
        """

    @property
    def problem(self) -> str:
        """Why the cluster cannot be watched now; empty if it can."""


class Listed(NamedTuple):
    """All objects of a kind; replaces everything that the consumer knew before."""

    objects: Sequence[object]


class Deleted(NamedTuple):
    """The object was deleted; `last_state` is its last known state."""

    last_state: object


class LocalObjects(Protocol):
    """Objects of the agent's own cluster, stored so that they outlive the agent process.

    Spec and status are written separately, as in Kubernetes: `apply` leaves the status unchanged, and
    `set_status` everything else. Deleting an object with finalizers sets `deletion_timestamp`; the
    object is removed with its last finalizer.
    """

    async def list(self, kind: type[Kind]) -> list[Kind]: ...

    async def find(self, kind: type[Kind], key: str) -> Kind | None:
        """Get by `namespace/name`."""

    async def apply(self, wanted: Kind) -> Kind:
        """Create the object, or update its spec, labels, annotations and finalizers. Returns the stored
        object.

        Writes nothing if nothing changes. `Conflict` if `uid` or `resource_version` is set and is not
        that of the stored object: the caller has read an older version. See `agent.controller` for
        updates with retry.
        """

    async def set_status(self, wanted: Kind) -> Kind | None:
        """Update the status; None if the object is gone or has another `uid`. Writes nothing if nothing
        changes.

        `Conflict` if `resource_version` is not that of the stored object, as in `apply`.
        """

    async def delete(self, kind: type[Kind], key: str) -> None:
        """Delete the object; does nothing if there is none."""

    def watch(self, kind: type[Kind]) -> AsyncGenerator[Kind | Deleted | Listed, None]:
        """Yields `Listed`, then added and modified objects and those `Deleted`. Does not end."""


class NewPlaceholder(NamedTuple):
    """A placeholder to create, which its ProviderInstruction owns."""

    owner: ProviderInstruction
    node: str
    """The only node on which it may be scheduled."""
    amounts: Resources
    is_gated: bool = False


class HoldPods(Protocol):
    """Placeholders and requesters' pods of the agent's own cluster. All pods have `scheduling`."""

    async def create(self, wanted: NewPlaceholder) -> Pod: ...

    async def delete(self, pod: Pod) -> None:
        """Delete at once, without a grace period; does nothing if it is gone."""

    async def delete_finished(self) -> None:
        """Delete placeholders that hold nothing any more, because a kubelet has rejected or ended them."""

    async def nominate(self, pod: Pod, node: str) -> Pod | None:
        """Have the scheduler reserve room for the pod on a node; None if the pod is gone."""

    async def ungate(self, pod: Pod) -> Pod | None:
        """Remove our gate, if it is still there; None if the pod is gone."""

    async def set_condition(self, pod: Pod, reason: str, message: str) -> None:
        """Set the pod's condition that says why nothing is held for it."""

    async def record_event(
        self, about: ProviderInstruction, reason: str, message: str, *, is_warning: bool
    ) -> None:
        """An Event on the object. One that cannot be written is dropped."""

    async def renew_lease(self) -> None:
        """Show that an agent is there to remove gates."""


# -- the broker


class BrokerCommunicator(Protocol):
    """One cluster's connection to its broker. Raises the error classes that the broker raised.

    Calls have a timeout (`BrokerUnreachable`), and are retried inside only where they are idempotent.
    """

    async def publish(self, advertisement: bodies.Advertisement) -> bodies.PublishResult: ...

    async def request(self, request: bodies.ReservationRequest, key: str) -> bodies.Reservation:
        """Idempotent: the same key returns the same reservation."""

    async def activate(self, reservation: str) -> bodies.Reservation: ...

    async def renew(self, reservation: str, duration: str = "") -> bodies.Reservation: ...

    async def release(self, reservation: str) -> bodies.Reservation: ...

    async def find(self, reservation: str) -> bodies.Reservation:
        """Get a reservation of which this cluster is requester or provider; else `NotFound`."""

    async def instructions(self) -> list[bodies.Reservation]:
        """All unfinished reservations of which this cluster is requester or provider."""

    def stream(self, on_reset: Callable[[], None]) -> AsyncGenerator[bodies.Instruction, None]:
        """Instructions as they are made. Ends only by an error; the next call resumes after the last
        instruction.

        `on_reset` is called when the stream opens for the first time and when instructions may have
        been missed.
        """

    async def acknowledge(
        self, reservation: str, held: bodies.HoldReport | None = None
    ) -> bodies.Reservation:
        """Idempotent. `held` is what the nodes really keep, if that is known."""

    async def refuse(self, reservation: str, reason: str) -> bodies.Reservation: ...

    async def ping(self) -> None:
        """Returns if the broker is ready; raises the error otherwise."""

    async def close(self) -> None: ...


class HandshakeExchange(Protocol):
    """Passes handshakes between the two clusters of a reservation, through the broker."""

    async def exchange_handshake(
        self, reservation: str, handshake: bodies.Handshake
    ) -> bodies.HandshakeResult:
        """Send this cluster's part of the peering handshake of a reservation; returns the other side's."""

    async def grant_keys(self) -> bodies.KeySet:
        """The public keys that verify the broker's grants."""


class BrokerConnection(BrokerCommunicator, HandshakeExchange, Protocol):
    """What every transport offers."""


# -- the provider cluster


class Peer(NamedTuple):
    """The provider of one reservation, from the requester's point of view."""

    reservation: str
    cluster: str
    """Cluster ID of the provider."""
    resources: Resources
    """The reserved resources, which the virtual node has to offer."""
    namespaces: tuple[str, ...] = ()
    """Namespaces of this cluster whose pods may be scheduled onto the virtual node."""


class Readiness(NamedTuple):
    """Whether the reserved resources can be used."""

    is_ready: bool
    reason: str
    """Human-readable: why not, or what is offered."""
    is_peered: bool = True
    """Whether the clusters are peered, though the resources may not be ready."""
    node: str = ""
    """Name of the virtual node, if there is one."""
    step: str = ""
    """Of `disconnect`: what it does now, as the reason of a condition, in CamelCase."""


DONE = Readiness(is_ready=True, reason="")


class Peering(Protocol):
    """Connects this cluster with a provider. All calls are idempotent and have a timeout."""

    async def watch(self, on_change: Callable[[str], None]) -> None:
        """Call `on_change` with the ID of each reservation or provider whose peering may have changed.

        Runs until cancelled. Without it, changes are found by polling.
        """

    async def connect(self, peer: Peer) -> Readiness:
        """Establish the peering; does nothing if it exists. Call again until it is ready."""

    async def size(self, peer: Peer) -> Readiness:
        """Make a virtual node offer exactly the peer's resources; call when `connect` is ready."""

    async def ready(self, peer: Peer) -> Readiness: ...

    async def disconnect(self, peer: Peer) -> Readiness:
        """Remove what `connect` and `size` created for this reservation; other reservations of the
        provider stay. Call again until it is ready: nothing is left.
        """
