"""All error codes of the tree in `core.errors`, for schemas and for decoding errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kubelend.core.errors import KubelendError

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
