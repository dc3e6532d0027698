"""The flags that say what is wanted, and the request which they make: for `borrow` and `explain`."""

from __future__ import annotations

import math
from typing import Annotated

import typer

from kubelend.core.errors import InvalidInput
from kubelend.wire import bodies

Many = list[str] | None

Cpu = Annotated[str, typer.Option(help="CPU, for example 4 or 500m.", metavar="QUANTITY")]
Memory = Annotated[str, typer.Option(help="Memory, for example 8Gi.", metavar="QUANTITY")]
Gpu = Annotated[str, typer.Option(help="GPUs, whole ones.", metavar="QUANTITY")]
Storage = Annotated[str, typer.Option(help="Storage, for example 100Gi.", metavar="QUANTITY")]
Resource = Annotated[
    Many, typer.Option(help="Any other resource; may be repeated.", metavar="NAME=QUANTITY")
]
Duration = Annotated[
    str,
    typer.Option(
        "--for",
        "--duration",
        help="For how long, for example 90m; the broker's default if not given.",
        metavar="DURATION",
    ),
]
Priority = Annotated[
    int, typer.Option(help="Higher is served first among those who wait.", metavar="N")
]
Wait = Annotated[
    str, typer.Option(help="Wait for capacity for so long, instead of a no.", metavar="DURATION")
]
Policy = Annotated[
    str, typer.Option(help="How to choose: headroom, binpack, cost or balanced.", metavar="NAME")
]
Weight = Annotated[
    Many,
    typer.Option(
        help="Choose by own weights instead of --policy: headroom, packing, balance, price;"
        " may be repeated.",
        metavar="NAME=NUMBER",
    ),
]
Label = Annotated[
    Many, typer.Option(help="Only clusters with this label; may be repeated.", metavar="KEY=VALUE")
]
Region = Annotated[str, typer.Option(help="Only clusters of this region.", metavar="TEXT")]
Pinned = Annotated[str, typer.Option(help="Only this cluster.", metavar="CLUSTER")]
Exclude = Annotated[
    Many, typer.Option(help="Not this cluster; may be repeated.", metavar="CLUSTER")
]
MaxPrice = Annotated[str, typer.Option(help="What it may cost per hour at most.", metavar="NUMBER")]
Currency = Annotated[
    str,
    typer.Option(
        help="In which prices are compared; USD for --max-price, unless you say otherwise.",
        metavar="TEXT",
    ),
]


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
    """The request, whole or not (see `complete`); None if nothing is said at all."""
    if policy and weight:
        raise InvalidInput("--policy and --weight exclude each other", hint="choose by one of them")
    said = bodies.ReservationRequest(
        requested_resources=bodies.Quantities(
            cpu, memory, gpu, storage, dict(parse_pairs("--resource", resource))
        ),
        priority=priority,
        duration=duration,
        wait=wait,
        policy=policy,
        weights=_weights(weight),
        target_cluster_id=cluster,
        constraints=bodies.ConstraintsBody(
            labels=parse_pairs("--label", label),
            region=region,
            exclude=exclude or [],
            max_price_per_hour=max_price,
            currency=currency,
        ),
    )
    return None if said == _NOTHING else said


_NOTHING = bodies.ReservationRequest(bodies.Quantities("", ""))


def require_resources(request: bodies.ReservationRequest | None) -> bodies.ReservationRequest:
    """A request which a broker can answer."""
    if request is None:
        raise InvalidInput("nothing is asked for", hint="give --cpu and --memory at least")
    wanted = request.requested_resources
    if not (wanted.cpu and wanted.memory):
        raise InvalidInput("--cpu and --memory are needed both", hint="add --cpu 1 or --memory 1Gi")
    return request


def parse_pairs(flag: str, texts: Many) -> dict[str, str]:
    """`NAME=VALUE`, as often as it was given."""
    found = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise InvalidInput(f"{flag}: {text!r} has no name and value", hint="write NAME=VALUE")
        found[key] = value
    return found


def split_commas(texts: Many) -> list[str]:
    """What was given with commas, and as often as it was given."""
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
