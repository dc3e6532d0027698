"""The objects of the agent's own cluster, group `rear.fluidos.eu`, as types.

Fields that the published contract has keep their names; ours are optional beside them. Agents keep these
objects through `agent.ports.LocalObjects`, wherever those are: in Kubernetes, in files or in memory.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, ClassVar, TypeVar

import msgspec
from msgspec import Meta

from kubelend.wire import bodies, patterns, rules
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


# These limits are the API server's to check: what is read from files is taken as it is, and judged by those
# who know what to say about it.
Name = Annotated[str, Meta(extra_json_schema=patterns.up_to(253))]
Reason = Annotated[str, Meta(extra_json_schema=patterns.up_to(1024))]
Amount = Annotated[str, Meta(extra_json_schema=patterns.SOME_QUANTITY)]
AmountOrNone = Annotated[str, Meta(extra_json_schema=patterns.QUANTITY_OR_NONE)]
Duration = Annotated[
    str, Meta(extra_json_schema={**patterns.DURATION, **patterns.up_to(64), **rules.LASTING})
]
Wait = Annotated[str, Meta(extra_json_schema={**patterns.WAIT, **patterns.up_to(64)})]
Priority = Annotated[int, Meta(extra_json_schema=patterns.INT32)]


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

    group: ClassVar[str] = GROUP
    version: ClassVar[str] = VERSION
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
    """All that its nodes have."""
    allocatable: Amounts
    """What pods may ask for."""
    allocated: Amounts
    """What pods ask for now."""
    available: Amounts
    """Allocatable, less allocated and what is set aside for others."""
    used: Amounts | None = None
    """What pods really use, where it is measured."""
    pending: Amounts | None = None
    """What pods ask for that are not scheduled yet. It is no part of `allocated`."""
    largest: Amounts | None = None
    """The most that is free on one node, of each resource by itself."""


class AdvertisementSpec(Part, frozen=True):
    """What the agent last measured."""

    cluster_id: Name
    """Under which the broker knows this cluster."""
    resources: MeasuredResources
    timestamp: Timestamp
    """When it was measured."""
    cost: Cost | None = None


class AdvertisementStatus(Part, frozen=True):
    """Whether the broker knows it."""

    phase: Annotated[str, Meta(extra_json_schema=patterns.one_of("Active", "Error"))] = ""
    """Active or Error."""
    last_update_time: Timestamp | None = None
    """When this status last changed."""
    published: bool = False
    """Whether the broker has taken the newest."""
    message: str = ""
    """What is wrong, for people."""


class Advertisement(Object, frozen=True):
    """What this cluster offers: one object, written by the agent."""

    kind: ClassVar[str] = "Advertisement"
    plural: ClassVar[str] = "advertisements"

    spec: AdvertisementSpec
    status: AdvertisementStatus = AdvertisementStatus()


class Requested(Part, frozen=True):
    """Amounts as these objects write them. GPU, storage and extended resources are ours."""

    requested_cpu: Amount
    """Processor, in cores: 500m is half of one."""
    requested_memory: Amount
    """Memory, in bytes: 256Mi, 8Gi."""
    requested_gpu: AmountOrNone = ""
    """Whole devices; in Kubernetes nvidia.com/gpu."""
    requested_storage: AmountOrNone = ""
    """Disk, in bytes."""
    extended_resources: Annotated[
        dict[Annotated[str, Meta(extra_json_schema=patterns.RESOURCE_NAME)], Amount],
        Meta(extra_json_schema=patterns.at_most(32)),
    ] = {}
    """Any other resource, by its Kubernetes name."""

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

    reservation_name: Name
    """The broker's reservation that it comes from."""
    message: str = ""
    """The same in words."""
    expires_at: Timestamp | None = None
    """When the promise ends by itself."""


class ResourceRequestSpec(Requested, frozen=True):
    """What a user of this cluster wants to borrow. All but priority and duration is ours."""

    priority: Priority = 0
    """Among requests that wait, the larger is served first."""
    duration: Duration = ""
    """For how long; the broker's default, if it is not said."""
    wait: Wait = ""
    """For how long it may wait for capacity; it fails at once if empty and nothing fits."""
    policy: bodies.Policy = ""
    """How to choose among the clusters that fit: headroom, binpack, cost or balanced."""
    weights: Annotated[bodies.Weights, Meta(extra_json_schema=rules.WEIGHTS)] = {}
    """How much each score counts, instead of a policy."""
    target_cluster_id: Name = ""
    """This provider or none; the broker chooses, if it is not said."""
    constraints: bodies.ConstraintsBody = bodies.UNCONSTRAINED
    """Where it may go, beside where it fits."""
    renew: bool = False
    """Keep it for as long as this object lives, instead of for `duration`."""


class Asked(Part, frozen=True):
    """The question that the broker was, or is about to be, asked: kept, to be repeated word for word."""

    generation: int
    """Of the spec that it was made of."""
    request: bodies.ReservationRequest
    """As it was sent."""


