"""`kubelend advertise`: say once, by hand, what a cluster offers. An agent says it all the time."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kubelend.apps.settings import ClientSettings
from kubelend.cli import calls, escapes, options, output, request_flags
from kubelend.cli.output import Format
from kubelend.core.errors import InvalidInput
from kubelend.wire import bodies

Used = Annotated[str, typer.Option(help="Of that in use by its own pods.", metavar="QUANTITY")]
Price = Annotated[str, typer.Option(help="For each hour.", metavar="NUMBER")]
Label = Annotated[
    request_flags.Many,
    typer.Option(help="A label of the cluster; may be repeated.", metavar="KEY=VALUE"),
]
ValidFor = Annotated[
    str,
    typer.Option(
        help="How long to believe it; not above the broker's own limit.", metavar="DURATION"
    ),
]
File = Annotated[
    str,
    typer.Option(
        "--file", "-f", help="The whole body as YAML or JSON; - for stdin.", metavar="FILE"
    ),
]


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
    region: Annotated[str, typer.Option(help="Where it is.", metavar="TEXT")] = "",
    cpu_cost: Price = "",
    memory_cost: Price = "",
    gpu_cost: Price = "",
    storage_cost: Price = "",
    currency: Annotated[str, typer.Option(help="Of the costs.", metavar="TEXT")] = "USD",
    valid_for: ValidFor = "",
    file: File = "",
) -> bodies.Advertisement:
    """The body that the flags or the file say; its cluster ID is not known yet."""
    if file:
        return _from_file(file)
    if not (cpu and memory):
        raise InvalidInput("--cpu and --memory are needed", hint="or --file with all of it")
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
    """Say what this cluster offers, once; the broker believes it for some minutes.

    For example: kubelend advertise --cpu 16 --memory 64Gi --allocated-cpu 5 --region eu
    """
    from msgspec.structs import replace

    name = advertisement.cluster_id or _own_name(settings.cert_path)
    body = replace(advertisement, cluster_id=name)
    answer = calls.call_broker(settings, lambda client: client.publish(body))
    output.show(answer, format, text=lambda: _advertisement_summary(answer), names=[name])


def _advertisement_summary(answer: bodies.Published) -> str:
    known = answer.advertisement
    free = output.amount_texts(known.resources.available)
    parts = (f"{amount} {resource}" for resource, amount in free.items())
    text = escapes.line(f"{known.cluster_id} offers {', '.join(parts)}")
    count = len(answer.provider_instructions)
    return f"{text}; it holds {count} for others" if count else text


def _own_name(directory: Path) -> str:
    from kubelend.pki import identities
    from kubelend.transports import tls

    return identities.holder(tls.own_certificate(directory)).name


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
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise InvalidInput(
            f"{path} is no advertisement: {error}", hint="see docs/openapi.json"
        ) from error
