"""JSON Schema fragments that mirror the parsers of the core, and all error codes.

Bodies, route parameters and CRD fields carry them, so that clients can validate before sending and the API
server rejects invalid objects itself. The parsers remain authoritative and report better errors.

No look-ahead: Go's regular expressions, which many validators use, do not support it.

The CEL rules of the CRDs are here, too. Servers support them from 1.25 on, so only its features are used: no
quantity library, no access to the user. They give users early errors; the broker does not rely on them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from msgspec.structs import FieldInfo

from kubelend.core import quantities
from kubelend.core.errors import KubelendError
from kubelend.core.lifecycle import Phase

Schema = dict[str, Any]


def enum_of(*values: str) -> Schema:
    """An enum. Decoding accepts any string, because a newer peer may know more values."""
    return {"enum": list(values)}


def max_length(characters: int) -> Schema:
    """A maximum length. Decoding accepts any length."""
    return {"maxLength": characters}


def max_properties(properties: int) -> Schema:
    """A maximum number of entries of a map."""
    return {"maxProperties": properties}


def max_items(items: int) -> Schema:
    """A maximum number of items of a list."""
    return {"maxItems": items}


# Each pattern matches in one way only, so that a backtracking engine cannot become slow.
_DIGITS: Final = r"([0-9]+(\.[0-9]*)?|\.[0-9]+)"
_ZERO: Final = r"(0+(\.0*)?|\.0+)"
_POSITIVE: Final = r"(0*[1-9][0-9]*(\.[0-9]*)?|0*\.0*[1-9][0-9]*)"
_EXPONENT: Final = r"[eE][+-]?0*([0-5]?[0-9]|6[0-4])"
_SUFFIX: Final = r"[numkMGTPE]|[KMGTPE]i"
_QUANTITY: Final = rf"(\+?{_DIGITS}|-{_ZERO})({_EXPONENT}|{_SUFFIX})?"

_UNIT: Final = "(ns|us|\u00b5s|\u03bcs|ms|s|m|h)"
_DURATION: Final = rf"\+?(0|({_DIGITS}{_UNIT})+)"
_POSITIVE_DURATION: Final = rf"\+?({_ZERO}{_UNIT})*{_POSITIVE}{_UNIT}({_DIGITS}{_UNIT})*"
_ZERO_DURATION: Final = rf"-(0|({_ZERO}{_UNIT})+)"

_NAMED_RESOURCES: Final = ("cpu", "memory", "gpu", "storage")
_PREFIX: Final = r"([a-z0-9]+((-+|\.)[a-z0-9]+)*/)?"
_PHASE: Final = f"({'|'.join(Phase)})?"

QUANTITY: Final[Schema] = {
    "pattern": f"^{_QUANTITY}$",
    "maxLength": quantities.MAX_QUANTITY_TEXT_LENGTH,
}
"""A non-negative quantity. The parser also rejects values over 2^63-1 in base units."""

OPTIONAL_QUANTITY: Final[Schema] = {
    "pattern": f"^({_QUANTITY})?$",
    "maxLength": quantities.MAX_QUANTITY_TEXT_LENGTH,
}
ANY_QUANTITY: Final[Schema] = {
    "pattern": f"^([+-]?{_DIGITS}({_EXPONENT}|{_SUFFIX})?)?$",
    "maxLength": quantities.MAX_QUANTITY_TEXT_LENGTH,
}
"""A quantity of either sign, or empty: for computed amounts, which are negative if a cluster is
overcommitted.
"""

POSITIVE_QUANTITY: Final[Schema] = {
    "pattern": rf"^\+?{_POSITIVE}({_EXPONENT}|{_SUFFIX})?$",
    "maxLength": quantities.MAX_QUANTITY_TEXT_LENGTH,
}
"""A quantity above zero."""

QUANTITY_NUMBER: Final[Schema] = {"minimum": 0, "maximum": quantities.MAX_AMOUNT}
CORES_NUMBER: Final[Schema] = {"minimum": 0, "maximum": quantities.MAX_AMOUNT // 1000}

_POSITIVE_INT_OR_STRING: Final[Schema] = {
    "anyOf": [
        {"type": "integer", "minimum": 1},
        {"type": "string", "pattern": POSITIVE_QUANTITY["pattern"]},
    ]
}
POSITIVE_CPU_AND_MEMORY: Final[Schema] = {
    "properties": {"cpu": _POSITIVE_INT_OR_STRING, "memory": _POSITIVE_INT_OR_STRING}
}
"""CPU and memory of a reservation request must be above zero."""

RESOURCE: Final[Schema] = {
    "pattern": f"^{_PREFIX}[A-Za-z0-9]([A-Za-z0-9_.-]{{0,61}}[A-Za-z0-9])?$",
    "maxLength": 253 + 1 + 63,
    "allOf": [{"pattern": "^[^/]{1,253}(/|$)"}],
}
RESOURCE_NAME: Final[Schema] = {**RESOURCE, "not": {"enum": list(_NAMED_RESOURCES)}}

DURATION: Final[Schema] = {"pattern": f"^({_POSITIVE_DURATION})?$"}
"""A duration above zero, or empty."""

WAIT: Final[Schema] = {"pattern": f"^({_DURATION}|{_ZERO_DURATION})?$"}
"""A duration of zero or more, or empty."""

PRICE: Final[Schema] = {"pattern": r"^(0?[0-9]{1,9}(\.[0-9]{1,9})?)?$"}
CURRENCY: Final[Schema] = {"pattern": "^([A-Za-z]{3,8})?$"}

POLICIES: Final = ("headroom", "binpack", "cost", "balanced")
SCORES: Final = ("headroom", "packing", "balance", "price")
"""Copied from `core.scoring`, which loads numpy; clients of the broker do not need it."""

POLICY: Final[Schema] = {"enum": ["", *POLICIES]}
SCORE: Final[Schema] = {"enum": list(SCORES)}
WEIGHT: Final[Schema] = {"minimum": 0, "maximum": 1000}
WEIGHTS: Final[Schema] = {"not": {"minProperties": 1, "additionalProperties": {"const": 0}}}
"""At least one weight must be above zero."""

INT32: Final[Schema] = {"format": "int32", "minimum": -(2**31), "maximum": 2**31 - 1}

CONTROL_CHARACTERS: Final = "\\x00-\\x1f\\x7f-\\x9f\u2028\u2029"
"""Control characters and Unicode's line and paragraph separators, which could control a terminal or start a
line.

