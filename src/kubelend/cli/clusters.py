"""Clusters: `get clusters`, `describe cluster`, `cordon`, `uncordon`, `drain` and `dev advertise`."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Final

from kubelend.apps.settings import ClientSettings
from kubelend.cli import calls, limits, options, output, request_flags
from kubelend.cli.calls import Backend
from kubelend.cli.options import Many, Target, flag
from kubelend.cli.output import Column, OutputFormat, Printer
from kubelend.cli.reservations import RESERVATIONS
from kubelend.core.errors import InvalidInput
from kubelend.kits import tables
from kubelend.wire import bodies


@options.takes(target=options.target)
def get_clusters(
    name: Annotated[str, options.argument("[CLUSTER]", "cluster", help="Only this one.")] = "",
    format: options.Output = OutputFormat.TABLE,
    *,
    target: Target,
) -> None:
    """List clusters and their free resources, or show one.

    Viewers and admins list all clusters. A cluster may get itself, by its name.
    """
    if name:
        one = calls.call_backend(target, lambda backend: backend.get_cluster(name))
        CLUSTERS.show(one, format)
    else:
        found, where = calls.call_backend(target, _find_all)
        CLUSTERS.show_list(found, format, where)


@options.takes(target=options.target)
def describe_cluster(name: options.ClusterName, *, target: Target) -> None:
    """Show the details of a cluster."""
    found = calls.call_backend(target, lambda backend: backend.get_cluster(name))
    output.print_text(cluster_details(found, output.now()))


@options.takes(target=options.target)
def cordon(
    name: options.ClusterName,
    reason: options.Reason = "",
    format: options.Output = OutputFormat.TABLE,
    *,
    target: Target,
) -> None:
    """Close a cluster to new reservations; existing ones stay."""
    found = calls.call_backend(
        target, lambda backend: backend.cordon(name, reason), {"reason": "--reason"}
    )
    CLUSTERS.show(found, format, lambda: f"cluster/{name} cordoned")


@options.takes(target=options.target)
def uncordon(
    name: options.ClusterName,
    format: options.Output = OutputFormat.TABLE,
    *,
    target: Target,
) -> None:
    """Open a cluster to new reservations again."""
    found = calls.call_backend(target, lambda backend: backend.uncordon(name))
    CLUSTERS.show(found, format, lambda: f"cluster/{name} uncordoned")


@options.takes(target=options.target)
def drain(
    name: options.ClusterName,
    reason: options.Reason = "",
    dry_run: options.DryRun = False,
    yes: options.Yes = False,
    format: options.Output = OutputFormat.TABLE,
    *,
    target: Target,
) -> None:
    """Cordon a cluster and move its reservations to other clusters.

    A reservation that fits on no other cluster is released. Shows the reservations that it would move or
    release, and asks for confirmation.
    """
    if dry_run:
        lent = _lent(target, name)
        where = f" on cluster {name}"
        RESERVATIONS.show_list(lent, format, where, lambda: _drain_plan(name, lent))
        return
    if not yes:
        output.confirm(lambda: _drain_plan(name, _lent(target, name)), f"Drain cluster {name}?")
    found = calls.call_backend(
        target, lambda backend: backend.drain(name, reason), {"reason": "--reason"}
    )
    names = map(RESERVATIONS.name, found.reservations)
    output.show(found, format, lambda: drain_summary(found, output.now()), names, "Drain")


async def _find_all(backend: Backend) -> tuple[list[bodies.Cluster], str]:
    return await backend.all_clusters(), calls.search_scope(backend)


def _lent(target: Target, name: str) -> list[bodies.Reservation]:
    return calls.call_backend(
        target,
        lambda backend: backend.all_reservations(role="provider", phase=calls.LIVE, cluster=name),
    )


def _drain_plan(name: str, lent: list[bodies.Reservation]) -> str:
    start = f"Cluster {tables.sanitize_line(name)} would be cordoned"
    if not lent:
        return f"{start}; it has no reservations."
    count = tables.format_count(len(lent), "reservation")
    table = RESERVATIONS.table(lent, output.now())
    return f"{start}, and {count} moved or released:\n\n{table}"


# -- text


def cluster_details(found: bodies.Cluster, now: datetime) -> str:
    known, status = found.advertisement, found.status
    facts = output.details(
        [
            ("Name", known.cluster_id),
            ("Status", _status(status)),
            ("Cordon reason", status.cordon_reason),
            ("Message", status.message),
            ("Score", f"{status.score} ({status.rating})"),
            ("Lends", tables.format_count(status.reservations, "reservation")),
            ("Region", known.region),
            ("Labels", ", ".join(f"{key}={value}" for key, value in known.labels.items())),
            ("Prices", _prices(known.cost)),
            *limits.limits_of(status.policy).items(),
            ("Endpoint", known.endpoint_url),
            ("Last seen", status.last_update_time),
            ("Valid until", status.valid_until),
            ("Certificate", status.certificate_until),
        ],
        now,
    )
    return f"{facts}\n\n{_resource_table(known.resources, status.withheld)}"


def drain_summary(found: bodies.DrainResult, now: datetime) -> str:
    """The drained cluster, and where its reservations are now."""
    name = tables.sanitize_line(found.cluster.advertisement.cluster_id)
    if not found.reservations:
        return f"cluster/{name} drained; it had no reservations"
    moved = sum(one.status.phase in {"Reserved", "Active"} for one in found.reservations)
    rest = len(found.reservations) - moved
    table = RESERVATIONS.table(found.reservations, now)
    return f"cluster/{name} drained: {moved} moved to other clusters, {rest} released\n\n{table}"


def _status(status: bodies.ClusterStatus) -> str:
    if status.closed and status.active and not status.cordoned:
        return "Closed"
    if not status.cordoned:
        return status.phase
    return "Cordoned" if status.active else f"{status.phase},Cordoned"


def _prices(cost: bodies.Cost | None) -> str:
    if cost is None:
        return ""
    known = (
        (cost.cpu_cost, "core"),
        (cost.memory_cost, "GB"),
        (cost.gpu_cost, "GPU"),
        (cost.storage_cost, "GB of storage"),
    )
    each = (f"{price} per {unit}" for price, unit in known if price)
    return f"{', '.join(each)} and hour, in {cost.currency}"


def _resource_table(resources: bodies.Metrics, withheld: dict[str, str]) -> str:
    by_part = {part: output.amount_texts(getattr(resources, part)) for part in _PARTS}
    if withheld:
        by_part["withheld"] = withheld
    names = dict.fromkeys(name for texts in by_part.values() for name in texts)
    rows = [(name, *(texts.get(name, "0") for texts in by_part.values())) for name in names]
    return tables.format_table(("RESOURCE", *(part.upper() for part in by_part)), rows)


_PARTS: Final = ("capacity", "allocatable", "allocated", "reserved", "available")


def _free(found: bodies.Cluster, name: str) -> str:
    return output.amount_texts(found.advertisement.resources.available).get(name, "")


def _total(found: bodies.Cluster, name: str) -> str:
    return output.amount_texts(found.advertisement.resources.allocatable).get(name, "")


def _short_price(found: bodies.Cluster) -> str:
    cost = found.advertisement.cost
    return f"{cost.cpu_cost or 0}/{cost.memory_cost or 0} {cost.currency}" if cost else ""


CLUSTERS: Final[Printer[bodies.Cluster]] = Printer(
    "Cluster",
    "clusters",
    lambda one: f"cluster/{one.advertisement.cluster_id}",
    [
        Column("NAME", lambda one, _: one.advertisement.cluster_id),
        Column("STATUS", lambda one, _: _status(one.status)),
        Column("CPU-FREE", lambda one, _: _free(one, "cpu")),
        Column("MEMORY-FREE", lambda one, _: output.short_bytes(_free(one, "memory"))),
        Column("GPU-FREE", lambda one, _: _free(one, "gpu")),
        Column("SCORE", lambda one, _: one.status.score),
        Column("LENT", lambda one, _: str(one.status.reservations)),
        Column("SEEN", lambda one, now: tables.format_age(one.status.last_update_time, now)),
        Column("CPU", lambda one, _: _total(one, "cpu"), is_wide=True),
        Column("MEMORY", lambda one, _: output.short_bytes(_total(one, "memory")), is_wide=True),
        Column(
            "STORAGE-FREE", lambda one, _: output.short_bytes(_free(one, "storage")), is_wide=True
        ),
        Column("REGION", lambda one, _: one.advertisement.region, is_wide=True),
        Column("PRICE", lambda one, _: _short_price(one), is_wide=True),
        Column(
            "CERTIFICATE",
            lambda one, now: output.time_left(one.status.certificate_until, now),
            is_wide=True,
        ),
        Column("ENDPOINT", lambda one, _: one.advertisement.endpoint_url, is_wide=True),
    ],
)


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
