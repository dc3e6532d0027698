"""CEL validation rules of the CRDs.

The types of `wire.objects` and `wire.broker_objects` carry them on their fields. Servers support them from
1.25 on, so only CEL features of 1.25 are used: no quantity library, no access to the user. They give users
early errors; the broker does not rely on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kubelend.wire.json_types import Schema

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


def immutable_field(field: str, *, is_required: bool) -> Schema:
    """A field that can neither be changed, set nor removed later. The rule is on the parent, as above."""
    before, now = f"oldSelf.{field}", f"self.{field}"
    rule = f"{now} == {before}"
    if not is_required:
        rule = f"has({now}) == has({before}) && (!has({now}) || {rule})"
    return cel_rule(rule, f"{field} cannot be changed: {RECREATE}")


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


POSITIVE_CPU_AND_MEMORY: Final = combine_rules(positive("cpu", "500m"), positive("memory", "256Mi"))
"""CPU and memory must be above zero."""

NON_NEGATIVE_CPU_AND_MEMORY: Final = combine_rules(not_negative("cpu"), not_negative("memory"))
POSITIVE_REQUESTED_FIELDS: Final = combine_rules(
    positive("requestedCPU", "500m"), positive("requestedMemory", "256Mi")
)
IMMUTABLE_POSITIVE_AMOUNTS: Final = combine_rules(
    immutable("requestedResources"), POSITIVE_CPU_AND_MEMORY
)

POSITIVE_DURATION: Final = cel_rule(
    r"self == '' || (self.matches('^[+]?([0-9.]+[a-zµμ]+)+$') && self.matches('[1-9]'))",
    "must be a duration above zero, for example 1h30m",
)
"""A pattern, because `duration()` fails with an internal error on invalid input."""

WEIGHTS: Final = cel_rule(
    "size(self) == 0 || self.exists(name, self[name] > 0.0)",
    "at least one weight must be above zero",
)
