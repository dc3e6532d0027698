"""Structural schemas of records, as CustomResourceDefinitions require them. Used by `wire.crds`."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import inspect

from kubelend.wire import docstrings, patterns, rules
from kubelend.wire.patterns import Schema

MAX_STRING_LENGTH: Final = 32768
"""Default maximum length of a string: the limit of Kubernetes for a condition's message."""

_MAX_EXACT_FLOAT: Final = 2**53
"""The API server stores bounds as floats, which are exact up to this value."""

_COPIED_KEYWORDS: Final = frozenset(
    {"pattern", "maxLength", "maxItems", "maxProperties", "minimum", "maximum", "format", "enum"}
    | {"x-kubernetes-list-type", "x-kubernetes-list-map-keys", rules.VALIDATIONS}
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
    return amount if "pattern" in amount else _merged(amount, patterns.ANY_QUANTITY)


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
        schema[rules.VALIDATIONS] = checks
    return schema


def _key_rules(kind: inspect.Type) -> list[Schema]:
    """Structural schemas cannot constrain map keys, so these become CEL rules."""
    extra = (kind.extra_json_schema if isinstance(kind, inspect.Metadata) else None) or {}
    text = kind.type if isinstance(kind, inspect.Metadata) else kind
    longest = extra.get("maxLength") or getattr(text, "max_length", None)
    found = []
    if longest is not None:
        found.append(rules.max_key_length(longest))
    if known := extra.get("enum"):
        found.append(rules.keys_among(known))
    if others := extra.get("not", {}).get("enum"):
        found.append(rules.keys_not_among(others))
    return [one for schema in found for one in schema[rules.VALIDATIONS]]


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
        if key in _COPIED_KEYWORDS and not _too_large(value)
    }
    if rules.VALIDATIONS in known:
        known[rules.VALIDATIONS] = schema.get(rules.VALIDATIONS, []) + known[rules.VALIDATIONS]
    refined = {**schema, **known}
    if "enum" in known:
        refined.pop("maxLength", None)
    for name, more in extra.get("properties", {}).items():
        refined["properties"] = {
            **refined["properties"],
            name: _merged(refined["properties"][name], more),
        }
    for part in extra.get("anyOf", []):
        refined = _merged_branch(refined, part)
    if unknown := extra.keys() - _COPIED_KEYWORDS - _IGNORED_KEYWORDS - {"properties", "anyOf"}:
        raise TypeError(f"{', '.join(sorted(unknown))}: not supported in a structural schema")
    return refined


def _merged_branch(amount: Schema, part: Schema) -> Schema:
    """Merge the constraints of one branch of an int-or-string quantity."""
    return {**amount, **{key: value for key, value in part.items() if key != "type"}}


def _too_large(value: object) -> bool:
    return isinstance(value, int) and abs(value) > _MAX_EXACT_FLOAT
