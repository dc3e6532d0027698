"""CEL validation rules of the CRDs.

The types of `wire.objects` and `wire.broker_objects` carry them on their fields. Servers support them from
1.25 on, so only CEL features of 1.25 are used: no quantity library, no access to the user. They give users
early errors; the broker does not rely on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kubelend.wire.patterns import Schema

VALIDATIONS: Final = "x-kubernetes-validations"


def rule(expression: str, message: str) -> Schema:
    return {VALIDATIONS: [{"rule": expression, "message": message}]}


def joined(*schemas: Schema) -> Schema:
    """Combine the rules of several schemas."""
    return {VALIDATIONS: [one for schema in schemas for one in schema[VALIDATIONS]]}


def unchanged(what: str) -> Schema:
    """A required field that is immutable."""
    return rule("self == oldSelf", f"{what} cannot be changed")


def kept(field: str) -> Schema:
    """A field that is immutable once set. The rule is on the parent, because a rule on the field would not
    run when the field is removed.
    """
    before, now = f"oldSelf.{field}", f"self.{field}"
    return rule(
        f"!has({before}) || {before} == '' || (has({now}) && {now} == {before})",
        f"{field} cannot be changed",
    )


def positive(field: str, example: str) -> Schema:
    """An int-or-string quantity above zero."""
    value = f"self.{field}"
    return rule(
        f"type({value}) == int ? {value} > 0 : {value}.matches({_SOME})", _wanted(field, example)
    )


def positive_text(field: str, example: str) -> Schema:
    return rule(f"self.{field}.matches({_SOME})", _wanted(field, example))


def not_negative(field: str) -> Schema:
    value = f"self.{field}"
    return rule(
        f"type({value}) == int ? {value} >= 0 : !{value}.startsWith('-')",
        f"{field} must not be negative",
    )


_SOME: Final = r"'^[+]?[0.]*[1-9]'"


def _wanted(field: str, example: str) -> str:
    return f"{field} must be a quantity above zero, for example {example}"


def names_up_to(characters: int) -> Schema:
    return rule(
        f"self.all(name, size(name) <= {characters})",
        f"names must have at most {characters} characters",
    )


def names_among(known: Sequence[str]) -> Schema:
    return rule(f"self.all(name, name in {_texts(known)})", f"names must be among {_spoken(known)}")


def names_beside(others: Sequence[str]) -> Schema:
    return rule(
        f"!self.exists(name, name in {_texts(others)})",
        f"{_spoken(others)} must be set in their own fields",
    )


def _texts(words: Sequence[str]) -> str:
    return f"[{', '.join(map(repr, words))}]"


def _spoken(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


WANTED: Final = joined(positive("cpu", "500m"), positive("memory", "256Mi"))
"""CPU and memory must be above zero."""

COUNTED: Final = joined(not_negative("cpu"), not_negative("memory"))
REQUESTED_TEXTS: Final = joined(
    positive_text("requestedCPU", "500m"), positive_text("requestedMemory", "256Mi")
)
REQUESTED: Final = joined(unchanged("requestedResources"), WANTED)

LASTING: Final = rule(
    r"self == '' || (self.matches('^[+]?([0-9.]+[a-zµμ]+)+$') && self.matches('[1-9]'))",
    "must be a duration above zero, for example 1h30m",
)
"""A pattern, because `duration()` fails with an internal error on invalid input."""

WEIGHTS: Final = rule(
    "size(self) == 0 || self.exists(name, self[name] > 0.0)",
    "at least one weight must be above zero",
)
