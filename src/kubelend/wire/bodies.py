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

from kubelend.wire import codes, patterns


def camel(name: str) -> str:
    """`target_cluster_id` is `targetClusterID` and `endpoint_url` is `endpointURL` on the wire."""
    first, *rest = name.split("_")
    return first + "".join({"id": "ID", "ids": "IDs", "url": "URL"}.get(w, w.title()) for w in rest)


Timestamp = Annotated[datetime, Meta(tz=True, description="RFC 3339")]
_QUANTITY = Meta(description="A Kubernetes quantity", examples=["500m", "256Mi", "4"])
_Number = Annotated[int, Meta(extra_json_schema=patterns.NUMBER)]
_Text = Annotated[str, Meta(extra_json_schema=patterns.QUANTITY)]
Quantity = Annotated[_Text | _Number, _QUANTITY]
Cores = Annotated[_Text | Annotated[int, Meta(extra_json_schema=patterns.CORES)], _QUANTITY]
QuantityOrNone = Annotated[
    Annotated[str, Meta(extra_json_schema=patterns.QUANTITY_OR_NONE)] | _Number, _QUANTITY
]
_DURATION = Meta(max_length=64, description="A Go duration", examples=["1h30m", "90s"])
Duration = Annotated[str, _DURATION, Meta(extra_json_schema=patterns.DURATION)]
Wait = Annotated[str, _DURATION, Meta(extra_json_schema=patterns.WAIT)]
_PLAIN = Meta(extra_json_schema=patterns.PLAIN)
Name = Annotated[str, Meta(max_length=253), _PLAIN]
Reason = Annotated[str, Meta(max_length=1024), _PLAIN]
Url = Annotated[str, Meta(max_length=2048), _PLAIN]
MOST_LABELS = 64
"""The region is one of them, however it is said."""
Labels = Annotated[
    dict[Annotated[str, Meta(max_length=317), _PLAIN], Name], Meta(max_length=MOST_LABELS)
]
Price = Annotated[
    str,
    Meta(max_length=20, description="A decimal number", examples=["0.05"]),
    Meta(extra_json_schema=patterns.PRICE),
]
Currency = Annotated[str, Meta(max_length=8, extra_json_schema=patterns.CURRENCY)]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]


class Body(msgspec.Struct, frozen=True, omit_defaults=True, rename=camel):
    """The common shape: frozen, camel case, and silent about what is default."""


class Amounts(Body, frozen=True):
    """Amounts that the broker works out. Clusters may send them as well: they are not read."""

    cpu: str | int
    """Processor, in cores: 500m is half of one."""
    memory: str | int
    """Memory, in bytes: 256Mi, 8Gi."""
    gpu: str | int = ""
    """Whole devices; in Kubernetes nvidia.com/gpu."""
    storage: str | int = ""
    """Disk, in bytes."""
    extended: Annotated[dict[str, str | int], Meta(max_length=32)] = {}
    """Any other resource, by its Kubernetes name."""


class Quantities(Amounts, frozen=True):
    """Amounts by resource; `extended` holds any other resource by its Kubernetes name."""

    cpu: Cores
    memory: Quantity
    gpu: QuantityOrNone = ""
    storage: QuantityOrNone = ""
    extended: Annotated[
        dict[Annotated[str, Meta(extra_json_schema=patterns.RESOURCE_NAME)], Quantity],
        Meta(max_length=32),
    ] = {}


class Metrics(Body, frozen=True):
    """What a cluster has, and the broker's view of it."""

    capacity: Quantities
    allocatable: Quantities | None = None
    allocated: Quantities | None = None
    reserved: Amounts | None = None
    available: Amounts | None = None


class Cost(Body, frozen=True):
    """Prices per core-hour, GB-hour and device-hour."""

    cpu_cost: Price = ""
    """Of a core for an hour."""
    memory_cost: Price = ""
    """Of a GB of memory for an hour."""
    gpu_cost: Price = ""
    """Of a device for an hour."""
    storage_cost: Price = ""
    """Of a GB of disk for an hour."""
    currency: Currency = "USD"
    """In which these are; no rates are known, so it is compared by name."""


AmountsByName = Annotated[
    dict[Annotated[str, Meta(extra_json_schema=patterns.RESOURCE)], Quantity],
    Meta(max_length=36, description="Quantities by resource", examples=[{"cpu": "4"}]),
]
Requesters = Annotated[
    list[Annotated[str, Meta(max_length=253, extra_json_schema=patterns.REQUESTERS)]],
    Meta(max_length=256, description="Cluster IDs and shell patterns", examples=[["team-*"]]),
]
Hours = Annotated[
    str,
    Meta(max_length=160, examples=["Mon-Fri 18:00-08:00 Europe/Rome"]),
    Meta(extra_json_schema=patterns.HOURS),
]


