"""What an object may be called: names become file names, so nothing else may pass.

`memory.MemoryObjects` and `files.FileObjects` refuse the same names that Kubernetes refuses.
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
    """Which object of its kind."""

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
            f"{reprlib.repr(namespace)} is no namespace",
            hint=f"write small letters, digits and dashes, at most {LONGEST_LABEL}",
        )
    if len(name) > LONGEST_NAME or not _NAME.fullmatch(name):
        raise InvalidInput(
            f"{reprlib.repr(name)} is no name of an object",
            hint=f"write small letters, digits, dashes and dots, at most {LONGEST_NAME}",
        )
    return Name(namespace, name)
