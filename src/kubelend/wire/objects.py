"""The objects of the agent's own cluster, group `rear.fluidos.eu`, as types.

Fields that the published contract has keep their names; ours are optional beside them. Agents keep these
objects through `agent.ports.LocalObjects`, wherever those are: in Kubernetes, in files or in memory.
"""

from __future__ import annotations

from datetime import datetime
from typing import ClassVar, TypeVar

import msgspec

from kubelend.wire import bodies
from kubelend.wire.bodies import Amounts, Cost, Timestamp

GROUP = "rear.fluidos.eu"
VERSION = "v1alpha1"

# As Kubernetes spells it: `requestedCPU` and not `requestedCpu`.
_NAMES = {
    "requested_cpu": "requestedCPU",
    "requested_gpu": "requestedGPU",
}


def _camel(name: str) -> str:
    return _NAMES.get(name) or bodies.camel(name)


class Part(msgspec.Struct, frozen=True, omit_defaults=True, rename=_camel):
    """The common shape of specs and statuses."""


class Metadata(Part, frozen=True):
    """What Kubernetes keeps about every object."""

    name: str
    namespace: str = "default"
    uid: str = ""
    """Set by whoever keeps the objects; one that is made anew has another."""
    generation: int = 0
    """Counts the changes of the spec; set by whoever keeps the objects."""
    resource_version: str = ""
    """Changes with every write; set by whoever keeps the objects."""
    creation_timestamp: Timestamp | None = None
    deletion_timestamp: Timestamp | None = None
    """Set when somebody wants it gone while finalizers are left."""
    finalizers: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class Object(Part, frozen=True):
    """One object; every kind has its spec and status."""

    kind: ClassVar[str]
    plural: ClassVar[str]

    metadata: Metadata

    @property
    def key(self) -> str:
        """`namespace/name`: by which one finds it among its kind."""
        return f"{self.metadata.namespace}/{self.metadata.name}"


Kind = TypeVar("Kind", bound=Object)


class MeasuredResources(Part, frozen=True):
    """What a cluster has; `pending` and `largest` are ours."""

    capacity: Amounts
    allocatable: Amounts
    allocated: Amounts
    available: Amounts
    used: Amounts | None = None
    pending: Amounts | None = None
    """What pods ask for that are not scheduled yet. It is no part of `allocated`."""
    largest: Amounts | None = None
    """The most that is free on one node, of each resource by itself."""


class AdvertisementSpec(Part, frozen=True):
    """What the agent last measured."""

    cluster_id: str
    resources: MeasuredResources
    timestamp: Timestamp
    cost: Cost | None = None


class AdvertisementStatus(Part, frozen=True):
    """Whether the broker knows it."""

    phase: str = ""
    """Active or Error."""
    last_update_time: Timestamp | None = None
    published: bool = False
    message: str = ""


class Advertisement(Object, frozen=True):
    """What this cluster offers: one object, written by the agent."""

    kind: ClassVar[str] = "Advertisement"
    plural: ClassVar[str] = "advertisements"

    spec: AdvertisementSpec
    status: AdvertisementStatus = AdvertisementStatus()


class Requested(Part, frozen=True):
    """Amounts as these objects write them. GPU, storage and extended resources are ours."""

    requested_cpu: str
    requested_memory: str
    requested_gpu: str = ""
    requested_storage: str = ""
    extended_resources: dict[str, str] = {}

    @property
    def amounts(self) -> bodies.Quantities:
        """The same as the broker's bodies write them."""
        return bodies.Quantities(
            self.requested_cpu,
            self.requested_memory,
            self.requested_gpu,
            self.requested_storage,
            dict(self.extended_resources),
        )


class Promised(Requested, frozen=True, kw_only=True):
    """What both sides of a reservation read of it."""

    reservation_name: str
    message: str = ""
    expires_at: Timestamp | None = None


class ResourceRequestSpec(Requested, frozen=True):
    """What a user of this cluster wants to borrow. All but priority and duration is ours."""

    priority: int = 0
    duration: str = ""
    wait: str = ""
    """For how long it may wait for capacity; it fails at once if empty and nothing fits."""
    policy: str = ""
    weights: dict[str, float] = {}
    target_cluster_id: str = ""
    constraints: bodies.ConstraintsBody = bodies.UNCONSTRAINED
    renew: bool = False
    """Keep it for as long as this object lives, instead of for `duration`."""


class Asked(Part, frozen=True):
    """The question that the broker was, or is about to be, asked: kept, to be repeated word for word."""

    generation: int
    """Of the spec that it was made of."""
    request: bodies.ReservationRequest


class ResourceRequestStatus(Part, frozen=True):
    """Where the request stands. `reason` is for programs, `message` for people."""

    phase: str = ""
    """Pending, Reserved or Failed; and ours: Active, Released and Expired."""
    target_cluster_id: str = ""
    reservation_name: str = ""
    reason: str = ""
    message: str = ""
    last_update_time: Timestamp | None = None
    expires_at: Timestamp | None = None
    observed_generation: int = 0
    asked: Asked | None = None


class ResourceRequest(Object, frozen=True):
    """The wish of a user of this cluster."""

    kind: ClassVar[str] = "ResourceRequest"
    plural: ClassVar[str] = "resourcerequests"

    spec: ResourceRequestSpec
    status: ResourceRequestStatus = ResourceRequestStatus()


class ReservationInstructionSpec(Promised, frozen=True, kw_only=True):
    """What this cluster may use, and where."""

    target_cluster_id: str


class ReservationInstructionStatus(Part, frozen=True):
    """What the agent has made of it. All but the first three is ours."""

    observed_reservation_resource_version: str = ""
    delivered: bool = False
    last_update_time: Timestamp | None = None
    phase: str = ""
    """Connecting, Ready, or Finished once the reservation is over."""
    message: str = ""
    finished_at: Timestamp | None = None
    peered_cluster_ids: tuple[str, ...] = ()
    """With whom this cluster was joined for it, or was about to be, and from whom it has not parted yet."""


class ReservationInstruction(Object, frozen=True):
    """A promise to this cluster; named after the reservation."""

    kind: ClassVar[str] = "ReservationInstruction"
    plural: ClassVar[str] = "reservationinstructions"

    spec: ReservationInstructionSpec
    status: ReservationInstructionStatus = ReservationInstructionStatus()


class ProviderInstructionSpec(Promised, frozen=True, kw_only=True):
    """What this cluster has to set aside, and for whom."""

    requester_cluster_id: str


class ProviderInstructionStatus(Part, frozen=True):
    """Whether it is set aside. All but the first two is ours."""

    enforced: bool = False
    last_update_time: Timestamp | None = None
    phase: str = ""
    """Held, Withdrawn or Refused."""
    message: str = ""
    finished_at: Timestamp | None = None


class ProviderInstruction(Object, frozen=True):
    """A promise of this cluster; named `<reservation>-provider`."""

    kind: ClassVar[str] = "ProviderInstruction"
    plural: ClassVar[str] = "providerinstructions"

    spec: ProviderInstructionSpec
    status: ProviderInstructionStatus = ProviderInstructionStatus()


KINDS: tuple[type[Object], ...] = (
    Advertisement,
    ResourceRequest,
    ReservationInstruction,
    ProviderInstruction,
)


def with_status(found: Kind, status: msgspec.Struct, now: datetime) -> Kind:
    """The same object with this status, stamped with the time."""
    stamped = msgspec.structs.replace(status, last_update_time=now)
    return msgspec.structs.replace(found, status=stamped)
