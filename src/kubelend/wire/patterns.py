"""What the parsers of the core accept, in the words of JSON Schema: for what is published alone.

The types of `wire.bodies`, the parameters of the routes and the fields of Kubernetes objects carry these,
so that a client can know before it sends what would be refused, and an API server refuses it itself. The
parsers go on deciding, with messages that a pattern could not give.
No look-ahead: the regular expressions of Go, which many a validator uses, have none.
"""

from __future__ import annotations

from typing import Any, Final

from kubelend.core import quantities
from kubelend.core.lifecycle import Phase

Schema = dict[str, Any]


def one_of(*words: str) -> Schema:
    """One of these; whoever reads it takes any text, because a newer peer may know more of them."""
    return {"enum": list(words)}


def up_to(characters: int) -> Schema:
    """A text of at most this length; whoever reads it takes any."""
    return {"maxLength": characters}


def at_most(properties: int) -> Schema:
    """As many names as this in a map."""
    return {"maxProperties": properties}


def no_longer_than(items: int) -> Schema:
    """As many items as this in a list."""
    return {"maxItems": items}


# Each has one way to match: nothing for a backtracking engine to get lost in.
_DIGITS: Final = r"([0-9]+(\.[0-9]*)?|\.[0-9]+)"
_ZERO: Final = r"(0+(\.0*)?|\.0+)"
_SOME: Final = r"(0*[1-9][0-9]*(\.[0-9]*)?|0*\.0*[1-9][0-9]*)"
_EXPONENT: Final = r"[eE][+-]?0*([0-5]?[0-9]|6[0-4])"
_SUFFIX: Final = r"[numkMGTPE]|[KMGTPE]i"
_QUANTITY: Final = rf"(\+?{_DIGITS}|-{_ZERO})({_EXPONENT}|{_SUFFIX})?"

_UNIT: Final = "(ns|us|\u00b5s|\u03bcs|ms|s|m|h)"
_DURATION: Final = rf"\+?(0|({_DIGITS}{_UNIT})+)"
_SOME_TIME: Final = rf"\+?({_ZERO}{_UNIT})*{_SOME}{_UNIT}({_DIGITS}{_UNIT})*"
_NO_TIME: Final = rf"-(0|({_ZERO}{_UNIT})+)"

_NAMED: Final = ("cpu", "memory", "gpu", "storage")
_PREFIX: Final = r"([a-z0-9]+((-+|\.)[a-z0-9]+)*/)?"
_PHASE: Final = f"({'|'.join(Phase)})?"

QUANTITY: Final[Schema] = {"pattern": f"^{_QUANTITY}$", "maxLength": quantities.MAX_LENGTH}
"""A text that says an amount; what it comes to must not be over 2^63-1 in its unit."""

QUANTITY_OR_NONE: Final[Schema] = {
    "pattern": f"^({_QUANTITY})?$",
    "maxLength": quantities.MAX_LENGTH,
}
ANY_QUANTITY: Final[Schema] = {
    "pattern": f"^([+-]?{_DIGITS}({_EXPONENT}|{_SUFFIX})?)?$",
    "maxLength": quantities.MAX_LENGTH,
}
"""Of either sign, or none: what is worked out, and may show that too much was lent."""

SOME_QUANTITY: Final[Schema] = {
    "pattern": rf"^\+?{_SOME}({_EXPONENT}|{_SUFFIX})?$",
    "maxLength": quantities.MAX_LENGTH,
}
"""More than zero."""

