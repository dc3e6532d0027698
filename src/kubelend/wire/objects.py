"""Custom resources of group `rear.fluidos.eu`, in the agent's own cluster, as types; object names made from
IDs.

Fields of the published contract keep their names; fields that Kubelend adds are optional. The agent stores
these objects through `agent.ports.LocalObjects`: in Kubernetes, in files or in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence, Set
from datetime import datetime
from hashlib import sha256
from typing import Annotated, ClassVar, Final, Generic, TypeVar

import msgspec
from msgspec import Meta

from kubelend.wire import bodies, json_types
from kubelend.wire.bodies import Amounts, Cost, Timestamp

GROUP = "rear.fluidos.eu"
VERSION = "v1alpha1"

# These constraints are only published in the CRDs. Decoding accepts any text, because the code that uses a
# value reports a better error than a schema can.
Name = Annotated[str, Meta(extra_json_schema=json_types.max_length(253))]
Reason = Annotated[str, Meta(extra_json_schema=json_types.max_length(1024))]
Amount = (
    Annotated[str, Meta(extra_json_schema=json_types.POSITIVE_QUANTITY)]
    | Annotated[int, Meta(extra_json_schema={"minimum": 1})]
)
OptionalAmount = (
    Annotated[str, Meta(extra_json_schema=json_types.OPTIONAL_QUANTITY)]
    | Annotated[int, Meta(extra_json_schema={"minimum": 0})]
)
Duration = Annotated[
    str,
    Meta(
        extra_json_schema={
            **json_types.DURATION,
            **json_types.max_length(64),
            **json_types.POSITIVE_DURATION,
        }
    ),
]
Wait = Annotated[str, Meta(extra_json_schema={**json_types.WAIT, **json_types.max_length(64)})]
ClusterIds = Annotated[tuple[Name, ...], Meta(extra_json_schema=json_types.max_items(256))]
Namespaces = Annotated[tuple[Name, ...], Meta(extra_json_schema=json_types.max_items(16))]
Priority = Annotated[int, Meta(extra_json_schema=json_types.INT32)]


class ObjectStruct(bodies.Body, frozen=True):
    """Base of metadata, specs and statuses."""


class Metadata(ObjectStruct, frozen=True):
    """Standard object metadata."""

    name: str
    namespace: str = "default"
    uid: str = ""
    """Set by the server. An object that is deleted and created again gets another UID."""
    generation: int = 0
    """Number of the spec's current version. Set by the server."""
    resource_version: str = ""
    """Opaque version for optimistic concurrency; changes with every write. Set by the server."""
    creation_timestamp: Timestamp | None = None
    deletion_timestamp: Timestamp | None = None
    """When deletion was requested. The object is removed once its finalizers are empty."""
    finalizers: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class Object(ObjectStruct, frozen=True):
    """Base of all kinds: metadata, and the group, version and names of the kind."""

    group: ClassVar[str] = GROUP
    version: ClassVar[str] = VERSION
    kind: ClassVar[str]
    plural: ClassVar[str]
    immutable_fields: ClassVar[tuple[str, ...]] = ()
    """Attributes of the spec that cannot be changed."""

    metadata: Metadata

    @property
    def key(self) -> str:
        """`namespace/name`, the key of an object among its kind."""
        return f"{self.metadata.namespace}/{self.metadata.name}"


Kind = TypeVar("Kind", bound=Object)


class ObjectCache(Generic[Kind]):
    """The watched objects of one kind, and the last states of deleted ones until they are forgotten.

    `enqueue` is called with the key of each object to reconcile.
    """

    def __init__(self, enqueue: Callable[[str], None]) -> None:
        self.has_synced = False
        """Whether the first list has been received."""
        self._enqueue = enqueue
        self._objects: dict[str, Kind] = {}
        self._tombstones: dict[str, list[Kind]] = {}

    def key_of(self, found: Kind) -> str:
        return found.key

    def triggers(self, before: Kind, after: Kind) -> bool:  # noqa: ARG002
        """Whether a change of an object has to be reconciled."""
        return True

    def find(self, key: str) -> Kind | None:
        """The last watched state."""
        return self._objects.get(key)

    def all(self) -> list[Kind]:
        return list(self._objects.values())

    def tombstones(self, key: str) -> list[Kind]:
        """Last known states of deleted objects of this key."""
        return list(self._tombstones.get(key, ()))

    def forget(self, gone: Kind) -> None:
        """Drop a tombstone once its deletion has been processed."""
        key = self.key_of(gone)
        if others := [one for one in self._tombstones.pop(key, ()) if one is not gone]:
            self._tombstones[key] = others

    def on_list(self, objects: Sequence[Kind], others: Set[str] = frozenset()) -> None:
        """`others` are the UIDs of objects that exist and cannot be decoded."""
        existing = others | {found.metadata.uid for found in objects}
        for known in self.all():
            if known.metadata.uid not in existing:
                self.on_delete(known)
        for found in objects:
            self.on_update(found)
        self.has_synced = True

    def on_update(self, found: Kind) -> None:
        key = self.key_of(found)
        before = self._objects.get(key)
        if before is not None and before.metadata.uid != found.metadata.uid:
            self.on_delete(before)
            before = None
        self._objects[key] = found
        if before is None or self.triggers(before, found):
            self._enqueue(key)

    def on_delete(self, gone: Kind) -> None:
        key = self.key_of(gone)
        known = self._objects.get(key)
        if known is not None and known.metadata.uid == gone.metadata.uid:
            del self._objects[key]
        self._tombstones.setdefault(key, []).append(gone)
        self._enqueue(key)


