"""Checks of texts and labels, and readable validation errors in place of msgspec's messages.

`Object missing required field `cpu` - at `$.spec`` becomes `spec.cpu: is required`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kubelend.core.errors import InvalidInput
from kubelend.wire import json_types


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


def without_nulls(found: Any) -> Any:
    """Plain values without the fields that are null, which are the same as fields left out."""
    if isinstance(found, list):
        return [without_nulls(one) for one in found]
    if not isinstance(found, dict):
        return found
    return {key: without_nulls(value) for key, value in found.items() if value is not None}


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
    if re.fullmatch(r"Expected `(str|int \| str|str \| int)`, got `(int|float|bool)`", what):
        return "must be a string: put it in quotes"
    if match := _LENGTH_MESSAGE.fullmatch(what):
        parts = "characters" if match["kind"] == "str" else "entries"
        return f"must have {_SIGNS[match['sign']]} {match['end']} {parts}"
    if match := _VALUE_MESSAGE.fullmatch(what):
        return f"must be {_SIGNS[match['sign']]} {match['end']}"
    return what.replace("`", "").replace("Expected", "expected")


def is_plain(text: str) -> bool:
    """Whether the text has neither control characters nor line breaks."""
    # `isprintable` accepts slightly less but is much faster, and this runs for every advertisement.
    return text.isprintable() or _CONTROL_CHARACTERS.search(text) is None


def check_plain(text: str, where: str) -> str:
    """Return the text if it is plain; otherwise raise an error that names the field."""
    if is_plain(text):
        return text
    raise InvalidInput(
        f"{where}: {text[:40]!r} contains a control character or a line break",
        hint="use plain text in a single line",
    )


def check_labels(labels: Mapping[str, str], where: str) -> None:
    """Check all keys and values of a label map."""
    for name, value in labels.items():
        check_plain(value, f"{where}.{check_plain(name, where)}")


def to_single_line(text: str) -> str:
    """Replace everything that is not plain by spaces, for texts that must not be rejected."""
    return text if is_plain(text) else _CONTROL_CHARACTERS.sub(" ", text).strip()


_CONTROL_CHARACTERS: Final = re.compile(f"[{json_types.CONTROL_CHARACTERS}]+")