class LendingPolicy(Body, frozen=True):
    """To whom a cluster lends, how much and when. What is not said is not limited."""

    allow: Requesters = []
    """To everyone if empty."""
    deny: Requesters = []
    """Whatever `allow` says."""
    keep_back: AmountsByName = {}
    """What stays free for itself."""
    max_lent: AmountsByName = {}
    """In total; zero lends none of it."""
    max_per_requester: AmountsByName = {}
    """To any one cluster."""
    hours: Annotated[list[Hours], Meta(max_length=16)] = []
    """When new reservations may start."""


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
    endpoint_url: Url = ""
    policy: LendingPolicy | None = None


class EffectivePolicy(Body, frozen=True):
    """What holds of a cluster's own policy and the administrator's: the stricter of both."""

    allow: list[list[str]] = []
    """Every one of these lists has to name a requester."""
    deny: list[str] = []
    keep_back: dict[str, str] = {}
    max_lent: dict[str, str] = {}
    max_per_requester: dict[str, str] = {}
    hours: list[list[str]] = []
    """Every one of these lists has to be open."""


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
    certificate_until: Timestamp | None = None
    policy: EffectivePolicy | None = None
    withheld: dict[str, str] = {}
    """What of the available amounts it does not lend now, because of its policy."""
    closed: bool = False
    """Whether it is outside its opening hours now."""


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

    reason: Reason = ""


class Drained(Body, frozen=True):
    """A drained cluster, and what became of the reservations it had."""

    cluster: Cluster
    reservations: list[Reservation]


class ConstraintsBody(Body, frozen=True):
    """Where a request may go."""

    labels: Labels = {}
    """A provider has all of these, with these values."""
    region: Name = ""
    """Short for the label topology.kubernetes.io/region."""
    exclude: Annotated[list[Name], Meta(max_length=256)] = []
    """Clusters it must not go to."""
    max_price_per_hour: Price = ""
    """Of the whole request; who asks for more, or in another currency, is passed over. No price passes."""
    currency: Currency = ""
    """In which prices are compared. If none is named: USD for the price above, else what most ask for."""


UNCONSTRAINED = ConstraintsBody()
Policy = Annotated[str, Meta(max_length=253, extra_json_schema=patterns.POLICY)]
Weights = Annotated[
    dict[
        Annotated[str, Meta(extra_json_schema=patterns.SCORE)],
        Annotated[float, Meta(extra_json_schema=patterns.WEIGHT)],
    ],
    Meta(max_length=16, extra_json_schema=patterns.WEIGHTS),
]


class ReservationRequest(Body, frozen=True):
    """What a cluster asks for."""

    requested_resources: Annotated[Quantities, Meta(extra_json_schema=patterns.WANTED)]
    """CPU and memory must be asked for."""
    priority: Int32 = 0
    """Among requests that wait, the larger is served first."""
    duration: Duration = ""
    """For how long; the broker's default, if it is not said."""
    wait: Wait = ""
    """For how long it may wait for capacity; it fails at once if empty and nothing fits."""
    policy: Policy = ""
    """How to choose among the clusters that fit: headroom, binpack, cost or balanced."""
    weights: Weights = {}
    """How much each score counts, instead of a policy."""
    target_cluster_id: Name = ""
    """This provider or none; the broker chooses, if it is not said."""
    constraints: ConstraintsBody = UNCONSTRAINED
    """Where it may go, beside where it fits."""


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


class AgreedCost(Body, frozen=True):
    """What a reservation costs where it is, as agreed when it was placed there."""

    price_per_hour: str
    currency: str


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
    cost: AgreedCost | None = None
    revision: int = 0
    """Grows with every change: of two answers, the one with the larger is the newer."""


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
    """Why a provider will not serve a reservation; the requester reads it, in one line."""

    reason: Annotated[str, Meta(max_length=1024)] = ""
    """Of any form, because it must not be lost: control characters and line breaks become spaces."""


class Instruction(Body, frozen=True):
    """What one side of a reservation has to do now. `revision` orders them, and resumes a stream."""

    revision: int
    role: str
    action: str
    message: str
    reservation: Reservation
    grant: Annotated[str, Meta(description="To hold or to use: the reservation, signed")] = ""


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
    quota: list[str] = []
    """What of the requester's own quota the request would exceed, whatever the clusters say."""


class Problem(Body, frozen=True):
    """An error, as RFC 9457 has it; `error` repeats the text for clients of the published system."""

    type: str
    title: str
    status: int
    detail: str
    code: Annotated[str, Meta(extra_json_schema=patterns.one_of(*codes.BY_CODE))]
    error: str
    hint: str = ""
    retryable: bool = False
    explanation: Explanation | None = None


class Version(Body, frozen=True):
    """Which broker answers."""

    version: str
    api: str = "v1"