class Condition(ObjectStruct, frozen=True):
    """Condition describes one aspect of the state of an object."""

    type: Annotated[str, Meta(extra_json_schema=json_types.max_length(316))]
    """Type of the condition."""
    status: Annotated[str, Meta(extra_json_schema=json_types.enum_of("True", "False", "Unknown"))]
    """Status of the condition: True, False or Unknown."""
    reason: Reason = ""
    """Machine-readable reason, in CamelCase."""
    message: str = ""
    """Human-readable explanation."""
    last_transition_time: Timestamp | None = None
    """Time of the last change of status."""
    observed_generation: int = 0
    """Generation of the spec that this condition refers to."""
    hint: str = ""
    """What to do about it."""


Conditions = Annotated[
    tuple[Condition, ...], Meta(max_length=16, extra_json_schema=json_types.LIST_MAP_BY_TYPE)
]


def merge_conditions(
    before: Iterable[Condition], after: Iterable[Condition], now: datetime
) -> tuple[Condition, ...]:
    """Conditions of others stay; an unchanged one keeps its transition time.

    Each keeps its place: else two writers of one object would change the order in turn, for ever.
    """
    merged = {one.type: one for one in before}
    for one in after:
        same = merged.get(one.type)
        since = same.last_transition_time if same and same.status == one.status else None
        at = since or now.replace(microsecond=0)
        merged[one.type] = msgspec.structs.replace(one, last_transition_time=at)
    return tuple(merged.values())


class MeasuredResources(ObjectStruct, frozen=True):
    """Resources of the cluster as measured by the agent."""

    capacity: Amounts
    """Total capacity of the cluster's nodes."""
    allocatable: Amounts
    """Capacity available to pods."""
    allocated: Amounts
    """Sum of the resource requests of running pods."""
    available: Amounts
    """Allocatable minus allocated minus resources reserved for other clusters."""
    used: Amounts | None = None
    """Measured usage of running pods, if metrics are available."""
    pending: Amounts | None = None
    """Sum of the resource requests of unscheduled pods. Not included in allocated."""
    largest: Amounts | None = None
    """Largest amount that is free on a single node, for each resource separately."""


class AdvertisementSpec(ObjectStruct, frozen=True):
    """AdvertisementSpec is the agent's latest measurement of this cluster."""

    cluster_id: Name
    """ID of this cluster at the broker."""
    resources: MeasuredResources
    timestamp: Timestamp
    """Time of the measurement."""
    cost: Cost | None = None


class AdvertisementStatus(ObjectStruct, frozen=True):
    """AdvertisementStatus reports whether the advertisement was published to the broker."""

    phase: Annotated[str, Meta(extra_json_schema=json_types.enum_of("Active", "Error"))] = ""
    """Active if the last publication succeeded, Error if it failed."""
    last_update_time: Timestamp | None = None
    """Time of the last status change."""
    published: bool = False
    """Whether the broker accepted the latest advertisement."""
    message: str = ""
    """Human-readable description of the last error."""


class Advertisement(Object, frozen=True):
    """Advertisement shows the resources that this cluster offers to others. The agent writes a single
    object.
    """

    kind: ClassVar[str] = "Advertisement"
    plural: ClassVar[str] = "advertisements"

    spec: AdvertisementSpec
    status: AdvertisementStatus = AdvertisementStatus()


class RequestedAmounts(ObjectStruct, frozen=True):
    """Base of specs with requested amounts."""

    requested_cpu: Amount
    """CPU in cores, for example 500m."""
    requested_memory: Amount
    """Memory in bytes, for example 256Mi."""
    requested_gpu: OptionalAmount = ""
    """Number of GPUs (nvidia.com/gpu)."""
    requested_storage: OptionalAmount = ""
    """Ephemeral storage in bytes."""
    extended_resources: Annotated[
        dict[Annotated[str, Meta(extra_json_schema=json_types.RESOURCE_NAME)], Amount],
        Meta(extra_json_schema=json_types.max_properties(32)),
    ] = {}
    """Other resources by Kubernetes resource name."""

    @property
    def amounts(self) -> bodies.Quantities:
        """The requested amounts as a REST body."""
        return bodies.Quantities(
            self.requested_cpu,
            self.requested_memory,
            self.requested_gpu,
            self.requested_storage,
            dict(self.extended_resources),
        )


