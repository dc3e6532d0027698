"""The objects of the broker's cluster, group `broker.fluidos.eu`, as types.

Fields that the published contract has keep their names; ours are optional beside them. Spec and status are
for people and for agents. The broker itself goes by the record that is kept in the status, word for word:
what somebody writes into the other fields can ask for a change, and never makes one.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from kubelend.core.lifecycle import Phase
from kubelend.wire import bodies, patterns, rules
from kubelend.wire.bodies import Amounts, Cost, Quantities, Timestamp
from kubelend.wire.objects import (
    Duration,
    Metadata,
    Name,
    Object,
    Part,
    Question,
    Reason,
    Reply,
)

GROUP = "broker.fluidos.eu"

RESERVATION_FINALIZER = "reservation.broker.fluidos.eu/finalizer"


class Kept(Part, frozen=True):
    """The broker's stored record. Written by the broker alone; do not edit."""

    revision: int
    """The number of the store's commit that wrote it: the larger is the newer."""
    checksum: Annotated[str, Meta(extra_json_schema=patterns.up_to(64))]
    """Signature of the broker over the object's name, the revision and the data."""
    data: Annotated[str, Meta(extra_json_schema=patterns.up_to(2**20))]
    """The record as JSON text. As text, because the API server rounds large numbers inside objects."""


class Condition(Part, frozen=True):
    """One aspect of the state, as Kubernetes objects tell it."""

    type: Annotated[str, Meta(extra_json_schema=patterns.up_to(316))]
    """Which aspect."""
    status: Annotated[str, Meta(extra_json_schema=patterns.one_of("True", "False", "Unknown"))]
    """True, False or Unknown."""
    reason: Reason = ""
    """One word that says why."""
    message: str = ""
    """Why, for people."""
    last_transition_time: Timestamp | None = None
    """When the status last became what it is."""
    observed_generation: int = 0
    """Of the spec that it speaks of."""


Conditions = Annotated[
    tuple[Condition, ...], Meta(max_length=16, extra_json_schema=patterns.KEYED_BY_TYPE)
]


Counted = Annotated[Quantities, Meta(extra_json_schema=rules.COUNTED)]


class AdvertisedResources(Part, frozen=True):
    """What a cluster has, and how much of it is left."""

    capacity: Counted
    """All that its nodes have."""
    allocated: Counted
    """What pods ask for now."""
    available: Amounts
    """Allocatable, less allocated and reserved. The broker works it out itself, and corrects it here."""
    allocatable: Counted | None = None
    """What pods may ask for; the capacity, if it is not said."""
    reserved: Amounts | None = None
    """What the broker has promised of it. Written by the broker."""


class ClusterAdvertisementSpec(Part, frozen=True):
    """What a cluster offers."""

    cluster_id: Annotated[bodies.Name, Meta(extra_json_schema=rules.unchanged("clusterID"))]
    """Whose it is: the common name of the cluster's certificate. It cannot be changed."""
    resources: AdvertisedResources
    cluster_name: bodies.Name = ""
    """What people call it."""
    cost: Cost | None = None
    timestamp: Timestamp | None = None
    """When it was measured, by the cluster's own clock; when the object was made, if it is not said."""
    endpoint_url: bodies.Url = ""
    """Where the cluster can be reached."""
    labels: bodies.Labels = {}
    """By which requests choose among clusters."""
    region: bodies.Name = ""
    """Short for the label topology.kubernetes.io/region."""
    valid_for: Duration = ""
    """For how long it may be relied on; never longer than the broker allows."""
    policy: bodies.LendingPolicy | None = None
    """To whom it lends, how much and when."""
    request: Question | None = None


class ClusterAdvertisementStatus(Part, frozen=True):
    """What the broker makes of an advertisement."""

    phase: Annotated[str, Meta(extra_json_schema=patterns.one_of("Active", "Stale"))] = ""
    """Active or Stale."""
    last_update_time: Timestamp | None = None
    """When the broker last heard of the cluster."""
    active: bool = False
    """Whether new reservations may go there."""
    message: str = ""
    """What is wrong, for people."""
    score: Annotated[str, Meta(extra_json_schema=patterns.up_to(16))] = ""
    """How much of it is free, from 0 to 100 with two decimals."""
    conditions: Conditions = ()
    """Ready, Stale and Overcommitted."""
    observed_generation: int = 0
    """Of the spec that was last taken in."""
    valid_until: Timestamp | None = None
    """When it becomes stale if nothing more is heard."""
    cordon_reason: str = ""
    """Why an administrator closed it to new reservations; empty while it is open."""
    reservations: int = 0
    """How many hold capacity there."""
    record: Kept | None = None
    response: Reply | None = None


