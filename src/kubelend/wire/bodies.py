"""JSON bodies of the REST API.

Fields of the published contract keep their names; fields that Kubelend adds are optional. Unknown fields
are ignored, because an older or newer peer may send them; but not in what people send, where they are
mistakes: a token for `nmae` would be one for anybody. `wire.conversion` converts bodies to and from the
records of the core.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from kubelend.wire import json_types


def camel_case(name: str) -> str:
    """`target_cluster_id` is `targetClusterID` and `endpoint_url` is `endpointURL` on the wire."""
    first, *rest = name.split("_")
    return first + "".join(_ACRONYMS.get(word, word.title()) for word in rest)


_ACRONYMS = {"id": "ID", "ids": "IDs", "url": "URL", "cpu": "CPU", "gpu": "GPU"}


Timestamp = Annotated[datetime, Meta(tz=True, description="RFC 3339")]
_QUANTITY = Meta(description="A Kubernetes quantity", examples=["500m", "256Mi", "4"])
_Number = Annotated[int, Meta(extra_json_schema=json_types.QUANTITY_NUMBER)]
_Text = Annotated[str, Meta(extra_json_schema=json_types.QUANTITY)]
Quantity = Annotated[_Text | _Number, _QUANTITY]
Cores = Annotated[
    _Text | Annotated[int, Meta(extra_json_schema=json_types.CORES_NUMBER)], _QUANTITY
]
OptionalQuantity = Annotated[
    Annotated[str, Meta(extra_json_schema=json_types.OPTIONAL_QUANTITY)] | _Number, _QUANTITY
]
_DURATION = Meta(max_length=64, description="A Go duration", examples=["1h30m", "90s"])
Duration = Annotated[str, _DURATION, Meta(extra_json_schema=json_types.DURATION)]
Wait = Annotated[str, _DURATION, Meta(extra_json_schema=json_types.WAIT)]
_PLAIN = Meta(extra_json_schema=json_types.PLAIN)
Name = Annotated[str, Meta(max_length=253), _PLAIN]
MAX_REASON_LENGTH = 1024
Reason = Annotated[str, Meta(max_length=MAX_REASON_LENGTH), _PLAIN]
Url = Annotated[str, Meta(max_length=2048), _PLAIN]
MAX_LABELS = 64
"""Includes the region, which is stored as a label."""
Labels = Annotated[
    dict[Annotated[str, Meta(max_length=317), _PLAIN], Name], Meta(max_length=MAX_LABELS)
]
Price = Annotated[
    str,
    Meta(max_length=20, description="A decimal number", examples=["0.05"]),
    Meta(extra_json_schema=json_types.PRICE),
]
Currency = Annotated[str, Meta(max_length=8, extra_json_schema=json_types.CURRENCY)]
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]


class Body(msgspec.Struct, frozen=True, omit_defaults=True, rename=camel_case):
    """Base of all bodies: frozen, camel case on the wire, defaults omitted."""


BodyT = TypeVar("BodyT", bound=Body)


def copy_fields(source: Body, to: type[BodyT], **changes: Any) -> BodyT:
    """Convert a body to another type with the same fields: fields of one type only are left out."""
    common = set(source.__struct_fields__) & set(to.__struct_fields__)
    return to(**{name: getattr(source, name) for name in common} | changes)


class Amounts(Body, frozen=True):
    """Amounts computed by the broker. Values sent by clients are ignored."""

    cpu: str | int
    """CPU in cores, for example 500m."""
    memory: str | int
    """Memory in bytes, for example 256Mi."""
    gpu: str | int = ""
    """Number of GPUs (nvidia.com/gpu)."""
    storage: str | int = ""
    """Ephemeral storage in bytes."""
    extended: Annotated[dict[str, str | int], Meta(max_length=32)] = {}
    """Other resources by Kubernetes resource name."""


class Quantities(Amounts, frozen=True):
    """Amounts by resource. `extended` has other resources by Kubernetes resource name."""

    cpu: Cores
    memory: Quantity
    gpu: OptionalQuantity = ""
    storage: OptionalQuantity = ""
    extended: Annotated[
        dict[Annotated[str, Meta(extra_json_schema=json_types.RESOURCE_NAME)], Quantity],
        Meta(max_length=32),
    ] = {}


class Metrics(Body, frozen=True):
    """Resources of a cluster. `reserved` and `available` are computed by the broker."""

    capacity: Quantities
    allocatable: Quantities | None = None
    allocated: Quantities | None = None
    reserved: Amounts | None = None
    available: Amounts | None = None


class Cost(Body, frozen=True):
    """Prices per core-hour, GB-hour and device-hour."""

    cpu_cost: Price = ""
    """Price of one core for one hour."""
    memory_cost: Price = ""
    """Price of one GB of memory for one hour."""
    gpu_cost: Price = ""
    """Price of one device for one hour."""
    storage_cost: Price = ""
    """Price of one GB of storage for one hour."""
    currency: Currency = "USD"
    """Currency of the prices. There is no conversion: prices compare only within one currency."""


AmountsByName = Annotated[
    dict[Annotated[str, Meta(extra_json_schema=json_types.RESOURCE)], Quantity],
    Meta(max_length=36, description="Quantities by resource", examples=[{"cpu": "4"}]),
]
Requesters = Annotated[
    list[Annotated[str, Meta(max_length=253, extra_json_schema=json_types.REQUESTERS)]],
    Meta(
        max_length=256,
        description="Cluster IDs and shell patterns, at most 32 of up to 64 characters",
        examples=[["team-*"]],
    ),
]
Hours = Annotated[
    str,
    Meta(max_length=160, examples=["Mon-Fri 18:00-08:00 Europe/Rome"]),
    Meta(extra_json_schema=json_types.HOURS),
]


class LendingPolicy(Body, frozen=True):
    """Lending policy of a cluster. Empty fields do not limit."""

    allow: Requesters = []
    """Allowed requesters. If empty, all are allowed."""
    deny: Requesters = []
    """Denied requesters. Takes precedence over allow."""
    keep_back: AmountsByName = {}
    """Amounts that are kept free for the cluster itself."""
    max_lent: AmountsByName = {}
    """Maximum total amounts lent. Zero lends none of a resource."""
    max_per_requester: AmountsByName = {}
    """Maximum amounts lent to each requester."""
    hours: Annotated[list[Hours], Meta(max_length=16)] = []
    """Opening hours for new reservations."""


class Advertisement(Body, frozen=True):
    """Advertisement of a cluster: its resources, prices, labels and lending policy."""

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
    """The effective lending policy: the stricter of the cluster's own and the administrator's."""

    allow: list[list[str]] = []
    """A requester must match every one of these lists."""
    deny: list[str] = []
    keep_back: dict[str, str] = {}
    max_lent: dict[str, str] = {}
    max_per_requester: dict[str, str] = {}
    hours: list[list[str]] = []
    """Every one of these lists must be open."""


class ClusterStatus(Body, frozen=True):
    """The broker's view of a cluster."""

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
    """Available amounts that the lending policy withholds now."""
    closed: bool = False
    """Whether the cluster is outside its opening hours now."""


