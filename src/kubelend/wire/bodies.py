"""The JSON bodies of the REST interface, as types. What existing clients send and read is in here.

Fields that the published contract has keep their names; ours are optional beside them. Unknown fields
are ignored, because an older or newer peer may send them. Conversions to and from the records of the
core are in `wire.conversion`.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta


def camel(name: str) -> str:
    """`target_cluster_id` is `targetClusterID` and `endpoint_url` is `endpointURL` on the wire."""
    first, *rest = name.split("_")
    return first + "".join({"id": "ID", "ids": "IDs", "url": "URL"}.get(w, w.title()) for w in rest)


Timestamp = Annotated[datetime, Meta(tz=True, description="RFC 3339")]
Quantity = Annotated[
    str | int, Meta(description="A Kubernetes quantity", examples=["500m", "256Mi", "4"])
]
Duration = Annotated[
    str, Meta(max_length=64, description="A Go duration", examples=["1h30m", "90s"])
]
Name = Annotated[str, Meta(max_length=253)]
Labels = Annotated[
    dict[Annotated[str, Meta(max_length=317)], Annotated[str, Meta(max_length=253)]],
    Meta(max_length=64),
]
Price = Annotated[str, Meta(max_length=20, description="A decimal number", examples=["0.05"])]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]


class Body(msgspec.Struct, frozen=True, omit_defaults=True, rename=camel):
    """The common shape: frozen, camel case, and silent about what is default."""


class Quantities(Body, frozen=True):
    """Amounts by resource; `extended` holds any other resource by its Kubernetes name."""

    cpu: Quantity
    memory: Quantity
    gpu: Quantity = ""
    storage: Quantity = ""
    extended: Annotated[dict[str, Quantity], Meta(max_length=32)] = {}


class Metrics(Body, frozen=True):
    """What a cluster has. `reserved` and `available` are the broker's: what is sent is not read."""

    capacity: Quantities
    allocatable: Quantities | None = None
    allocated: Quantities | None = None
    reserved: Quantities | None = None
    available: Quantities | None = None


class Cost(Body, frozen=True):
    """Prices per core-hour, GB-hour and device-hour."""

    cpu_cost: Price = ""
    memory_cost: Price = ""
    gpu_cost: Price = ""
    storage_cost: Price = ""
    currency: Annotated[str, Meta(max_length=8)] = "USD"


class Advertisement(Body, frozen=True):
    """What a cluster offers."""

    cluster_id: Name
    resources: Metrics
    cluster_name: Name = ""
    timestamp: Timestamp | None = None
    cost: Cost | None = None
    labels: Labels = {}
    region: Name = ""
    valid_for: Duration = ""
    endpoint_url: Annotated[str, Meta(max_length=2048)] = ""


class ClusterStatus(Body, frozen=True):
    """What the broker makes of an advertisement."""

    phase: str
    active: bool
    score: str
    rating: str
    last_update_time: Timestamp
    valid_until: Timestamp
    cordoned: bool = False
    cordon_reason: str = ""
    reservations: int = 0
    message: str = ""


class Cluster(Body, frozen=True):
    """A cluster as administrators see it."""

    advertisement: Advertisement
    status: ClusterStatus


class ClusterList(Body, frozen=True):
    """One page of clusters; `next` continues it."""

    clusters: list[Cluster]
    next: str = ""


class CordonRequest(Body, frozen=True):
    """Why a cluster is closed; kept and shown."""

    reason: Annotated[str, Meta(max_length=1024)] = ""


class Drained(Body, frozen=True):
    """A drained cluster, and what became of the reservations it had."""

    cluster: Cluster
    reservations: list[Reservation]


class ConstraintsBody(Body, frozen=True):
    """Where a request may go."""

    labels: Labels = {}
    region: Name = ""
    exclude: Annotated[list[Name], Meta(max_length=256)] = []
    max_price_per_hour: Price = ""
    currency: Annotated[str, Meta(max_length=8)] = "USD"


UNCONSTRAINED = ConstraintsBody()


class ReservationRequest(Body, frozen=True):
    """What a cluster asks for."""

    requested_resources: Quantities
    priority: Int32 = 0
    duration: Duration = ""
    wait: Duration = ""
    policy: Name = ""
    weights: Annotated[dict[str, float], Meta(max_length=16)] = {}
    target_cluster_id: Name = ""
    constraints: ConstraintsBody = UNCONSTRAINED


class ReservationStatus(Body, frozen=True):
    """Where a reservation stands, and why."""

    phase: str
    message: str
    reason: str = ""
    reserved_at: Timestamp | None = None
    expires_at: Timestamp | None = None
    wait_until: Timestamp | None = None
    acknowledged_at: Timestamp | None = None
    activated_at: Timestamp | None = None
    finished_at: Timestamp | None = None


class Reservation(Body, frozen=True):
    """One request and what became of it."""

    id: str
    requester_id: str
    target_cluster_id: str
    requested_resources: Quantities
    status: ReservationStatus
    created_at: Timestamp
    priority: int = 0
    duration: str = ""
    previous_cluster_ids: list[str] = []


class ReservationList(Body, frozen=True):
    """One page of reservations; `next` continues it."""

    reservations: list[Reservation]
    next: str = ""


class Published(Body, frozen=True):
    """The answer to an advertisement: the broker's view of it, and what the cluster has to hold."""

    advertisement: Advertisement
    provider_instructions: list[Reservation] = []


class RenewRequest(Body, frozen=True):
    """For how long from now; the original duration if empty."""

    duration: Duration = ""


class RefuseRequest(Body, frozen=True):
    """Why a provider will not serve a reservation; the requester reads it."""

    reason: Annotated[str, Meta(max_length=1024)] = ""


class Instruction(Body, frozen=True):
    """What one side of a reservation has to do now. `revision` orders them, and resumes a stream."""

    revision: int
    role: str
    action: str
    message: str
    reservation: Reservation


class Remedy(Body, frozen=True):
    """The smallest change of the request that would make it fit."""

    cluster_id: str
    text: str
    less: dict[str, str] = {}
    max_price_per_hour: str = ""
    currency: str = ""
    drop_labels: dict[str, str] = {}


class Candidate(Body, frozen=True):
    """One cluster in the light of one request."""

    cluster_id: str
    fits: bool
    refusals: list[str] = []
    score: float | None = None
    price_per_hour: str = ""
    currency: str = ""
    remedy: Remedy | None = None


class Explanation(Body, frozen=True):
    """Why a request fits where it fits and nowhere else."""

    summary: str
    total: int
    fitting: int
    refusals: dict[str, int]
    candidates: list[Candidate] = []
    remedy: Remedy | None = None


class Problem(Body, frozen=True):
    """An error, as RFC 9457 has it; `error` repeats the text for clients of the published system."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    error: str
    hint: str = ""
    retryable: bool = False
    explanation: Explanation | None = None


class Version(Body, frozen=True):
    """Which broker answers."""

    version: str
    api: str = "v1"