class ResourceRequestStatus(Part, frozen=True):
    """Where the request stands. `reason` is for programs, `message` for people."""

    phase: Annotated[
        str,
        Meta(
            extra_json_schema=patterns.one_of(
                "Pending", "Reserved", "Failed", "Active", "Released", "Expired"
            )
        ),
    ] = ""
    """Pending, Reserved or Failed; and ours: Active, Released and Expired."""
    target_cluster_id: Name = ""
    """The provider."""
    reservation_name: Name = ""
    """The broker's reservation."""
    reason: Reason = ""
    """One word that says why."""
    message: str = ""
    """Why, and what to do, for people."""
    last_update_time: Timestamp | None = None
    """When this status last changed."""
    expires_at: Timestamp | None = None
    """When the reservation ends by itself."""
    observed_generation: int = 0
    """Of the spec that was last taken in."""
    asked: Asked | None = None


class ResourceRequest(Object, frozen=True):
    """The wish of a user of this cluster."""

    kind: ClassVar[str] = "ResourceRequest"
    plural: ClassVar[str] = "resourcerequests"

    spec: Annotated[ResourceRequestSpec, Meta(extra_json_schema=rules.REQUESTED_TEXTS)]
    status: ResourceRequestStatus = ResourceRequestStatus()


class ReservationInstructionSpec(Promised, frozen=True, kw_only=True):
    """What this cluster may use, and where."""

    target_cluster_id: Name
    """The provider."""


class ReservationInstructionStatus(Part, frozen=True):
    """What the agent has made of it. All but the first three is ours."""

    observed_reservation_resource_version: Name = ""
    """Of the reservation as it was last heard of."""
    delivered: bool = False
    """Whether this cluster has taken it in."""
    last_update_time: Timestamp | None = None
    """When this status last changed."""
    phase: Annotated[
        str, Meta(extra_json_schema=patterns.one_of("Connecting", "Ready", "Finished"))
    ] = ""
    """Connecting, Ready, or Finished once the reservation is over."""
    message: str = ""
    """What it waits for, or why it is over."""
    finished_at: Timestamp | None = None
    """When it was over."""
    peered_cluster_ids: Annotated[
        tuple[Name, ...], Meta(extra_json_schema=patterns.no_longer_than(256))
    ] = ()
    """With whom this cluster was joined for it, or was about to be, and from whom it has not parted yet."""


class ReservationInstruction(Object, frozen=True):
    """A promise to this cluster; named after the reservation."""

    kind: ClassVar[str] = "ReservationInstruction"
    plural: ClassVar[str] = "reservationinstructions"

    spec: ReservationInstructionSpec
    status: ReservationInstructionStatus = ReservationInstructionStatus()


class Question(Part, frozen=True):
    """A request of a cluster's agent to the broker. Each `id` is answered once."""

    id: Annotated[str, Meta(extra_json_schema=patterns.up_to(64))]
    """Unique ID of the request; the response repeats it."""
    verb: Annotated[
        str,
        Meta(
            extra_json_schema=patterns.one_of(
                *("publish", "reserve", "activate", "renew", "release"),
                *("acknowledge", "refuse", "ping", "read", "listen", "leave"),
            )
        ),
    ]
    """The operation."""
    arguments: Reason = ""
    """Duration to renew for, reason of a refusal, or ID of the reservation to read."""
    agent: Annotated[str, Meta(extra_json_schema=patterns.up_to(64))] = ""
    """Name of the agent. The broker serves one agent of a cluster at a time."""


class Reply(Part, frozen=True):
    """The broker's response to a request of a cluster's agent. Written by the broker alone."""

    request_id: Annotated[str, Meta(extra_json_schema=patterns.up_to(64))] = ""
    """The `id` of the last request that was answered; empty if there was none."""
    body: Annotated[str, Meta(extra_json_schema=patterns.up_to(2**18))] = ""
    """The response body of the REST interface, as JSON text."""
    error: Annotated[str, Meta(extra_json_schema=patterns.up_to(2**16))] = ""
    """The error of a failed request, as JSON text of a problem document; empty if it succeeded."""


class ProviderInstructionSpec(Promised, frozen=True, kw_only=True):
    """What this cluster has to set aside, and for whom."""

    requester_cluster_id: Name
    """Who borrows."""
    response: Reply | None = None


class ProviderInstructionStatus(Part, frozen=True):
    """Whether it is set aside. All but the first two is ours."""

    enforced: bool = False
    """Whether it is taken off what this cluster has available."""
    last_update_time: Timestamp | None = None
    """When this status last changed."""
    phase: Annotated[
        str, Meta(extra_json_schema=patterns.one_of("Held", "Withdrawn", "Refused"))
    ] = ""
    """Held, Withdrawn or Refused."""
    message: str = ""
    """Why it is refused or over."""
    finished_at: Timestamp | None = None
    """When it was over."""
    request: Question | None = None


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