class Cluster(Body, frozen=True):
    """Advertisement and status of a cluster."""

    advertisement: Advertisement
    status: ClusterStatus


class ClusterList(Body, frozen=True):
    """One page of clusters. `next` is the continue token of the following page."""

    clusters: list[Cluster]
    next: str = ""


class CordonRequest(Body, frozen=True, forbid_unknown_fields=True):
    """Reason of a cordon or drain, shown in the status of the cluster."""

    reason: Reason = ""


class DrainResult(Body, frozen=True):
    """A drained cluster, and its former reservations."""

    cluster: Cluster
    reservations: list[Reservation]


class Constraints(Body, frozen=True):
    """Constraints on the provider of a request."""

    labels: Labels = {}
    """Labels that the provider must have."""
    region: Name = ""
    """Region of the provider. Equivalent to the label topology.kubernetes.io/region."""
    exclude: Annotated[list[Name], Meta(max_length=256)] = []
    """Clusters that are not considered."""
    max_price_per_hour: Price = ""
    """Maximum price per hour for the whole request. Excludes providers with a higher price or another
    currency; providers without a price match.
    """
    currency: Currency = ""
    """Currency in which prices are compared. Defaults to USD if maxPricePerHour is set, else to the
    currency that most providers use.
    """


UNCONSTRAINED = Constraints()
Policy = Annotated[str, Meta(max_length=253, extra_json_schema=json_types.POLICY)]
Weights = Annotated[
    dict[
        Annotated[str, Meta(extra_json_schema=json_types.SCORE)],
        Annotated[float, Meta(extra_json_schema=json_types.WEIGHT)],
    ],
    Meta(max_length=16, extra_json_schema=json_types.WEIGHTS),
]


