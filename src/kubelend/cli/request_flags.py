"""The flags of `borrow` and `explain`, and the reservation request that they make."""

from __future__ import annotations

import math
from typing import Annotated, Final

import typer

from kubelend.cli import options
from kubelend.core.errors import InvalidInput
from kubelend.wire import bodies

Many = list[str] | None

Cpu = Annotated[str, typer.Option(help="CPU, for example 4 or 500m.", metavar="QUANTITY")]
Memory = Annotated[str, typer.Option(help="Memory, for example 8Gi.", metavar="QUANTITY")]
Gpu = Annotated[str, typer.Option(help="Whole GPUs.", metavar="QUANTITY")]
Storage = Annotated[str, typer.Option(help="Storage, for example 100Gi.", metavar="QUANTITY")]
Resource = Annotated[
    Many, typer.Option(help="An extended resource; may be repeated.", metavar="NAME=QUANTITY")
]
Duration = Annotated[
    str,
    typer.Option(
        "--for",
        "--duration",
        help="Duration, for example 90m. Defaults to the broker's --default-duration.",
        metavar="DURATION",
    ),
]
Priority = Annotated[
    int, typer.Option(help="Among pending requests, higher is served first.", metavar="N")
]
Wait = Annotated[
    str,
    typer.Option(
        help="If no cluster fits, stay pending for up to this long instead of failing.",
        metavar="DURATION",
    ),
]
Policy = Annotated[
    str,
    typer.Option(
        help="How clusters are ranked: headroom, binpack, cost or balanced.", metavar="NAME"
    ),
]
Weight = Annotated[
    Many,
    typer.Option(
        help="Rank by weights instead of --policy: headroom, packing, balance, price;"
        " may be repeated.",
        metavar="NAME=NUMBER",
    ),
]
Label = Annotated[
    Many, typer.Option(help="Only clusters with this label; may be repeated.", metavar="KEY=VALUE")
]
Region = Annotated[str, typer.Option(help="Only clusters in this region.", metavar="TEXT")]
Pinned = Annotated[
    str,
    typer.Option(help="Only this cluster.", metavar="CLUSTER", callback=options.named("cluster")),
]
Exclude = Annotated[
    Many,
    typer.Option(
        help="Not this cluster; may be repeated.",
        metavar="CLUSTER",
        callback=options.named("cluster"),
    ),
]
MaxPrice = Annotated[str, typer.Option(help="Maximum price per hour.", metavar="NUMBER")]
Currency = Annotated[
    str,
    typer.Option(
        help="Currency in which prices are compared. Defaults to USD with --max-price.",
        metavar="TEXT",
    ),
]

FIELDS: Final = {
    "requestedResources.cpu": "--cpu",
    "requestedResources.memory": "--memory",
    "requestedResources.gpu": "--gpu",
    "requestedResources.storage": "--storage",
    "requestedResources.extended": "--resource",
    "requestedResources": "--resource",
    "requestedCPU": "--cpu",
    "requestedMemory": "--memory",
    "requestedGPU": "--gpu",
    "requestedStorage": "--storage",
    "extendedResources": "--resource",
    "extended": "--resource",
    "priority": "--priority",
    "duration": "--for",
    "wait": "--wait",
    "policy": "--policy",
    "weights": "--weight",
    "targetClusterID": "--cluster",
    "constraints.labels": "--label",
    "constraints.region": "--region",
    "constraints.exclude": "--exclude",
    "constraints.maxPricePerHour": "--max-price",
    "constraints.currency": "--currency",
    "Idempotency-Key": "--key",
}
"""By the field of a request's body (or of a ResourceRequest's spec), its flag."""


def request_from_flags(
    *,
    cpu: Cpu = "",
    memory: Memory = "",
    gpu: Gpu = "",
    storage: Storage = "",
    resource: Resource = None,
    duration: Duration = "",
    priority: Priority = 0,
    wait: Wait = "",
    policy: Policy = "",
    weight: Weight = None,
    label: Label = None,
    region: Region = "",
    cluster: Pinned = "",
    exclude: Exclude = None,
    max_price: MaxPrice = "",
    currency: Currency = "",
) -> bodies.ReservationRequest | None:
    """A builder: the request, perhaps incomplete (see `require_resources`); None if no flag is given."""
    if policy and weight:
        raise InvalidInput("--policy and --weight exclude each other", hint="give one of them")
    request = bodies.ReservationRequest(
        requested_resources=bodies.Quantities(
            cpu, memory, gpu, storage, dict(parse_pairs("--resource", resource))
        ),
        priority=priority,
        duration=duration,
        wait=wait,
        policy=policy,
        weights=_weights(weight),
        target_cluster_id=cluster,
        constraints=bodies.Constraints(
            labels=parse_pairs("--label", label),
            region=region,
            exclude=exclude or [],
            max_price_per_hour=max_price,
            currency=currency,
        ),
    )
    return None if request == _NO_FLAGS else request


_NO_FLAGS = bodies.ReservationRequest(bodies.Quantities("", ""))


def require_resources(request: bodies.ReservationRequest | None) -> bodies.ReservationRequest:
    """The request, which has to name CPU and memory."""
    if request is None:
        raise InvalidInput("no resources are requested", hint="give at least --cpu and --memory")
    wanted = request.requested_resources
    if not (wanted.cpu and wanted.memory):
        raise InvalidInput(
            "--cpu and --memory are both required", hint="add --cpu 1 or --memory 1Gi"
        )
    return request


def parse_pairs(flag: str, texts: Many) -> dict[str, str]:
    """`NAME=VALUE`, given any number of times, as a mapping."""
    found = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise InvalidInput(f"{flag}: {text!r} has no name and value", hint="write NAME=VALUE")
        found[key] = value
    return found


def split_commas(texts: Many) -> list[str]:
    """The parts of values that are separated by commas, or given several times."""
    return [part.strip() for text in texts or [] for part in text.split(",") if part.strip()]


def _weights(texts: Many) -> dict[str, float]:
    return {name: _weight(name, value) for name, value in parse_pairs("--weight", texts).items()}


def _weight(name: str, text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    # Infinities are no numbers in JSON, either.
    if not math.isfinite(weight):
        raise InvalidInput(
            f"--weight {name}: {text!r} is no number", hint="write for example price=2"
        )
    return weight
