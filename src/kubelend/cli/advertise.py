"""`kubelend dev advertise`: send one advertisement by hand. Agents do so continuously."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from kubelend.apps.settings import ClientSettings
from kubelend.cli import calls, options, output, request_flags
from kubelend.cli.output import Format
from kubelend.core.errors import InvalidInput
from kubelend.kits import tables
from kubelend.wire import bodies

Used = Annotated[str, typer.Option(help="Amount used by its own pods.", metavar="QUANTITY")]
Price = Annotated[str, typer.Option(help="Price per hour.", metavar="NUMBER")]
Label = Annotated[
    request_flags.Many,
    typer.Option(help="A label of the cluster; may be repeated.", metavar="KEY=VALUE"),
]
ValidFor = Annotated[
    str,
    typer.Option(help="Validity; at most the broker's own limit.", metavar="DURATION"),
]
File = Annotated[
    str,
    typer.Option(
        "--file", "-f", help="Whole advertisement as YAML or JSON; - for stdin.", metavar="FILE"
    ),
]


FIELDS: Final = {
    "resources.capacity.cpu": "--cpu",
    "resources.capacity.memory": "--memory",
    "resources.capacity.gpu": "--gpu",
    "resources.capacity.storage": "--storage",
    "resources.capacity.extended": "--resource",
    "resources.allocated.cpu": "--allocated-cpu",
    "resources.allocated.memory": "--allocated-memory",
    "resources.allocated.gpu": "--allocated-gpu",
    "resources.allocated.storage": "--allocated-storage",
    "labels": "--label",
    "region": "--region",
    "cost.cpuCost": "--cpu-cost",
    "cost.memoryCost": "--memory-cost",
    "cost.gpuCost": "--gpu-cost",
    "cost.storageCost": "--storage-cost",
    "cost.currency": "--currency",
    "validFor": "--valid-for",
}
"""By the field of an advertisement's body, its flag."""


def advertisement_from_flags(
    *,
    cpu: request_flags.Cpu = "",
    memory: request_flags.Memory = "",
    gpu: request_flags.Gpu = "",
    storage: request_flags.Storage = "",
    resource: request_flags.Resource = None,
    allocated_cpu: Used = "",
    allocated_memory: Used = "",
    allocated_gpu: Used = "",
    allocated_storage: Used = "",
    label: Label = None,
    region: Annotated[str, typer.Option(help="Region of the cluster.", metavar="TEXT")] = "",
    cpu_cost: Price = "",
    memory_cost: Price = "",
    gpu_cost: Price = "",
    storage_cost: Price = "",
    currency: Annotated[str, typer.Option(help="Currency of the prices.", metavar="TEXT")] = "USD",
    valid_for: ValidFor = "",
    file: File = "",
) -> bodies.Advertisement:
    """A builder: the advertisement of the flags or the file, perhaps still without a cluster ID."""
    if file:
        return _from_file(file)
    if not (cpu and memory):
        raise InvalidInput("--cpu and --memory are required", hint="or --file")
    capacity = bodies.Quantities(
        cpu, memory, gpu, storage, dict(request_flags.parse_pairs("--resource", resource))
    )
    allocated = bodies.Quantities(
        allocated_cpu or "0", allocated_memory or "0", allocated_gpu, allocated_storage
    )
    has_price = cpu_cost or memory_cost or gpu_cost or storage_cost
    cost = bodies.Cost(cpu_cost, memory_cost, gpu_cost, storage_cost, currency)
    return bodies.Advertisement(
        cluster_id="",
        resources=bodies.Metrics(capacity, allocated=allocated),
        cost=cost if has_price else None,
        labels=request_flags.parse_pairs("--label", label),
        region=region,
        valid_for=valid_for,
    )


@options.takes(advertisement=advertisement_from_flags, settings=options.client)
def advertise(
    *,
    advertisement: bodies.Advertisement,
    format: options.Output = Format.TABLE,
    settings: ClientSettings,
) -> None:
    """Advertise the resources of a cluster once; the broker uses that for some minutes.

    For example: kubelend dev advertise --cpu 16 --memory 64Gi --allocated-cpu 5 --region eu
    """
    from msgspec.structs import replace

    name = advertisement.cluster_id or _own_name(settings.cert_path)
    body = replace(advertisement, cluster_id=name)
    answer = calls.call_broker(settings, lambda client: client.publish(body), FIELDS)
    output.show(
        answer,
        format,
        text=lambda: _advertisement_summary(answer),
        names=[f"cluster/{name}"],
        kind="Advertisement",
    )


def _advertisement_summary(answer: bodies.PublishResult) -> str:
    known = answer.advertisement
    free = output.amount_texts(known.resources.available)
    parts = (f"{amount} {resource}" for resource, amount in free.items())
    text = tables.sanitize_line(f"cluster/{known.cluster_id} advertised: {', '.join(parts)}")
    count = len(answer.provider_instructions)
    return (
        f"{text} free; {tables.format_count(count, 'reservation')} held for others"
        if count
        else f"{text} free"
    )


def _own_name(directory: Path) -> str:
    from kubelend.pki import identity
    from kubelend.transports import tls

    return identity.caller_from_certificate(tls.own_certificate(directory)).name


def _from_file(path: str) -> bodies.Advertisement:
    import msgspec
    import yaml

    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text("utf-8")
        value: Any = yaml.safe_load(text)
        if isinstance(value, dict):
            value.setdefault("clusterID", "")
        return msgspec.convert(value, bodies.Advertisement, strict=False)
    except OSError as error:
        raise InvalidInput(f"--file: {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise InvalidInput(
            f"--file: {path} is no advertisement: {error}", hint="see docs/openapi.json"
        ) from error
