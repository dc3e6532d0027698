"""Validation of object keys: names become file names, so nothing else may pass. The rules of
Kubernetes.
"""

from __future__ import annotations

import re
import reprlib
from typing import Final, NamedTuple

from kubelend.core.errors import InvalidInput

LONGEST_LABEL: Final = 63
LONGEST_NAME: Final = 253

_LABEL: Final = r"[a-z0-9]++(?:-++[a-z0-9]++)*+"
_NAMESPACE: Final = re.compile(_LABEL, re.ASCII)
_NAME: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*+", re.ASCII)


class Name(NamedTuple):
    """Identifies an object of its kind."""

    namespace: str
    name: str

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"


def parse(key: str) -> Name:
    """The parts of `namespace/name`, or `InvalidInput`."""
    namespace, _, name = key.partition("/")
    if len(namespace) > LONGEST_LABEL or not _NAMESPACE.fullmatch(namespace):
        raise InvalidInput(
            f"{reprlib.repr(namespace)} is not a valid namespace",
            hint=f"use lower-case letters, digits and dashes, at most {LONGEST_LABEL}",
        )
    if len(name) > LONGEST_NAME or not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{reprlib.repr(name)} is not a valid object name",
            hint=f"use lower-case letters, digits, dashes and dots, at most {LONGEST_NAME}",
        )
    return Name(namespace, name)