class ReservationRequest(Body, frozen=True):
    """Request to reserve resources of another cluster."""

    requested_resources: Annotated[
        Quantities, Meta(extra_json_schema=json_types.POSITIVE_CPU_AND_MEMORY)
    ]
    """Amounts to reserve. CPU and memory are required."""
    priority: Int32 = 0
    """Queue priority. Waiting requests with a higher value are served first."""
    duration: Duration = ""
    """Reservation duration. Defaults to the broker's --default-duration."""
    wait: Wait = ""
    """Maximum time to wait in the queue for capacity. If empty, the request fails immediately when nothing
    fits.
    """
    policy: Policy = ""
    """Placement policy: headroom, binpack, cost or balanced. Defaults to headroom."""
    weights: Weights = {}
    """Weights of the scores headroom, packing, balance and price. Overrides policy."""
    target_cluster_id: Name = ""
    """Only this provider is considered. If empty, the broker chooses a provider."""
    constraints: Constraints = UNCONSTRAINED
    """Constraints on the provider."""
    failover: bool = True
    """Whether the reservation moves to another cluster when its provider is lost. If false, it fails."""


class HoldReport(Body, frozen=True):
    """Whether the nodes of the provider really keep the resources, as it reports."""

    held: bool
    """Whether all of the reserved resources are held."""
    reason: Annotated[str, Meta(pattern="^[A-Za-z]{1,64}$")]
    """Held, PartiallyHeld, NotConfigured or Overcommitted."""
    message: Annotated[str, Meta(max_length=512)] = ""
    """How much is held. Control characters and line breaks become spaces."""


class ReservationStatus(Body, frozen=True):
    """Phase of a reservation with its reason and timestamps."""

    phase: str
    """Pending, Reserved, Active, Released or Failed."""
    message: str
    """Human-readable explanation of the phase."""
    reason: str = ""
    """Machine-readable reason, in CamelCase."""
    reserved_at: Timestamp | None = None
    """Time at which the resources were reserved at the current provider."""
    expires_at: Timestamp | None = None
    """Time at which the reservation expires unless renewed."""
    wait_until: Timestamp | None = None
    """Time at which a waiting request fails."""
    acknowledged_at: Timestamp | None = None
    """Time at which the provider acknowledged the reservation."""
    activated_at: Timestamp | None = None
    """Time at which the requester activated the reservation."""
    finished_at: Timestamp | None = None
    """Time at which the reservation ended."""
    held: HoldReport | None = None


class AgreedCost(Body, frozen=True):
    """Price of a reservation, fixed when it was placed at its provider."""

    price_per_hour: str
    """Price of the whole reservation for one hour."""
    currency: str
    """Currency of the price."""


class Reservation(Body, frozen=True):
    """A reservation of resources of one cluster for another."""

    id: str
    """ID of the reservation."""
    requester_id: str
    """ID of the requester cluster."""
    target_cluster_id: str
    """ID of the provider cluster; empty while the request waits."""
    requested_resources: Quantities
    """Reserved amounts."""
    status: ReservationStatus
    created_at: Timestamp
    """Time of the request."""
    priority: int = 0
    """Queue priority."""
    duration: str = ""
    """Requested duration."""
    previous_cluster_ids: Annotated[
        list[str], Meta(extra_json_schema=json_types.max_items(256))
    ] = []
    """Providers that have refused the reservation or were lost."""
    cost: AgreedCost | None = None
    revision: int = 0
    """Revision of the last change. The response with the larger revision is newer."""


class ReservationList(Body, frozen=True):
    """One page of reservations. `next` is the continue token of the following page."""

    reservations: list[Reservation]
    next: str = ""


class PublishResult(Body, frozen=True):
    """Response to an advertisement: the stored advertisement, and the reservations that the cluster has to
    hold.
    """

    advertisement: Advertisement
    provider_instructions: list[Reservation] = []


class RenewRequest(Body, frozen=True):
    """Duration from now. Defaults to the original duration."""

    duration: Duration = ""


class AcknowledgeRequest(Body, frozen=True):
    """What the provider reports about its hold. Empty if it has not been decided yet."""

    held: HoldReport | None = None


class RefuseRequest(Body, frozen=True):
    """Reason why a provider refuses a reservation. Reported to the requester in one line."""

    reason: Annotated[str, Meta(max_length=1024)] = ""
    """Any text is accepted, so that the reason is not lost. Control characters and line breaks become
    spaces.
    """


class Instruction(Body, frozen=True):
    """Instruction to one side of a reservation. Streams are ordered by `revision` and resume after it."""

    revision: int
    """Revision of the reservation."""
    role: str
    """requester or provider."""
    action: str
    """Wait, Use, Stop, Hold or Withdraw."""
    message: str
    """Human-readable summary."""
    reservation: Reservation
    grant: str = ""
    """Signed grant of the reservation, for the actions Hold and Use."""