class InstructionSpec(RequestedAmounts, frozen=True, kw_only=True):
    """Base of both instruction specs."""

    reservation_name: Name
    """ID of the reservation at the broker."""
    message: str = ""
    """Human-readable summary of the instruction."""
    expires_at: Timestamp | None = None
    """Time at which the reservation expires unless renewed."""
    cost: bodies.AgreedCost | None = None


class ResourceRequestSpec(RequestedAmounts, frozen=True):
    """ResourceRequestSpec defines the resources to reserve."""

    priority: Priority = 0
    """Queue priority. Waiting requests with a higher value are served first."""
    duration: Duration = ""
    """Reservation duration. Defaults to the broker's --default-duration."""
    wait: Wait = ""
    """Maximum time to wait in the queue for capacity. If empty, the request fails immediately when nothing
    fits.
    """
    policy: bodies.Policy = ""
    """Placement policy: headroom, binpack, cost or balanced. Defaults to headroom."""
    weights: Annotated[bodies.Weights, Meta(extra_json_schema=json_types.WEIGHTS_RULE)] = {}
    """Weights of the scores headroom, packing, balance and price. Overrides policy."""
    target_cluster_id: Name = ""
    """Only this provider is considered. If empty, the broker chooses a provider."""
    constraints: bodies.Constraints = bodies.UNCONSTRAINED
    """Constraints on the provider."""
    failover: bool = True
    """Whether the reservation moves to another cluster when its provider is lost. If false, it fails."""
    renew: bool = False
    """Renew the reservation until this object is deleted, instead of letting it expire after duration."""
    namespaces: Namespaces = ()
    """Namespaces whose pods may be scheduled onto borrowed nodes while the reservation lasts. Only the
    namespace of this object is allowed. With Liqo: a NamespaceOffloading, unless there is one already.
    """


class SentRequest(ObjectStruct, frozen=True):
    """The reservation request that was sent to the broker. Stored so that a retry sends the identical
    request.
    """

    generation: int
    """Generation of the spec that the request was built from."""
    request: bodies.ReservationRequest
    """Request body as sent to the broker."""


class ResourceRequestStatus(ObjectStruct, frozen=True):
    """ResourceRequestStatus is the observed state of the request."""

    phase: Annotated[
        str,
        Meta(
            extra_json_schema=json_types.enum_of(
                "Pending", "Reserved", "Failed", "Active", "Released", "Expired"
            )
        ),
    ] = ""
    """Phase of the request: Pending, Reserved, Active, Released, Expired or Failed."""
    target_cluster_id: Name = ""
    """ID of the provider cluster."""
    reservation_name: Name = ""
    """ID of the reservation at the broker."""
    reason: Reason = ""
    """Machine-readable reason for the phase, in CamelCase."""
    message: str = ""
    """Human-readable explanation of the phase."""
    last_update_time: Timestamp | None = None
    """Time of the last status change."""
    expires_at: Timestamp | None = None
    """Time at which the reservation expires unless renewed."""
    observed_generation: int = 0
    """Generation of the spec that this status refers to."""
    sent_request: SentRequest | None = None
    conditions: Conditions = ()
    """Latest observations: Reserved, Peered, Ready, and Held as the provider reports it."""


_IMMUTABLE: Final = tuple(
    field for field in msgspec.structs.fields(ResourceRequestSpec) if field.name != "renew"
)
_REQUEST_RULES: Final = json_types.combine_rules(
    json_types.POSITIVE_REQUESTED_FIELDS,
    json_types.immutable_fields(_IMMUTABLE),
)


class ResourceRequest(Object, frozen=True):
    """ResourceRequest asks the broker to reserve capacity in another cluster. Of its spec only `renew` can
    be changed: everything else is sent to the broker once.
    """

    kind: ClassVar[str] = "ResourceRequest"
    plural: ClassVar[str] = "resourcerequests"
    immutable_fields: ClassVar[tuple[str, ...]] = tuple(one.name for one in _IMMUTABLE)

    spec: Annotated[ResourceRequestSpec, Meta(extra_json_schema=_REQUEST_RULES)]
    status: ResourceRequestStatus = ResourceRequestStatus()


class ReservationInstructionSpec(InstructionSpec, frozen=True, kw_only=True):
    """ReservationInstructionSpec defines the reserved resources and their provider."""

    target_cluster_id: Name
    """ID of the provider cluster."""
    namespaces: Namespaces = ()
    """Namespaces whose pods may be scheduled onto the virtual node."""