NUMBER: Final[Schema] = {"minimum": 0, "maximum": quantities.LARGEST}
CORES: Final[Schema] = {"minimum": 0, "maximum": quantities.LARGEST // 1000}

_MORE_THAN_ZERO: Final[Schema] = {
    "anyOf": [
        {"type": "integer", "minimum": 1},
        {"type": "string", "pattern": SOME_QUANTITY["pattern"]},
    ]
}
WANTED: Final[Schema] = {"properties": {"cpu": _MORE_THAN_ZERO, "memory": _MORE_THAN_ZERO}}
"""Beside what holds for all amounts: nobody borrows no processor or no memory."""

RESOURCE: Final[Schema] = {
    "pattern": f"^{_PREFIX}[A-Za-z0-9]([A-Za-z0-9_.-]{{0,61}}[A-Za-z0-9])?$",
    "maxLength": 253 + 1 + 63,
    "allOf": [{"pattern": "^[^/]{1,253}(/|$)"}],
}
RESOURCE_NAME: Final[Schema] = {**RESOURCE, "not": {"enum": list(_NAMED)}}

DURATION: Final[Schema] = {"pattern": f"^({_SOME_TIME})?$"}
"""Above zero, or left out."""

WAIT: Final[Schema] = {"pattern": f"^({_DURATION}|{_NO_TIME})?$"}
"""Not below zero, or left out."""

PRICE: Final[Schema] = {"pattern": r"^(0?[0-9]{1,9}(\.[0-9]{1,9})?)?$"}
CURRENCY: Final[Schema] = {"pattern": "^([A-Za-z]{3,8})?$"}

POLICIES: Final = ("headroom", "binpack", "cost", "balanced")
SCORES: Final = ("headroom", "packing", "balance", "price")
"""As in `core.policies`, which brings numpy along; a client of the broker does without."""

POLICY: Final[Schema] = {"enum": ["", *POLICIES]}
SCORE: Final[Schema] = {"enum": list(SCORES)}
WEIGHT: Final[Schema] = {"minimum": 0, "maximum": 1000}
WEIGHTS: Final[Schema] = {"not": {"minProperties": 1, "additionalProperties": {"const": 0}}}
"""Not all of them zero."""

INT32: Final[Schema] = {"format": "int32", "minimum": -(2**31), "maximum": 2**31 - 1}

STEERING: Final = "\\x00-\\x1f\\x7f-\\x9f\u2028\u2029"
"""What could steer a terminal, or begin a line: control characters, and Unicode's separators of lines and
paragraphs. Those two as they are, because no escape for them is known to Go and to JSON Schema alike."""

PLAIN: Final[Schema] = {"pattern": f"^[^{STEERING}]*$"}
"""Any text in one line, or none; `wire.texts` decides."""

COMMON_NAME: Final[Schema] = {
    "pattern": r"^([^\x00-\x20\x7f-\xa0]([^\x00-\x1f\x7f-\xa0]*[^\x00-\x20\x7f-\xa0])?)?$",
    "maxLength": 64,
}
"""Or left out. No control characters, and no space at either end."""

_SPACE: Final = r"[ \t\n\v\f\r]"
_REQUEST: Final = "(NEW )?CERTIFICATE REQUEST-----"
CERTIFICATE_REQUEST: Final[Schema] = {
    "pattern": rf"^{_SPACE}*-----BEGIN {_REQUEST}{_SPACE}[A-Za-z0-9+/= \t\n\v\f\r]+"
    rf"-----END {_REQUEST}{_SPACE}*$"
}

REQUESTERS: Final[Schema] = {"pattern": r"^ *[^\x00-\x20\x7f-\xa0][^\x00-\x1f\x7f-\xa0]*$"}
"""A name or a shell pattern: something that can be seen."""

_DAY: Final = (
    "([Mm][Oo][Nn]|[Tt][Uu][Ee]|[Ww][Ee][Dd]|[Tt][Hh][Uu]|[Ff][Rr][Ii]|[Ss][Aa][Tt]|[Ss][Uu][Nn])"
)
_DAYS: Final = f"{_DAY}(-{_DAY})?(,{_DAY}(-{_DAY})?)*"
_CLOCK: Final = "([01]?[0-9]|2[0-3]):[0-5][0-9]"
_ZONE: Final = "[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*"
HOURS: Final[Schema] = {"pattern": f"^({_DAYS} )?{_CLOCK}-({_CLOCK}|24:00)( {_ZONE})?$"}
"""Which zones there are, and that it must not end when it begins, is for the parser to say."""

KEYED_BY_TYPE: Final[Schema] = {
    "x-kubernetes-list-type": "map",
    "x-kubernetes-list-map-keys": ["type"],
}
"""A list with one item of each type, so that two writers do not take each other's away."""

PHASES: Final[Schema] = {"pattern": f"^{_PHASE}(,{_PHASE})*$"}
SIDE: Final[Schema] = one_of("requester", "provider")
PRINTABLE: Final[Schema] = {"pattern": "^[ -~]*$"}
EVENT_ID: Final[Schema] = {"pattern": "^[0-9]{0,19}$"}
