"""Custom resources of group `broker.fluidos.eu`, in the broker's cluster, as types.

Fields of the published contract keep their names; fields that Kubelend adds are optional. Spec and status
are for users and agents. The broker itself relies on the stored record in the status: other fields can
request a change but never make one.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

import msgspec
from msgspec import Meta

from kubelend.core.lifecycle import Phase
from kubelend.wire import bodies, json_types
from kubelend.wire.bodies import Amounts, Cost, Quantities, Timestamp
from kubelend.wire.objects import (
    Conditions,
    Duration,
    Metadata,
    Name,
    Object,
    ObjectStruct,
    Reason,
    SentHandshake,
)

GROUP = "broker.fluidos.eu"

RESERVATION_FINALIZER = "reservation.broker.fluidos.eu/finalizer"

CORDON_ANNOTATION: Final = f"{GROUP}/cordon"
UNCORDON_ANNOTATION: Final = f"{GROUP}/uncordon"
DRAIN_ANNOTATION: Final = f"{GROUP}/drain"
"""Requests of an administrator on a ClusterAdvertisement, with the reason as value. The broker removes them
when it has carried them out."""


class StoredRecord(ObjectStruct, frozen=True):
    """The broker's stored record. Written by the broker alone; do not edit."""

    revision: int
    """The number of the store's commit that wrote it: the larger is the newer."""
    checksum: Annotated[str, Meta(extra_json_schema=json_types.max_length(64))]
    """Checksum of the object's name, the revision and the data (CRC-32)."""
    data: Annotated[str, Meta(extra_json_schema=json_types.max_length(2**20))]
    """The record as JSON text. As text, because the API server rounds large numbers inside objects."""


WholeQuantities = Annotated[
    Quantities, Meta(extra_json_schema=json_types.NON_NEGATIVE_CPU_AND_MEMORY)
]


class AdvertisedResources(ObjectStruct, frozen=True):
    """Resources of the cluster, and how much of them is available."""

    capacity: WholeQuantities
    """Total capacity of the cluster's nodes."""
    allocated: WholeQuantities
    """Sum of the resource requests of running pods."""
    available: Amounts
    """Allocatable minus allocated minus reserved. Computed by the broker; other values are overwritten."""
    allocatable: WholeQuantities | None = None
    """Capacity available to pods. Defaults to capacity."""
    reserved: Amounts | None = None
    """Resources reserved for other clusters. Managed by the broker."""


class ClusterAdvertisementSpec(ObjectStruct, frozen=True):
    """ClusterAdvertisementSpec defines the resources that a cluster offers, and its lending policy."""

    cluster_id: Annotated[bodies.Name, Meta(extra_json_schema=json_types.immutable("clusterID"))]
    """ID of the cluster, which is the common name of its certificate. Immutable."""
    resources: AdvertisedResources
    cluster_name: bodies.Name = ""
    """Display name of the cluster."""
    cost: Cost | None = None
    timestamp: Timestamp | None = None
    """Time of the measurement by the cluster's clock. Defaults to the creation time of the object."""
    endpoint_url: bodies.Url = ""
    """URL at which the cluster can be reached."""
    labels: bodies.Labels = {}
    """Labels of the cluster, which requests can select by."""
    region: bodies.Name = ""
    """Region of the cluster. Equivalent to the label topology.kubernetes.io/region."""
    valid_for: Duration = ""
    """How long the advertisement is valid. Capped by the broker."""
    policy: bodies.LendingPolicy | None = None
    """Lending policy: allowed requesters, limits and opening hours."""
    renew_time: Timestamp | None = None
    """Time at which the agent last wrote the advertisement. A new value renews it."""


class ClusterAdvertisementStatus(ObjectStruct, frozen=True):
    """ClusterAdvertisementStatus is the broker's view of the cluster."""

    phase: Annotated[str, Meta(extra_json_schema=json_types.enum_of("Active", "Stale"))] = ""
    """Active, or Stale if the advertisement is no longer valid."""
    last_update_time: Timestamp | None = None
    """Time of the last advertisement that the broker received from the cluster."""
    active: bool = False
    """Whether the cluster accepts new reservations."""
    message: str = ""
    """Human-readable description of a problem, if there is one."""
    score: Annotated[str, Meta(extra_json_schema=json_types.max_length(16))] = ""
    """Share of free resources as a score from 0 to 100 with two decimals."""
    conditions: Conditions = ()
    """Conditions Ready, Stale and Overcommitted; in a cluster namespace Accepted."""
    observed_generation: int = 0
    """Generation of the spec that this status refers to."""
    valid_until: Timestamp | None = None
    """Time at which the advertisement becomes stale unless the cluster advertises again."""
    cordon_reason: str = ""
    """Reason of the cordon. Empty if the cluster is not cordoned."""
    reservations: int = 0
    """Number of reservations that hold resources of the cluster."""
    reserved: Amounts | None = None
    """Resources reserved for other clusters, in a cluster namespace: its agent alone writes the spec."""
    available: Amounts | None = None
    """Allocatable minus allocated minus reserved, in a cluster namespace."""
    record: StoredRecord | None = None


