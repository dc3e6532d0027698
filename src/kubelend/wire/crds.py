"""CustomResourceDefinitions of all kinds, generated from the types and docstrings of their records.

`python -m kubelend.cli.generate` writes them to deploy/crds. Short names and printer columns are defined
here.

Structural schemas have no references, a type on every level and an upper bound on everything that could be
long, because the API server estimates the cost of CEL rules from the bounds. `allOf` is avoided, although
it is allowed: `kubectl explain` then prints the field as an object, and the server reports each error
twice.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kubelend.wire import broker_objects, docstrings, objects, rules, schemas
from kubelend.wire.patterns import Schema

ALL_KINDS: Final = (*objects.KINDS, *broker_objects.KINDS)

CATEGORY: Final = "kubelend"
"""`kubectl get kubelend` lists all kinds that users work with."""


class PrinterColumn(NamedTuple):
    """One printer column of `kubectl get`."""

    name: str
    path: str
    type: str = "string"
    is_wide: bool = False
    """Whether the column is only printed with `-o wide`."""


class KindDisplay(NamedTuple):
    """Short name, printer columns and categories of a kind."""

    short: str
    columns: tuple[PrinterColumn, ...]
    categories: tuple[str, ...] = (CATEGORY,)


def crd_documents(*, cel: bool = True) -> dict[str, Schema]:
    """Return all definitions by file name.

    Without `cel` for servers before 1.25, whose `kubectl` rejects a definition with unknown validation
    rules.
    """
    return {f"{kind.group}_{kind.plural}.yaml": crd(kind, cel=cel) for kind in ALL_KINDS}


def crd(kind: type[objects.Object], *, cel: bool = True) -> Schema:
    look = _DISPLAYS[kind]
    schema = _root_schema(kind)
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{kind.plural}.{kind.group}",
            "labels": {"app.kubernetes.io/part-of": "kubelend"},
        },
        "spec": {
            "group": kind.group,
            "names": _names(kind, look),
            "scope": "Namespaced",
            "versions": [_version(kind, look, schema if cel else _without_rules(schema))],
        },
    }


def _names(kind: type[objects.Object], look: KindDisplay) -> Schema:
    names: Schema = {
        "kind": kind.kind,
        "listKind": f"{kind.kind}List",
        "plural": kind.plural,
        "singular": kind.kind.lower(),
        "shortNames": [look.short],
    }
    return {**names, "categories": list(look.categories)} if look.categories else names


def _version(kind: type[objects.Object], look: KindDisplay, schema: Schema) -> Schema:
    version: Schema = {
        "name": kind.version,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": [_column(column) for column in look.columns],
        "schema": {"openAPIV3Schema": schema},
    }
    if "status" in schema["properties"]:
        version["subresources"] = {"status": {}}
    return version


def _column(column: PrinterColumn) -> Schema:
    definition: Schema = {"name": column.name, "type": column.type, "jsonPath": column.path}
    return {**definition, "priority": 1} if column.is_wide else definition


def _root_schema(kind: type[objects.Object]) -> Schema:
    schema = schemas.structural_schema(kind)
    own = {name: part for name, part in schema["properties"].items() if name != "metadata"}
    root: Schema = {
        "description": docstrings.class_docstring(kind),
        "type": "object",
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            **own,
        },
    }
    # The server drops an empty list, which would look like a change at every apply.
    required = [name for name in schema["required"] if name != "metadata"]
    return {**root, "required": required} if required else root


def _without_rules(schema: Schema) -> Schema:
    return {
        key: _value_without_rules(value)
        for key, value in schema.items()
        if key != rules.VALIDATIONS
    }


def _value_without_rules(value: object) -> object:
    if isinstance(value, dict):
        return _without_rules(value)
    return [_value_without_rules(item) for item in value] if isinstance(value, list) else value


def _wide(name: str, path: str, type: str = "string") -> PrinterColumn:
    return PrinterColumn(name, path, type, is_wide=True)


_AGE: Final = PrinterColumn("Age", ".metadata.creationTimestamp", "date")

_DISPLAYS: Final[dict[type[objects.Object], KindDisplay]] = {
    objects.Advertisement: KindDisplay(
        "adv",
        (
            PrinterColumn("ClusterID", ".spec.clusterID"),
            PrinterColumn("Allocatable-CPU", ".spec.resources.allocatable.cpu"),
            PrinterColumn("Available-CPU", ".spec.resources.available.cpu"),
            PrinterColumn("Allocatable-Mem", ".spec.resources.allocatable.memory"),
            PrinterColumn("Available-Mem", ".spec.resources.available.memory"),
            PrinterColumn("Published", ".status.published", "boolean"),
            _wide("Available-GPU", ".spec.resources.available.gpu"),
            _wide("Measured", ".spec.timestamp", "date"),
            _wide("Message", ".status.message"),
            _AGE,
        ),
    ),
    objects.ResourceRequest: KindDisplay(
        "rreq",
        (
            PrinterColumn("CPU", ".spec.requestedCPU"),
            PrinterColumn("Memory", ".spec.requestedMemory"),
            PrinterColumn("Target", ".status.targetClusterID"),
            PrinterColumn("Phase", ".status.phase"),
            _wide("GPU", ".spec.requestedGPU"),
            _wide("Reservation", ".status.reservationName"),
            _wide("Expires", ".status.expiresAt"),
            _wide("Reason", ".status.reason"),
            _wide("Message", ".status.message"),
            _AGE,
        ),
    ),
    objects.ReservationInstruction: KindDisplay(
        "rins",
        (
            PrinterColumn("Reservation", ".spec.reservationName"),
            PrinterColumn("Target", ".spec.targetClusterID"),
            PrinterColumn("CPU", ".spec.requestedCPU"),
            PrinterColumn("Memory", ".spec.requestedMemory"),
            _wide("Phase", ".status.phase"),
            _wide("Expires", ".spec.expiresAt"),
            _wide("Message", ".status.message"),
        ),
    ),
    objects.ProviderInstruction: KindDisplay(
        "pins",
        (
            PrinterColumn("Reservation", ".spec.reservationName"),
            PrinterColumn("Requester", ".spec.requesterClusterID"),
            PrinterColumn("CPU", ".spec.requestedCPU"),
            PrinterColumn("Memory", ".spec.requestedMemory"),
            _wide("Enforced", ".status.enforced", "boolean"),
            _wide("Phase", ".status.phase"),
            _wide("Expires", ".spec.expiresAt"),
            _wide("Message", ".status.message"),
        ),
    ),
    broker_objects.ClusterAdvertisement: KindDisplay(
        "cadv",
        (
            PrinterColumn("ClusterID", ".spec.clusterID"),
            PrinterColumn("Available-CPU", ".spec.resources.available.cpu"),
            PrinterColumn("Available-Memory", ".spec.resources.available.memory"),
            PrinterColumn("Score", ".status.score"),
            PrinterColumn("Active", ".status.active", "boolean"),
            _wide("Phase", ".status.phase"),
            _wide("Reservations", ".status.reservations", "integer"),
            _wide("Available-GPU", ".spec.resources.available.gpu"),
            _wide("Region", ".spec.region"),
            _wide("Last-Update", ".status.lastUpdateTime", "date"),
            _wide("Message", ".status.message"),
            _AGE,
        ),
    ),
    broker_objects.Reservation: KindDisplay(
        "rsv",
        (
            PrinterColumn("Target-Cluster", ".spec.targetClusterID"),
            PrinterColumn("CPU", ".spec.requestedResources.cpu"),
            PrinterColumn("Memory", ".spec.requestedResources.memory"),
            PrinterColumn("Phase", ".status.phase"),
            _wide("Requester", ".spec.requesterID"),
            _wide("GPU", ".spec.requestedResources.gpu"),
            _wide("Expires", ".status.expiresAt"),
            _wide("Reason", ".status.reason"),
            _wide("Message", ".status.message"),
            _AGE,
        ),
    ),
    broker_objects.ClusterSession: KindDisplay(
        "csess",
        (
            PrinterColumn("ClusterID", ".status.clusterID"),
            PrinterColumn("Session", ".status.session"),
            _wide("Revision", ".status.revision", "integer"),
            _wide("Changed", ".status.lastUpdateTime", "date"),
            _AGE,
        ),
    ),
    broker_objects.LedgerRecord: KindDisplay(
        "ledg",
        (
            PrinterColumn("Contents", ".contents"),
            PrinterColumn("Revision", ".record.revision", "integer"),
            _AGE,
        ),
        categories=(),
    ),
}