The separators are literal, because Go and JSON Schema share no escape for them.
"""

PLAIN: Final[Schema] = {"pattern": f"^[^{CONTROL_CHARACTERS}]*$"}
"""Any single-line text, or empty; `wire.validation` decides."""

COMMON_NAME: Final[Schema] = {
    "pattern": r"^([^\x00-\x20\x7f-\xa0]([^\x00-\x1f\x7f-\xa0]*[^\x00-\x20\x7f-\xa0])?)?$",
    "maxLength": 64,
}
"""A common name without control characters and without spaces at its ends, or empty."""

_SPACE: Final = r"[ \t\n\v\f\r]"
_CSR_LABEL: Final = "(NEW )?CERTIFICATE REQUEST-----"
CERTIFICATE_REQUEST: Final[Schema] = {
    "pattern": rf"^{_SPACE}*-----BEGIN {_CSR_LABEL}{_SPACE}[A-Za-z0-9+/= \t\n\v\f\r]+"
    rf"-----END {_CSR_LABEL}{_SPACE}*$"
}

REQUESTERS: Final[Schema] = {
    "pattern": r"^( *[^\x00-\x20\x7f-\xa0*?\[][^\x00-\x1f\x7f-\xa0*?\[]*"
    r"|[^\x00-\x20\x7f-\xa0][^\x00-\x1f\x7f-\xa0]{0,63})$"
}
"""A cluster ID with a visible character, or a shell pattern. The parser also counts the patterns."""

_DAY: Final = (
    "([Mm][Oo][Nn]|[Tt][Uu][Ee]|[Ww][Ee][Dd]|[Tt][Hh][Uu]|[Ff][Rr][Ii]|[Ss][Aa][Tt]|[Ss][Uu][Nn])"
)
_DAYS: Final = f"{_DAY}(-{_DAY})?(,{_DAY}(-{_DAY})?)*"
_CLOCK: Final = "([01]?[0-9]|2[0-3]):[0-5][0-9]"
_ZONE: Final = "[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*"
HOURS: Final[Schema] = {"pattern": f"^({_DAYS} )?{_CLOCK}-({_CLOCK}|24:00)( {_ZONE})?$"}
"""The parser also checks the time zone, and that the interval is not empty."""

LIST_MAP_BY_TYPE: Final[Schema] = {
    "x-kubernetes-list-type": "map",
    "x-kubernetes-list-map-keys": ["type"],
}
"""A list keyed by type, so that server-side apply merges the items of several writers."""

PHASES: Final[Schema] = {"pattern": f"^{_PHASE}(,{_PHASE})*$"}
RESERVATION_ROLE: Final[Schema] = enum_of("requester", "provider")
PRINTABLE: Final[Schema] = {"pattern": "^[ -~]*$"}
EVENT_ID: Final[Schema] = {"pattern": "^[0-9]{0,19}$"}


ErrorClass = type[KubelendError]


def _error_classes(kind: ErrorClass) -> Iterator[ErrorClass]:
    yield kind
    for child in kind.__subclasses__():
        yield from _error_classes(child)


def _classes_by_code(kinds: Iterator[ErrorClass]) -> dict[str, ErrorClass]:
    """Map each code to the class nearest to the root: subclasses that share a code are one error on the
    wire.
    """
    found: dict[str, ErrorClass] = {}
    for kind in kinds:
        found.setdefault(kind.code, kind)
    return found


ERRORS_BY_CODE: Final = _classes_by_code(_error_classes(KubelendError))


VALIDATIONS: Final = "x-kubernetes-validations"


def cel_rule(expression: str, message: str) -> Schema:
    return {VALIDATIONS: [{"rule": expression, "message": message}]}


def combine_rules(*schemas: Schema) -> Schema:
    """Combine the rules of several schemas."""
    return {VALIDATIONS: [one for schema in schemas for one in schema[VALIDATIONS]]}


def immutable(what: str) -> Schema:
    """A required field that is immutable."""
    return cel_rule("self == oldSelf", f"{what} cannot be changed")


def immutable_once_set(field: str) -> Schema:
    """A field that is immutable once set. The rule is on the parent, because a rule on the field would not
    run when the field is removed.
    """
    before, now = f"oldSelf.{field}", f"self.{field}"
    return cel_rule(
        f"!has({before}) || {before} == '' || (has({now}) && {now} == {before})",
        f"{field} cannot be changed",
    )


def immutable_fields(fields: Iterable[FieldInfo]) -> Schema:
    """Fields that can neither be changed, set nor removed later, except to and from their default.

    The rules are on the parent, as above.
    """
    return combine_rules(
        *(
            cel_rule(_unchanged(one), f"{one.encode_name} cannot be changed: {RECREATE}")
            for one in fields
        )
    )


def _unchanged(field: FieldInfo) -> str:
    before, now = f"oldSelf.{field.encode_name}", f"self.{field.encode_name}"
    if field.required:
        return f"{now} == {before}"
    if not isinstance(field.default, int | str):
        return f"has({now}) == has({before}) && (!has({now}) || {now} == {before})"
    default = json.dumps(field.default)
    old, new = (f"(has({one}) ? {one} : {default})" for one in (before, now))
    rule = f"{new} == {old}"
    if field.name != "duration":
        return rule
    # Clients in Go write 1h as 1h0m0s.
    return f"{rule} || ({new} != '' && {old} != '' && duration({new}) == duration({old}))"


RECREATE: Final = "delete the object and create it again"


def positive(field: str, example: str) -> Schema:
    """An int-or-string quantity above zero."""
    value = f"self.{field}"
    return cel_rule(
        f"type({value}) == int ? {value} > 0 : {value}.matches({_POSITIVE_PATTERN})",
        _positive_message(field, example),
    )


def not_negative(field: str) -> Schema:
    value = f"self.{field}"
    return cel_rule(
        f"type({value}) == int ? {value} >= 0 : !{value}.startsWith('-')",
        f"{field} must not be negative",
    )


_POSITIVE_PATTERN: Final = r"'^[+]?[0.]*[1-9]'"


def _positive_message(field: str, example: str) -> str:
    return f"{field} must be a quantity above zero, for example {example}"


def max_key_length(characters: int) -> Schema:
    return cel_rule(
        f"self.all(name, size(name) <= {characters})",
        f"names must have at most {characters} characters",
    )


def keys_among(known: Sequence[str]) -> Schema:
    return cel_rule(
        f"self.all(name, name in {_cel_list(known)})", f"names must be among {_enumeration(known)}"
    )


def keys_not_among(others: Sequence[str]) -> Schema:
    return cel_rule(
        f"!self.exists(name, name in {_cel_list(others)})",
        f"{_enumeration(others)} must be set in their own fields",
    )


def _cel_list(values: Sequence[str]) -> str:
    return f"[{', '.join(map(repr, values))}]"


def _enumeration(values: Sequence[str]) -> str:
    return f"{', '.join(values[:-1])} and {values[-1]}"


POSITIVE_AMOUNTS_RULE: Final = combine_rules(positive("cpu", "500m"), positive("memory", "256Mi"))
"""CPU and memory must be above zero."""

NON_NEGATIVE_CPU_AND_MEMORY: Final = combine_rules(not_negative("cpu"), not_negative("memory"))
POSITIVE_REQUESTED_FIELDS: Final = combine_rules(
    positive("requestedCPU", "500m"), positive("requestedMemory", "256Mi")
)
IMMUTABLE_POSITIVE_AMOUNTS: Final = combine_rules(
    immutable("requestedResources"), POSITIVE_AMOUNTS_RULE
)

POSITIVE_DURATION: Final = cel_rule(
    r"self == '' || (self.matches('^[+]?([0-9.]+[a-zµμ]+)+$') && self.matches('[1-9]'))",
    "must be a duration above zero, for example 1h30m",
)
"""A pattern, because `duration()` fails with an internal error on invalid input."""

WEIGHTS_RULE: Final = cel_rule(
    "size(self) == 0 || self.exists(name, self[name] > 0.0)",
    "at least one weight must be above zero",
)
