"""All error codes of the tree in `core.errors`, for schemas and for decoding errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kubelend.core.errors import KubelendError

Kind = type[KubelendError]


def _tree(kind: Kind) -> Iterator[Kind]:
    yield kind
    for child in kind.__subclasses__():
        yield from _tree(child)


def _nearest_to_the_root(kinds: Iterator[Kind]) -> dict[str, Kind]:
    """Map each code to the class nearest to the root: subclasses that share a code are one error on the
    wire.
    """
    found: dict[str, Kind] = {}
    for kind in kinds:
        found.setdefault(kind.code, kind)
    return found


BY_CODE: Final = _nearest_to_the_root(_tree(KubelendError))
