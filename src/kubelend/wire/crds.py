"""CustomResourceDefinitions of all kinds, generated from the types and docstrings of their records.

`python -m kubelend.cli.generate` writes them to deploy/crds. Short names and printer columns are defined
here.

Structural schemas have no references, a type on every level and an upper bound on everything that could be
long, because the API server estimates the cost of CEL rules from the bounds. `allOf` is avoided, although
it is allowed: `kubectl explain` then prints the field as an object, and the server reports each error
twice.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec
from msgspec import inspect

from kubelend.wire import broker_objects, docstrings, json_types, objects
from kubelend.wire.json_types import Schema

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
    display = _DISPLAYS[kind]
    schema = _root_schema(kind)
    names: Schema = {
        "kind": kind.kind,
        "listKind": f"{kind.kind}List",
        "plural": kind.plural,
        "singular": kind.kind.lower(),
        "shortNames": [display.short],
    }
    if display.categories:
        names["categories"] = list(display.categories)
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{kind.plural}.{kind.group}",
            "labels": {"app.kubernetes.io/part-of": "kubelend"},
        },
        "spec": {
            "group": kind.group,
            "names": names,
            "scope": "Namespaced",
            "versions": [_version(kind, display, schema if cel else _without_rules(schema))],
        },
    }


def _version(kind: type[objects.Object], display: KindDisplay, schema: Schema) -> Schema:
    version: Schema = {
        "name": kind.version,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": [_column(column) for column in display.columns],
        "schema": {"openAPIV3Schema": schema},
    }
    if "status" in schema["properties"]:
        version["subresources"] = {"status": {}}
    return version


def _column(column: PrinterColumn) -> Schema:
    definition: Schema = {"name": column.name, "type": column.type, "jsonPath": column.path}
    return {**definition, "priority": 1} if column.is_wide else definition


def _root_schema(kind: type[objects.Object]) -> Schema:
    schema = structural_schema(kind)
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


def _without_rules(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_rules(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_rules(v) for key, v in value.items() if key != json_types.VALIDATIONS}


def _wide(name: str, path: str, type: str = "string") -> PrinterColumn:
    return PrinterColumn(name, path, type, is_wide=True)


_AGE: Final = PrinterColumn("Age", ".metadata.creationTimestamp", "date")
_READY: Final = _wide("Ready", '.status.conditions[?(@.type=="Ready")].status')

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
            _READY,
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
            _READY,
            _wide("Phase", ".status.phase"),
            _wide("Node", ".status.nodeName"),
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
            _wide("Held", '.status.conditions[?(@.type=="Held")].status'),
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
    broker_objects.PlacementReview: KindDisplay(
        "plr",
        (
            PrinterColumn("Requester", ".spec.requesterID"),
            PrinterColumn("Fitting", ".status.explanation.fitting", "integer"),
            PrinterColumn("Summary", ".status.explanation.summary"),
            _AGE,
        ),
        categories=(),
    ),
    broker_objects.ClusterSession: KindDisplay(
        "csess",
        (
            PrinterColumn("ClusterID", ".status.clusterID"),
            PrinterColumn("Agent", ".spec.agent"),
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


MAX_STRING_LENGTH: Final = 32768
"""Default maximum length of a string: the limit of Kubernetes for a condition's message."""

_MAX_EXACT_FLOAT: Final = 2**53
"""The API server stores bounds as floats, which are exact up to this value."""

_COPIED_KEYWORDS: Final = frozenset(
    {"pattern", "maxLength", "maxItems", "maxProperties", "minimum", "maximum", "format", "enum"}
    | {"x-kubernetes-list-type", "x-kubernetes-list-map-keys", json_types.VALIDATIONS}
)
_IGNORED_KEYWORDS: Final = frozenset({"description", "examples", "not"})
"""JSON Schema keywords that are handled elsewhere or not allowed in structural schemas."""


def structural_schema(kind: type[msgspec.Struct]) -> Schema:
    """Return the structural schema of a record, with all nested records."""
    return _schema(inspect.type_info(kind))


def _schema(kind: inspect.Type) -> Schema:
    match kind:
        case inspect.Metadata(type=inner, extra_json_schema=extra):
            return _merged(_schema(inner), extra or {})
        case inspect.UnionType(types=types):
            return _union([one for one in types if not isinstance(one, inspect.NoneType)])
        case inspect.StructType():
            return _struct(kind)
        case inspect.DictType():
            return _map(kind)
        case inspect.ListType() | inspect.VarTupleType():
            return _list(kind)
        case _:
            return _scalar(kind)