class ClusterAdvertisement(Object, frozen=True):
    """ClusterAdvertisement shows the resources that a cluster offers to others. Named `<cluster>-adv`."""

    group: ClassVar[str] = GROUP
    kind: ClassVar[str] = "ClusterAdvertisement"
    plural: ClassVar[str] = "clusteradvertisements"

    metadata: Metadata
    spec: ClusterAdvertisementSpec
    status: ClusterAdvertisementStatus = ClusterAdvertisementStatus()


class Renewal(ObjectStruct, frozen=True):
    """A renewal of the reservation."""

    time: Timestamp
    """Time at which it was requested. A new value renews the reservation once more."""
    duration: Duration = ""
    """Duration from now. Defaults to the original duration."""


class ReservationSpec(bodies.ReservationRequest, frozen=True):
    """ReservationSpec defines the resources to reserve."""

    requested_resources: Annotated[
        Quantities,
        Meta(
            extra_json_schema={
                **json_types.POSITIVE_CPU_AND_MEMORY,
                **json_types.IMMUTABLE_POSITIVE_AMOUNTS,
            }
        ),
    ]
    """Amounts to reserve. CPU and memory are required. Immutable."""
    duration: Duration = ""
    weights: Annotated[bodies.Weights, Meta(extra_json_schema=json_types.WEIGHTS_RULE)] = {}
    target_cluster_id: bodies.Name = ""
    """ID of the provider cluster. If set by the user, only this provider is considered; otherwise the
    broker chooses a provider and sets the field.
    """
    requester_id: bodies.Name = ""
    """ID of the requester cluster. Immutable once set."""
    released: bool = False
    """Release the reservation. It cannot be used again."""
    active_cluster_id: bodies.Name = ""
    """ID of the provider whose resources the requester uses. The reservation becomes Active while that is its
    provider.
    """
    renewal: Renewal | None = None
    handshake: SentHandshake | None = None


class ReservationStatus(ObjectStruct, frozen=True):
    """ReservationStatus is the observed state of the reservation."""

    phase: Annotated[str, Meta(extra_json_schema=json_types.enum_of(*Phase))] = ""
    """Phase of the reservation: Pending, Reserved, Active, Released or Failed. Released and Failed are
    final.
    """
    message: str = ""
    """Human-readable explanation of the phase."""
    reason: Reason = ""
    """Machine-readable reason, in CamelCase."""
    target_cluster_id: Name = ""
    """ID of the provider cluster that holds the resources."""
    reserved_at: Timestamp | None = None
    """Time at which the resources were reserved at the current provider."""
    expires_at: Timestamp | None = None
    """Time at which the reservation expires unless renewed."""
    wait_until: Timestamp | None = None
    """Time at which a waiting request fails."""
    acknowledged_at: Timestamp | None = None
    """Time at which the provider acknowledged the reservation."""
    held: bodies.HoldReport | None = None
    """Whether the nodes of the provider really keep the resources, as it reports."""
    activated_at: Timestamp | None = None
    """Time at which the requester activated the reservation."""
    finished_at: Timestamp | None = None
    """Time at which the reservation ended."""
    last_update_time: Timestamp | None = None
    """Time of the last status change."""
    conditions: Conditions = ()
    """Conditions of the reservation. RequesterActive and RequesterReleased are set by the requester; Accepted
    says whether the broker accepts the spec, with the error code as reason if not.
    """
    observed_generation: int = 0
    """Generation of the spec that this status refers to."""
    instruction: bodies.Instruction | None = None
    """The reservation and what its requester has to do, in a cluster namespace."""
    renew_time: Timestamp | None = None
    """The `time` of the last renewal that was processed."""
    handshake_time: Timestamp | None = None
    """The `sentAt` of the requester's handshake that was passed on."""
    peer: bodies.Handshake | None = None
    """The handshake of the provider, when the requester last sent its own."""
    peer_handshakes: int = 0
    """Number of handshakes of the provider that the requester was to be notified of."""
    record: StoredRecord | None = None


_RESERVATION_RULES: Final = json_types.combine_rules(
    json_types.immutable_once_set("requesterID"),
    json_types.immutable_fields(
        one
        for one in msgspec.structs.fields(bodies.ReservationRequest)
        if one.name not in {"requested_resources", "target_cluster_id"}  # which have their own
    ),
)


