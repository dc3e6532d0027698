"""The flags that say what is wanted, and the request which they make: for `borrow` and `explain`."""

from __future__ import annotations

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
        help="Choose by own weights: headroom, packing, balance, price; may be repeated.",
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
Currency = Annotated[str, typer.Option(help="The currency of --max-price.", metavar="TEXT")]


def read(
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
    currency: Currency = "USD",
) -> bodies.ReservationRequest | None:
    """The request, or None if no amount is given at all."""
    if not (cpu or memory or gpu or storage or resource):
        return None
    if not (cpu and memory):
        raise InvalidInput("--cpu and --memory are needed both", hint="add --cpu 1 or --memory 1Gi")
    return bodies.ReservationRequest(
        requested_resources=bodies.Quantities(
            cpu, memory, gpu, storage, dict(pairs("--resource", resource))
        ),
        priority=priority,
        duration=duration,
        wait=wait,
        policy=policy,
        weights=_weights(weight),
        target_cluster_id=cluster,
        constraints=bodies.ConstraintsBody(
            labels=pairs("--label", label),
            region=region,
            exclude=exclude or [],
            max_price_per_hour=max_price,
            currency=currency,
        ),
    )


def pairs(flag: str, texts: Many) -> dict[str, str]:
    """`NAME=VALUE`, as often as it was given."""
    found = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise InvalidInput(f"{flag}: {text!r} has no name and value", hint="write NAME=VALUE")
        found[key] = value
    return found


def listed(texts: Many) -> list[str]:
    """What was given with commas, and as often as it was given."""
    return [part.strip() for text in texts or [] for part in text.split(",") if part.strip()]


def _weights(texts: Many) -> dict[str, float]:
    try:
        return {name: float(value) for name, value in pairs("--weight", texts).items()}
    except ValueError as error:
        raise InvalidInput(f"--weight: {error}", hint="write for example price=2") from None
