"""Secrets and certificates as they are configured: given outright, or in a file that may be replaced.

`kube.access` is made of these. Neither form shows what it holds when it is printed.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from kubelend.kits import keyfiles

Signature = tuple[tuple[int, ...] | None, ...]
"""What changes when one of some files does."""


class Held(msgspec.Struct, frozen=True):
    """Some bytes, or the file that has them."""

    data: bytes = b""
    path: Path | None = None

    def read(self, hint: str = "") -> bytes:
        """What is there now; nothing if nothing was configured. `InvalidSettings` names the file."""
        if self.path is None:
            return self.data
        return keyfiles.read(self.path, hint=hint)

    def __bool__(self) -> bool:
        return bool(self.data) or self.path is not None

    def __repr__(self) -> str:
        return f"Held(path={str(self.path)!r})" if self.path else f"Held({len(self.data)} bytes)"


NOTHING = Held()


def signature(paths: Iterable[Path | None]) -> Signature:
    """Equal as long as none of the files has changed."""
    return tuple(None if path is None else _stat(path) for path in paths)


def _stat(path: Path) -> tuple[int, ...] | None:
    # Follows links, and so sees Kubernetes exchange the ..data link behind a mounted secret.
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