def _scalar(kind: inspect.Type) -> Schema:
    match kind:
        case inspect.StrType(max_length=longest):
            return {
                "type": "string",
                "maxLength": MAX_STRING_LENGTH if longest is None else longest,
            }
        case inspect.DateTimeType():
            return {"type": "string", "format": "date-time"}
        case inspect.BoolType():
            return {"type": "boolean"}
        case inspect.FloatType():
            return {"type": "number"}
        case inspect.IntType(ge=least, le=most):
            is_short = most is not None and most < 2**31
            schema = {"type": "integer", "format": "int32" if is_short else "int64"}
            return _merged(schema, {"minimum": least, "maximum": most} if is_short else {})
    raise TypeError(f"{kind} is not supported in a structural schema")


def _union(types: list[inspect.Type]) -> Schema:
    """Optional types lose their None; the only other union is int-or-string, for quantities."""
    if len(types) == 1:
        return _schema(types[0])
    amount: Schema = {
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        "x-kubernetes-int-or-string": True,
    }
    for one in types:
        extra = one.extra_json_schema if isinstance(one, inspect.Metadata) else None
        amount = _merged(amount, extra or {})
    return amount if "pattern" in amount else _merged(amount, json_types.ANY_QUANTITY)


def _struct(kind: inspect.StructType) -> Schema:
    texts = docstrings.field_docstrings(kind.cls)
    properties = {field.encode_name: _field(field, texts) for field in kind.fields}
    schema: Schema = {"type": "object", "properties": properties}
    if required := [field.encode_name for field in kind.fields if field.required]:
        schema["required"] = required
    return schema


def _field(field: inspect.Field, texts: dict[str, str]) -> Schema:
    text = texts.get(field.name) or _type_description(field.type)
    schema = {"description": text, **_schema(field.type)}
    if isinstance(field.default, str) and field.default:
        schema["default"] = field.default
    return schema


def _type_description(kind: inspect.Type) -> str:
    match kind:
        case inspect.Metadata(type=inner):
            return _type_description(inner)
        case inspect.UnionType(types=types):
            return next(filter(None, map(_type_description, types)), "")
        case inspect.StructType(cls=record):
            return docstrings.class_docstring(record)
    return ""


def _map(kind: inspect.DictType) -> Schema:
    schema: Schema = {"type": "object", "additionalProperties": _schema(kind.value_type)}
    if kind.max_length is not None:
        schema["maxProperties"] = kind.max_length
    if checks := _key_rules(kind.key_type):
        schema[json_types.VALIDATIONS] = checks
    return schema


def _key_rules(kind: inspect.Type) -> list[Schema]:
    """Structural schemas cannot constrain map keys, so these become CEL rules."""
    extra = (kind.extra_json_schema if isinstance(kind, inspect.Metadata) else None) or {}
    text = kind.type if isinstance(kind, inspect.Metadata) else kind
    longest = extra.get("maxLength") or getattr(text, "max_length", None)
    found = []
    if longest is not None:
        found.append(json_types.max_key_length(longest))
    if known := extra.get("enum"):
        found.append(json_types.keys_among(known))
    if others := extra.get("not", {}).get("enum"):
        found.append(json_types.keys_not_among(others))
    return [one for schema in found for one in schema[json_types.VALIDATIONS]]


def _list(kind: inspect.ListType | inspect.VarTupleType) -> Schema:
    schema: Schema = {"type": "array", "items": _schema(kind.item_type)}
    if kind.max_length is not None:
        schema["maxItems"] = kind.max_length
    return schema


def _merged(schema: Schema, extra: Schema) -> Schema:
    """Merge the constraints of `extra` into the schema."""
    known = {
        key: value
        for key, value in extra.items()
        if key in _COPIED_KEYWORDS
        and not (isinstance(value, int) and abs(value) > _MAX_EXACT_FLOAT)
    }
    refined = {**schema, **known}
    if rules := known.get(json_types.VALIDATIONS):
        refined[json_types.VALIDATIONS] = schema.get(json_types.VALIDATIONS, []) + rules
    if "enum" in known:
        refined.pop("maxLength", None)
    for name, more in extra.get("properties", {}).items():
        narrowed = _merged(refined["properties"][name], more)
        refined["properties"] = {**refined["properties"], name: narrowed}
    for branch in extra.get("anyOf", []):  # of an int-or-string quantity
        refined |= {key: value for key, value in branch.items() if key != "type"}
    if unknown := extra.keys() - _COPIED_KEYWORDS - _IGNORED_KEYWORDS - {"properties", "anyOf"}:
        raise TypeError(f"{', '.join(sorted(unknown))}: not supported in a structural schema")
    return refined