class ReservationInstructionStatus(ObjectStruct, frozen=True):
    """ReservationInstructionStatus is the observed state of the peering with the provider."""

    observed_reservation_resource_version: Name = ""
    """Revision of the reservation that this object was last updated from."""
    delivered: bool = False
    """Whether the agent of this cluster has processed the instruction."""
    last_update_time: Timestamp | None = None
    """Time of the last status change."""
    phase: Annotated[
        str,
        Meta(extra_json_schema=json_types.enum_of("NotPeered", "Connecting", "Ready", "Finished")),
    ] = ""
    """Phase of the instruction: NotPeered if no peering is configured, Connecting, Ready, or Finished when
    the reservation has ended.
    """
    message: str = ""
    """Human-readable description of what the instruction waits for, or why the reservation ended."""
    finished_at: Timestamp | None = None
    """Time at which the reservation ended."""
    peered_cluster_ids: ClusterIds = ()
    """Clusters with which this one is peered for this reservation."""
    started_cluster_ids: ClusterIds = ()
    """Clusters to disconnect from when the reservation ends. Recorded before anything is created there."""
    node_name: Name = ""
    """Name of the virtual node that offers the reserved resources."""
    conditions: Conditions = ()
    """Latest observations: Peered, Ready, and Held as the provider reports it."""


class ReservationInstruction(Object, frozen=True):
    """ReservationInstruction tells a requester which reserved resources it may use. Named after the
    reservation.
    """

    kind: ClassVar[str] = "ReservationInstruction"
    plural: ClassVar[str] = "reservationinstructions"

    spec: ReservationInstructionSpec
    status: ReservationInstructionStatus = ReservationInstructionStatus()


class SentHandshake(ObjectStruct, frozen=True):
    """A peering handshake for the other side of the reservation, which the broker passes on."""

    sent_at: Timestamp
    """Time at which it was sent; another one for each attempt."""
    handshake: bodies.Handshake


class ProviderInstructionSpec(InstructionSpec, frozen=True, kw_only=True):
    """ProviderInstructionSpec defines the resources to hold and their requester."""

    requester_cluster_id: Name
    """ID of the requester cluster."""
    instruction: bodies.Instruction | None = None
    """The reservation, and what the provider has to do."""
    observed_report_time: Timestamp | None = None
    """The `reportTime` of the status that the broker has processed."""
    accepted: Condition | None = None
    """Whether the broker has accepted that status, and if not, why."""
    handshake_time: Timestamp | None = None
    """The `sentAt` of the provider's handshake that was passed on."""
    peer: bodies.Handshake | None = None
    """The handshake of the requester, when the provider last sent its own."""
    peer_handshakes: int = 0
    """Number of handshakes of the requester that the provider was to be notified of."""


class ProviderInstructionStatus(ObjectStruct, frozen=True):
    """ProviderInstructionStatus is the observed state of the hold."""

    enforced: bool = False
    """Whether the reserved amounts are subtracted from the available resources of this cluster."""
    last_update_time: Timestamp | None = None
    """Time of the last status change."""
    phase: Annotated[
        str, Meta(extra_json_schema=json_types.enum_of("Held", "Withdrawn", "Refused"))
    ] = ""
    """Phase of the hold: Held, Withdrawn or Refused."""
    message: str = ""
    """Human-readable reason for a refusal or for the end of the reservation."""
    finished_at: Timestamp | None = None
    """Time at which the reservation ended."""
    conditions: Conditions = ()
    """Latest observations: Held."""
    report_time: Timestamp | None = None
    """Time of the report to the broker, in a cluster namespace: of the hold, its refusal or a handshake."""
    handshake: SentHandshake | None = None


class ProviderInstruction(Object, frozen=True):
    """ProviderInstruction tells a provider which resources to hold for a requester. Named
    `<reservation>-provider`.
    """

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
    """Return the object with this status and `lastUpdateTime` set to `now`."""
    stamped = msgspec.structs.replace(status, last_update_time=now)
    return msgspec.structs.replace(found, status=stamped)


def object_name(id: str) -> str:
    """Return the ID if it is a valid object name, else a hash of it.

    IDs that start with the hash prefix are hashed too, so that two IDs never map to the same name.
    """
    if (
        len(id) <= _MAX_NAME_LENGTH
        and _DNS_SUBDOMAIN.fullmatch(id)
        and not id.startswith(_HASH_PREFIX)
    ):
        return id
    return _HASH_PREFIX + sha256(id.encode(errors="surrogatepass")).hexdigest()[:40]


_HASH_PREFIX: Final = "hashed-"
_DNS_SUBDOMAIN: Final = re.compile(
    r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII
)
_MAX_NAME_LENGTH: Final = 240
"""Kubernetes allows 253 characters; the rest is for prefixes and suffixes."""
