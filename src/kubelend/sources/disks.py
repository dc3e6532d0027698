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

LOCK_TIMEOUT: Final = 5.0
"""Seconds: a process that holds the lock does so for a few writes."""

_NANOSECONDS: Final = 1_000_000_000
_MISSING_ERRNOS: Final = (
    errno.ENOENT,
    errno.ELOOP,
)  # it went while we looked, or is a link to nothing


class FileState(NamedTuple):
    """Another one whenever somebody has written the file."""

    inode: int
    size: int
    modified: int
    changed: int
    is_file: bool

    def age(self) -> float:
        """Seconds since it was written, by the kernel's own stamp, which no copy can carry along."""
        return (time.time_ns() - self.changed) / _NANOSECONDS


def file_state(path: Path) -> FileState | None:
    """None if there is no such file."""
    try:
        return _state_from_stat(path.stat())
    except OSError as error:
        if error.errno in _MISSING_ERRNOS:
            return None
        raise _store_failed(path, "be looked at", error) from error


def file_states(directory: Path, suffixes: tuple[str, ...]) -> dict[str, FileState]:
    """Of all files that end so and are not hidden, by name; `StoreFailed` if it cannot look."""
    found: dict[str, FileState] = {}
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.endswith(suffixes) and not entry.name.startswith("."):
                    _add_file_state(entry, found)
    except OSError as error:
        raise _store_failed(directory, "be looked at", error) from error
    return found


def read_limited(path: Path, limit: int) -> bytes:
    """What it holds, a byte over the limit at most. Look at it before: opening a pipe would hang."""
    try:
        with path.open("rb") as file:
            return file.read(limit + 1)
    except OSError as error:
        raise InvalidInput(f"cannot be read: {error.strerror}") from error


def replace_file(path: Path, text: bytes) -> FileState:
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
        _fsync_directory(path.parent)
        return _state_from_stat(path.stat())
    except OSError as error:
        raise _store_failed(path, "be written", error) from error


def move_file(path: Path, to: Path) -> None:
    """Under its other name when this returns, after a crash too."""
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        path.replace(to)
        _fsync_directory(to.parent)
        _fsync_directory(path.parent)
    except OSError as error:
        raise _store_failed(path, "be moved", error) from error


def unlink_file(path: Path) -> None:
    """There is no such file; after a crash there may be."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise _store_failed(path, "be removed", error) from error


@contextmanager
def lock_directory_waiting(directory: Path) -> Iterator[None]:
    """For who reads files and writes others by them: no other store does so here meanwhile."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _store_failed(directory, "be opened", error) from error
    try:
        _flock_until_timeout(descriptor, directory)
        yield
    finally:
        os.close(descriptor)


def _add_file_state(entry: os.DirEntry[str], found: dict[str, FileState]) -> None:
    try:
        found[entry.name] = _state_from_stat(entry.stat())
    except OSError as error:
        if error.errno not in _MISSING_ERRNOS:
            raise


def _state_from_stat(found: os.stat_result) -> FileState:
    return FileState(
        found.st_ino,
        found.st_size,
        found.st_mtime_ns,
        found.st_ctime_ns,
        stat.S_ISREG(found.st_mode),
    )


def _fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flock_until_timeout(descriptor: int, directory: Path) -> None:
    deadline = time.monotonic() + LOCK_TIMEOUT
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise StoreFailed(f"another process keeps {directory} locked") from None
            time.sleep(0.002)


def _store_failed(path: Path, verb: str, error: OSError) -> StoreFailed:
    return StoreFailed(f"{path} cannot {verb}: {error.strerror}")