Base64 = Annotated[str, Meta(max_length=16 * 1024, pattern="^[A-Za-z0-9+/]*={0,2}$")]


class Handshake(Body, frozen=True):
    """What one side of a reservation sends to the other to establish a peering with Liqo.

    It contains no private key and no kubeconfig. The broker passes it on while the reservation is live, and
    neither stores nor logs it.
    """

    cluster_id: Name
    """Liqo's ID of the sender's cluster."""
    nonce: Base64 = ""
    """Provider: what the requester has to sign."""
    signed_nonce: Base64 = ""
    """Requester: the signature."""
    public_key: Base64 = ""
    """Requester: the key that verifies it."""
    csr: Base64 = ""
    """Requester: certificate signing request for its identity in the provider's cluster."""
    certificate: Base64 = ""
    """Provider: the certificate."""
    ca: Base64 = ""
    """Provider: CA certificate of its API server."""
    api_server: Url = ""
    """Provider: address of its API server."""
    proxy_url: Url = ""
    """Provider: proxy through which its API server is reached, if any."""
    tenant_namespace: Name = ""
    """Provider: the namespace in its cluster that the requester may use."""
    error: Reason = ""
    """Why the sender cannot continue."""


class HandshakeResult(Body, frozen=True):
    """What the other side has sent last, if anything, and the caller's grant of the reservation."""

    peer: Handshake | None = None
    grant: str = ""


class Suggestion(Body, frozen=True):
    """Change of the request that would make it fit."""

    cluster_id: str
    """ID of the cluster that would fit."""
    text: str
    """The change as a sentence."""
    less: Annotated[dict[str, str], Meta(extra_json_schema=json_types.max_properties(64))] = {}
    """How much less to request, by resource."""
    max_price_per_hour: str = ""
    """The price per hour to allow."""
    currency: str = ""
    """Currency of the price."""
    drop_labels: Annotated[
        dict[str, str], Meta(extra_json_schema=json_types.max_properties(64))
    ] = {}
    """Labels not to select by."""


class Candidate(Body, frozen=True):
    """Evaluation of one cluster for a request."""

    cluster_id: str
    """ID of the cluster."""
    fits: bool
    """Whether the request could be placed there now."""
    rejections: Annotated[list[str], Meta(extra_json_schema=json_types.max_items(64))] = []
    """Why not."""
    score: float | None = None
    """Score of a cluster that fits; the highest is chosen."""
    price_per_hour: str = ""
    """Price of the request."""
    currency: str = ""
    """Currency of the price."""
    suggestion: Suggestion | None = None


class Explanation(Body, frozen=True):
    """Result of the placement for a request: which clusters fit, and why the others do not."""

    summary: str
    """The result as a sentence."""
    total: int
    """Number of clusters."""
    fitting: int
    """Number of clusters that fit."""
    rejections: Annotated[dict[str, int], Meta(extra_json_schema=json_types.max_properties(64))]
    """Number of clusters by reason of rejection; a cluster can have several."""
    candidates: Annotated[list[Candidate], Meta(extra_json_schema=json_types.max_items(100))] = []
    """The best clusters."""
    suggestion: Suggestion | None = None
    quota: Annotated[list[str], Meta(extra_json_schema=json_types.max_items(64))] = []
    """Limits of the requester's own quota that the request would exceed, independent of the clusters."""


class Problem(Body, frozen=True):
    """An error (RFC 9457). `error` repeats the text for clients of the published system."""

    type: str
    title: str
    status: int
    detail: str
    code: Annotated[str, Meta(extra_json_schema=json_types.enum_of(*json_types.ERRORS_BY_CODE))]
    error: str
    hint: str = ""
    retryable: bool = False
    explanation: Explanation | None = None


class Version(Body, frozen=True):
    """Version of the broker and of its API."""

    version: str
    api: str = "v1"


class SignedGrant(Body, frozen=True):
    """Grant of a live reservation, signed by the broker: a compact JWS (EdDSA). The keys are at
    /api/v1/keys.
    """

    grant: str


class PublicKey(Body, frozen=True):
    """An Ed25519 public key as a JWK (RFC 8037)."""

    kid: str
    """Key ID."""
    x: str
    """The public key, in base64url."""
    kty: str
    """Key type."""
    crv: str
    """Curve."""
    alg: str
    """Algorithm."""
    use: str
    """Use of the key."""


class KeySet(Body, frozen=True):
    """A JWK set (RFC 7517). The first key signs; the others verify older grants."""

    keys: list[PublicKey]
