"""One file at a time: what it looks like, what it holds, and writing it so that nobody sees half of it.

`folders` is made of these steps. Errors of the operating system leave here as `StoreFailed`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from kubelend.core.errors import InvalidInput, StoreFailed

LOCK_PATIENCE: Final = 5.0
"""Seconds: a process that holds the lock does so for a few writes."""

_NANO: Final = 1_000_000_000
_NOTHING_THERE: Final = (
    errno.ENOENT,
    errno.ELOOP,
)  # it went while we looked, or is a link to nothing


class Signature(NamedTuple):
    """Another one whenever somebody has written the file."""

    inode: int
    size: int
    modified: int
    changed: int
    is_file: bool

    def age(self) -> float:
        """Seconds since it was written, by the kernel's own stamp, which no copy can carry along."""
        return (time.time_ns() - self.changed) / _NANO


def signature(path: Path) -> Signature | None:
    """None if there is no such file."""
    try:
        return _signature(path.stat())
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            return None
        raise _failed(path, "be looked at", error) from error


def signatures(directory: Path, suffixes: tuple[str, ...]) -> dict[str, Signature]:
    """Of all files that end so and are not hidden, by name; `StoreFailed` if it cannot look."""
    found: dict[str, Signature] = {}
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.endswith(suffixes) and not entry.name.startswith("."):
                    _note(entry, found)
    except OSError as error:
        raise _failed(directory, "be looked at", error) from error
    return found


def read(path: Path, limit: int) -> bytes:
    """What it holds, a byte over the limit at most. Look at it before: opening a pipe would hang."""
    try:
        with path.open("rb") as file:
            return file.read(limit + 1)
    except OSError as error:
        raise InvalidInput(f"cannot be read: {error.strerror}") from error


def write(path: Path, text: bytes) -> Signature:
    """Whole or not at all, and on the disk when this returns. For who holds the lock."""
    beside = path.with_name(
        f".{path.name}.new"
    )  # always the same: a killed write leaves one at most
    try:
        with beside.open("wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        _sync(path.parent)
        return _signature(path.stat())
    except OSError as error:
        raise _failed(path, "be written", error) from error


def move(path: Path, to: Path) -> None:
    """Under its other name when this returns, after a crash too."""
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        path.replace(to)
        _sync(to.parent)
        _sync(path.parent)
    except OSError as error:
        raise _failed(path, "be moved", error) from error


def discard(path: Path) -> None:
    """There is no such file; after a crash there may be."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise _failed(path, "be removed", error) from error


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """For who reads files and writes others by them: no other store does so here meanwhile."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _failed(directory, "be opened", error) from error
    try:
        _lock(descriptor, directory)
        yield
    finally:
        os.close(descriptor)


def _note(entry: os.DirEntry[str], found: dict[str, Signature]) -> None:
    try:
        found[entry.name] = _signature(entry.stat())
    except OSError as error:
        if error.errno not in _NOTHING_THERE:
            raise


def _signature(found: os.stat_result) -> Signature:
    return Signature(
        found.st_ino,
        found.st_size,
        found.st_mtime_ns,
        found.st_ctime_ns,
        stat.S_ISREG(found.st_mode),
    )


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, directory: Path) -> None:
    deadline = time.monotonic() + LOCK_PATIENCE
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise StoreFailed(f"another process keeps {directory} locked") from None
            time.sleep(0.002)


def _failed(path: Path, verb: str, error: OSError) -> StoreFailed:
    return StoreFailed(f"{path} cannot {verb}: {error.strerror}")
