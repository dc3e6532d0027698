"""`kubelend dev advertise`: send one advertisement by hand. Agents do so continuously."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

from kubelend.apps.settings import ClientSettings
from kubelend.cli import calls, options, output, request_flags
from kubelend.cli.options import Many, flag
from kubelend.cli.output import OutputFormat
from kubelend.core.errors import InvalidInput
from kubelend.kits import tables
from kubelend.wire import bodies

Used = Annotated[str, flag("Amount used by its own pods.", "QUANTITY")]
Price = Annotated[str, flag("Price per hour.", "NUMBER")]
Label = Annotated[Many, flag("A label of the cluster; may be repeated.", "KEY=VALUE")]
ValidFor = Annotated[str, flag("Validity; at most the broker's own limit.", "DURATION")]
File = Annotated[
    str, flag("Whole advertisement as YAML or JSON; - for stdin.", "FILE", "--file", "-f")
]

_RESOURCES: Final = ("cpu", "memory", "gpu", "storage")
FIELDS: Final = {
    **calls.fields_of("resources.capacity.", *_RESOURCES),
    "resources.capacity.extended": "--resource",
    **{f"resources.allocated.{name}": f"--allocated-{name}" for name in _RESOURCES},
    "labels": "--label",
    **calls.fields_of("", "region", "validFor"),
    **calls.fields_of("cost.", "cpuCost", "memoryCost", "gpuCost", "storageCost", "currency"),
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
    region: Annotated[str, flag("Region of the cluster.", "TEXT")] = "",
    cpu_cost: Price = "",
    memory_cost: Price = "",
    gpu_cost: Price = "",
    storage_cost: Price = "",
    currency: Annotated[str, flag("Currency of the prices.", "TEXT")] = "USD",
    valid_for: ValidFor = "",
    file: File = "",
) -> bodies.Advertisement:
    """A builder: the advertisement of the flags or the file, perhaps still without a cluster ID."""
    if file:
        # The cluster is known from the certificate.
        return options.read_document(
            *(file, bodies.Advertisement, "advertisement"),
            hint="see docs/openapi.json",
            defaults={"clusterID": ""},
        )
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
    format: options.Output = OutputFormat.TABLE,
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
        answer, format, lambda: _advertisement_summary(answer), [f"cluster/{name}"], "Advertisement"
    )


def _advertisement_summary(answer: bodies.PublishResult) -> str:
    known = answer.advertisement
    free = output.format_amounts(known.resources.available)
    text = tables.sanitize_line(f"cluster/{known.cluster_id} advertised: {free} free")
    count = len(answer.provider_instructions)
    held = f"; {tables.format_count(count, 'reservation')} held for others" if count else ""
    return text + held


def _own_name(directory: Path) -> str:
    from kubelend.pki import identity
    from kubelend.transports import tls

    return identity.caller_from_certificate(tls.own_certificate(directory)).name
