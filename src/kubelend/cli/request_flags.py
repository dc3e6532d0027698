"""The flags of `borrow`, `explain` and `dev advertise`, and the bodies that they make."""

from __future__ import annotations

import math
from typing import Annotated, Final

from kubelend.cli import calls, options
from kubelend.cli.options import Many, flag
from kubelend.core.errors import InvalidInput
from kubelend.wire import bodies

Cpu = Annotated[str, flag("CPU, for example 4 or 500m.", "QUANTITY")]
Memory = Annotated[str, flag("Memory, for example 8Gi.", "QUANTITY")]
Gpu = Annotated[str, flag("Whole GPUs.", "QUANTITY")]
Storage = Annotated[str, flag("Storage, for example 100Gi.", "QUANTITY")]
Resource = Annotated[Many, flag("An extended resource; may be repeated.", "NAME=QUANTITY")]
Duration = Annotated[
    str,
    flag(
        "Duration, for example 90m. Defaults to the broker's --default-duration.",
        *("DURATION", "--for", "--duration"),
    ),
]
Priority = Annotated[int, flag("Among pending requests, higher is served first.", "N")]
Wait = Annotated[
    str,
    flag("If no cluster fits, stay pending for up to this long instead of failing.", "DURATION"),
]
Policy = Annotated[
    str, flag("How clusters are ranked: headroom, binpack, cost or balanced.", "NAME")
]
Weight = Annotated[
    Many,
    flag(
        "Rank by weights instead of --policy: headroom, packing, balance, price; may be repeated.",
        "NAME=NUMBER",
    ),
]
Label = Annotated[Many, flag("Only clusters with this label; may be repeated.", "KEY=VALUE")]
Region = Annotated[str, flag("Only clusters in this region.", "TEXT")]
Pinned = Annotated[str, flag("Only this cluster.", "CLUSTER", callback=options.named("cluster"))]
Exclude = Annotated[
    Many,
    flag("Not this cluster; may be repeated.", "CLUSTER", callback=options.named("cluster")),
]
MaxPrice = Annotated[str, flag("Maximum price per hour.", "NUMBER")]
Currency = Annotated[
    str, flag("Currency in which prices are compared. Defaults to USD with --max-price.", "TEXT")
]
NoFailover = Annotated[
    bool, flag("Fail when the provider is lost, instead of moving to another cluster.")
]

FIELDS: Final = {
    **calls.fields_of("requestedResources.", "cpu", "memory", "gpu", "storage"),
    "requestedResources.extended": "--resource",
    "requestedResources": "--resource",
    **{f"requested{name}": f"--{name.lower()}" for name in ("CPU", "Memory", "GPU", "Storage")},
    "extendedResources": "--resource",
    "extended": "--resource",
    **calls.fields_of("", "priority", "wait", "policy"),
    "duration": "--for",
    "weights": "--weight",
    "targetClusterID": "--cluster",
    "failover": "--no-failover",
    **calls.fields_of("constraints.", "region", "exclude", "currency"),
    "constraints.labels": "--label",
    "constraints.maxPricePerHour": "--max-price",
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
    no_failover: NoFailover = False,
) -> bodies.ReservationRequest | None:
    """A builder: the request, perhaps incomplete (see `require_resources`); None if no flag is given."""
    if policy and weight:
        raise InvalidInput("--policy and --weight exclude each other", hint="give one of them")
    labels = parse_pairs("--label", label)
    request = bodies.ReservationRequest(
        requested_resources=bodies.Quantities(
            cpu, memory, gpu, storage, dict(parse_pairs("--resource", resource))
        ),
        priority=priority,
        duration=duration,
        wait=wait,
        policy=policy,
        weights={
            name: _weight(name, text) for name, text in parse_pairs("--weight", weight).items()
        },
        target_cluster_id=cluster,
        constraints=bodies.Constraints(labels, region, exclude or [], max_price, currency),
        failover=not no_failover,
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
