"""Secrets and certificates as configured: inline data, or a file that may be replaced."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from kubelend.kits import keyfiles

FileFingerprint = tuple[tuple[int, ...] | None, ...]
"""Fingerprint of some files, which changes when one of them does."""


class DataOrFile(msgspec.Struct, frozen=True):
    """Inline data, or the path of a file. Its repr does not show the content."""

    data: bytes = b""
    path: Path | None = None

    def read(self, hint: str = "") -> bytes:
        """Return the current content; empty if nothing is configured. `InvalidSettings` names the file."""
        if self.path is None:
            return self.data
        return keyfiles.read_file(self.path, hint=hint)

    def __bool__(self) -> bool:
        return bool(self.data) or self.path is not None

    def __repr__(self) -> str:
        return (
            f"DataOrFile(path={str(self.path)!r})"
            if self.path
            else f"DataOrFile({len(self.data)} bytes)"
        )


NO_DATA = DataOrFile()


def fingerprint_files(paths: Iterable[Path | None]) -> FileFingerprint:
    """Return a fingerprint that is equal as long as none of the files has changed."""
    return tuple(None if path is None else _fingerprint(path) for path in paths)


def _fingerprint(path: Path) -> tuple[int, ...] | None:
    # Follows links, and so detects that Kubernetes replaced the ..data link of a mounted secret.
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
