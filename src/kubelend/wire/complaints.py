"""Readable errors for input that a person wrote, in place of msgspec's messages.

`Object missing required field `cpu` - at `$.spec`` becomes `spec.cpu: is required`.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec


def readable_validation_error(problem: msgspec.ValidationError) -> str:
    """Return `<field>: <what is wrong with it>`."""
    message = str(problem)
    match = _LOCATED_MESSAGE.fullmatch(message)
    what, path = (match["problem"], match["path"]) if match else (message, "")
    if field := _FIELD_MESSAGE.fullmatch(what):
        path = f"{path}.{field['name']}" if path else field["name"]
        what = "is required" if "missing" in what else "unknown field"
    else:
        what = _readable_text(what)
    if not path:
        return what
    return f"{path}.{what}" if _FIELD_PREFIX.match(what) else f"{path}: {what}"


_LOCATED_MESSAGE: Final = re.compile(
    r"(?P<problem>.*) - at `(?P<in_key>key` in `)?\$\.?(?P<path>.*)`", re.S
)
_FIELD_MESSAGE: Final = re.compile(
    r"Object (contains unknown|missing required) field `(?P<name>.*)`"
)
_FIELD_PREFIX: Final = re.compile(r"[^\s:]+: ")

_LENGTH_MESSAGE: Final = re.compile(
    r"Expected `(?P<kind>str|array|object)` of length (?P<sign>[<>]=) (?P<end>\d+)"
)
_VALUE_MESSAGE: Final = re.compile(r"Expected `(int|float)` (?P<sign>[<>]=) (?P<end>\S+)")
_SIGNS: Final = {"<=": "at most", ">=": "at least"}


def _readable_text(what: str) -> str:
    if re.fullmatch(r"Expected `str`, got `(int|float|bool)`", what):
        return "must be a string: put it in quotes"
    if match := _LENGTH_MESSAGE.fullmatch(what):
        parts = "characters" if match["kind"] == "str" else "entries"
        return f"must have {_SIGNS[match['sign']]} {match['end']} {parts}"
    if match := _VALUE_MESSAGE.fullmatch(what):
        return f"must be {_SIGNS[match['sign']]} {match['end']}"
    return what.replace("`", "").replace("Expected", "expected")