class Reservation(Object, frozen=True):
    """Reservation reserves resources of one cluster for another."""

    group: ClassVar[str] = GROUP
    kind: ClassVar[str] = "Reservation"
    plural: ClassVar[str] = "reservations"

    metadata: Metadata
    spec: Annotated[ReservationSpec, Meta(extra_json_schema=_RESERVATION_RULES)]
    status: ReservationStatus = ReservationStatus()


class PlacementReviewSpec(ObjectStruct, frozen=True):
    """PlacementReviewSpec is a request, or the name of a reservation. It is evaluated once."""

    request: bodies.ReservationRequest | None = None
    requester_id: bodies.Name = ""
    """ID of the requester cluster. Defaults to the name of the namespace."""
    reservation_name: Name = ""
    """Explain this reservation instead, by the present state of the clusters."""
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    """Maximum number of clusters in the explanation."""


class PlacementReviewStatus(ObjectStruct, frozen=True):
    """PlacementReviewStatus is the result."""

    explanation: bodies.Explanation | None = None
    conditions: Conditions = ()
    """Condition Accepted: False if the spec is invalid, with the error code as reason."""
    observed_generation: int = 0
    """Generation of the spec that was evaluated."""


class PlacementReview(Object, frozen=True):
    """PlacementReview asks where a request fits, and where not and why. It reserves nothing, and the broker
    deletes it after some minutes.
    """

    group: ClassVar[str] = GROUP
    kind: ClassVar[str] = "PlacementReview"
    plural: ClassVar[str] = "placementreviews"

    metadata: Metadata
    spec: PlacementReviewSpec
    status: PlacementReviewStatus = PlacementReviewStatus()


class ClusterSessionSpec(ObjectStruct, frozen=True):
    """ClusterSessionSpec is what the agent of the cluster needs to know."""

    sync_time: Timestamp | None = None
    """Time at which the agent last needed all that the broker knows. Once `status.observedGeneration` is that
    of this spec, the namespace shows everything that the broker knew then.
    """
    reservation_name: Name = ""
    """ID of a reservation to show in the status, also one that is archived."""
    agent: Annotated[str, Meta(extra_json_schema=json_types.max_length(64))] = ""
    """Name of the agent that watches the namespace."""
    watch: Annotated[str, Meta(extra_json_schema=json_types.max_length(64))] = ""
    """ID of the agent's watch, another one for each; empty if it does not watch."""


class ClusterSessionStatus(ObjectStruct, frozen=True):
    """ClusterSessionStatus is what the broker shows to the agent of the cluster."""

    cluster_id: Name = ""
    """The cluster of this namespace, from its label."""
    observed_generation: int = 0
    """Generation of the spec that this status refers to."""
    watch: Annotated[str, Meta(extra_json_schema=json_types.max_length(64))] = ""
    """ID of the watch, as long as the broker serves it. The agent starts another one when this changes."""
    revision: int = 0
    """Ledger revision up to which the namespace was complete."""
    compacted_revision: int = 0
    """An agent that has seen this revision has missed no object that was removed since."""
    reservation: bodies.Reservation | None = None
    """The reservation that the spec names."""
    grant_keys: Annotated[
        tuple[bodies.PublicKey, ...], Meta(extra_json_schema=json_types.max_items(16))
    ] = ()
    """Keys that verify grants."""
    conditions: Conditions = ()
    """Condition Accepted: whether the broker could do what the spec asks for."""
    last_update_time: Timestamp | None = None
    """When this status last changed."""


class ClusterSession(Object, frozen=True):
    """ClusterSession connects the agent of a cluster with the broker. One in each cluster namespace, named
    `session`.
    """

    group: ClassVar[str] = GROUP
    kind: ClassVar[str] = "ClusterSession"
    plural: ClassVar[str] = "clustersessions"

    metadata: Metadata
    spec: ClusterSessionSpec = ClusterSessionSpec()
    status: ClusterSessionStatus = ClusterSessionStatus()


class LedgerRecord(Object, frozen=True):
    """A record of the broker without an object of its own. Written by the broker alone; do not edit."""

    group: ClassVar[str] = GROUP
    kind: ClassVar[str] = "LedgerRecord"
    plural: ClassVar[str] = "ledgerrecords"

    metadata: Metadata
    contents: Annotated[str, Meta(extra_json_schema=json_types.max_length(63))]
    """Type of the record: head, pending, audit-log, member, token or limits."""
    record: StoredRecord


KINDS: tuple[type[Object], ...] = (
    ClusterAdvertisement,
    Reservation,
    PlacementReview,
    ClusterSession,
    LedgerRecord,
)