class ClusterAdvertisement(Object, frozen=True):
    """What one cluster offers the others; named `<cluster>-adv`."""

    group: ClassVar[str] = GROUP
    kind: ClassVar[str] = "ClusterAdvertisement"
    plural: ClassVar[str] = "clusteradvertisements"

    metadata: Metadata
    spec: ClusterAdvertisementSpec
    status: ClusterAdvertisementStatus = ClusterAdvertisementStatus()


class ReservationSpec(Part, frozen=True):
    """What is wanted."""

    requested_resources: Annotated[
        Quantities, Meta(extra_json_schema={**patterns.WANTED, **rules.REQUESTED})
    ]
    """How much. CPU and memory must be asked for. It cannot be changed: make another reservation."""
    target_cluster_id: bodies.Name = ""
    """The provider. Set by the user: this one or none. Else the broker chooses, and writes it here."""
    duration: Duration = ""
    """For how long; the broker's default, if it is not said."""
    priority: bodies.Int32 = 0
    """Among requests that wait, the larger is served first."""
    requester_id: bodies.Name = ""
    """The cluster that borrows. It cannot be changed."""
    wait: bodies.Wait = ""
    """For how long it may wait for capacity; it fails at once if empty and nothing fits."""
    policy: bodies.Policy = ""
    """How to choose among the clusters that fit: headroom, binpack, cost or balanced."""
    weights: Annotated[bodies.Weights, Meta(extra_json_schema=rules.WEIGHTS)] = {}
    """How much each score counts, instead of a policy."""
    constraints: bodies.ConstraintsBody = bodies.UNCONSTRAINED
    """Where it may go, beside where it fits."""
    request: Question | None = None


class ReservationStatus(Part, frozen=True):
    """Where it stands. `reason` is for programs, `message` for people."""

    phase: Annotated[str, Meta(extra_json_schema=patterns.one_of(*Phase))] = ""
    """Pending, Reserved, Active, Released or Failed. The last two are final."""
    message: str = ""
    """Why, and what to do, for people."""
    reason: Reason = ""
    """One word that says why."""
    target_cluster_id: Name = ""
    """The provider that holds the amounts."""
    reserved_at: Timestamp | None = None
    """When the amounts were set aside where they are."""
    expires_at: Timestamp | None = None
    """When the amounts go back by themselves."""
    wait_until: Timestamp | None = None
    """When it fails if nothing fits until then."""
    acknowledged_at: Timestamp | None = None
    """When the provider had set them aside."""
    activated_at: Timestamp | None = None
    """When the requester began to use them."""
    finished_at: Timestamp | None = None
    """When it was over."""
    last_update_time: Timestamp | None = None
    """When this status last changed."""
    conditions: Conditions = ()
    """RequesterActive and RequesterReleased are the requester's to set."""
    observed_generation: int = 0
    """Of the spec that was last taken in."""
    record: Kept | None = None
    response: Reply | None = None


class Reservation(Object, frozen=True):
    """One request for resources of another cluster, and what became of it."""

    group: ClassVar[str] = GROUP
    kind: ClassVar[str] = "Reservation"
    plural: ClassVar[str] = "reservations"

    metadata: Metadata
    spec: Annotated[ReservationSpec, Meta(extra_json_schema=rules.kept("requesterID"))]
    status: ReservationStatus = ReservationStatus()


class MailboxSpec(Part, frozen=True):
    """The cluster's request."""

    request: Question | None = None


class MailboxStatus(Part, frozen=True):
    """The broker's response to the cluster."""

    cluster_id: Name = ""
    """The cluster of this namespace, from its label."""
    session: Annotated[str, Meta(extra_json_schema=patterns.up_to(128))] = ""
    """ID of the session of the cluster's active agent; another one for each session."""
    revision: int = 0
    """Ledger revision up to which the namespace was complete when the last request was answered."""
    compacted_revision: int = 0
    """An agent that has seen this revision has missed no object that was removed since."""
    last_update_time: Timestamp | None = None
    """When this status last changed."""
    response: Reply | None = None


class Mailbox(Object, frozen=True):
    """The session of one cluster's agent with the broker: one in each cluster namespace, named `session`."""

    group: ClassVar[str] = GROUP
    kind: ClassVar[str] = "ClusterSession"
    plural: ClassVar[str] = "clustersessions"

    metadata: Metadata
    spec: MailboxSpec = MailboxSpec()
    status: MailboxStatus = MailboxStatus()


class LedgerRecord(Object, frozen=True):
    """A record of the broker without an object of its own. Written by the broker alone; do not edit."""

    group: ClassVar[str] = GROUP
    kind: ClassVar[str] = "LedgerRecord"
    plural: ClassVar[str] = "ledgerrecords"

    metadata: Metadata
    contents: Annotated[str, Meta(extra_json_schema=patterns.up_to(63))]
    """Type of the record: head, pending, audit-log, member, token or limits."""
    record: Kept


KINDS: tuple[type[Object], ...] = (ClusterAdvertisement, Reservation, Mailbox, LedgerRecord)
