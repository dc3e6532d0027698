"""Validation of object keys: names become file names, so nothing else may pass. The rules of
Kubernetes.
"""

from __future__ import annotations

import re
import reprlib
from typing import Final, NamedTuple

from kubelend.core.errors import InvalidInput

MAX_LABEL_LENGTH: Final = 63
MAX_NAME_LENGTH: Final = 253

_LABEL: Final = r"[a-z0-9]++(?:-++[a-z0-9]++)*+"
_NAMESPACE: Final = re.compile(_LABEL, re.ASCII)
_NAME: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*+", re.ASCII)


class ObjectKey(NamedTuple):
    """Identifies an object of its kind."""

    namespace: str
    name: str

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"


def parse_object_key(key: str) -> ObjectKey:
    """The parts of `namespace/name`, or `InvalidInput`."""
    namespace, _, name = key.partition("/")
    if len(namespace) > MAX_LABEL_LENGTH or not _NAMESPACE.fullmatch(namespace):
        raise InvalidInput(
            f"{reprlib.repr(namespace)} is not a valid namespace",
            hint=f"use lower-case letters, digits and dashes, at most {MAX_LABEL_LENGTH}",
        )
    if len(name) > MAX_NAME_LENGTH or not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{reprlib.repr(name)} is not a valid object name",
            hint=f"use lower-case letters, digits, dashes and dots, at most {MAX_NAME_LENGTH}",
        )
    return ObjectKey(namespace, name)
