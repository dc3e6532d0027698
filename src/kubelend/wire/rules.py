"""What a Kubernetes API server checks of an object beyond its shape, in CEL: for the CRDs alone.

The records of `wire.objects` and `wire.broker_objects` carry these on the fields they are about. Servers
from 1.25 on know them. They are there to tell people at once, in words; nothing of ours relies on them.
Of CEL only what 1.25 had: no library of quantities, and no look at who writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kubelend.wire.patterns import Schema

VALIDATIONS: Final = "x-kubernetes-validations"


def rule(expression: str, message: str) -> Schema:
    return {VALIDATIONS: [{"rule": expression, "message": message}]}


def joined(*schemas: Schema) -> Schema:
    """All these rules on one field."""
    return {VALIDATIONS: [one for schema in schemas for one in schema[VALIDATIONS]]}


def unchanged(what: str) -> Schema:
    """A field that must be there, and stays as it was made."""
    return rule("self == oldSelf", f"{what} cannot be changed")


def kept(field: str) -> Schema:
    """A field of this part that may be filled in later, once. On the part, because on the field itself
    nobody would see it taken away."""
    before, now = f"oldSelf.{field}", f"self.{field}"
    return rule(
        f"!has({before}) || {before} == '' || (has({now}) && {now} == {before})",
        f"{field} cannot be changed",
    )


def positive(field: str, example: str) -> Schema:
    """A number, or a text that says an amount: more than zero."""
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
    return f"{field} must be an amount of more than zero, for example {example}"


def names_up_to(characters: int) -> Schema:
    return rule(
        f"self.all(name, size(name) <= {characters})",
        f"a name has at most {characters} characters",
    )


def names_among(known: Sequence[str]) -> Schema:
    return rule(f"self.all(name, name in {_texts(known)})", f"the names are {_spoken(known)}")


def names_beside(others: Sequence[str]) -> Schema:
    return rule(
        f"!self.exists(name, name in {_texts(others)})",
        f"{_spoken(others)} have fields of their own",
    )


def _texts(words: Sequence[str]) -> str:
    return f"[{', '.join(map(repr, words))}]"


def _spoken(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


WANTED: Final = joined(positive("cpu", "500m"), positive("memory", "256Mi"))
"""Nobody borrows no processor or no memory."""

COUNTED: Final = joined(not_negative("cpu"), not_negative("memory"))
REQUESTED_TEXTS: Final = joined(
    positive_text("requestedCPU", "500m"), positive_text("requestedMemory", "256Mi")
)
REQUESTED: Final = joined(unchanged("requestedResources"), WANTED)

LASTING: Final = rule(
    r"self == '' || (self.matches('^[+]?([0-9.]+[a-zµμ]+)+$') && self.matches('[1-9]'))",
    "must be a duration above zero, for example 1h30m",
)
"""A CEL duration would not do: it fails on what is none, instead of saying so."""

WEIGHTS: Final = rule(
    "size(self) == 0 || self.exists(name, self[name] > 0.0)", "one weight must be more than zero"
)
