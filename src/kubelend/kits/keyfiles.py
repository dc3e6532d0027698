"""File I/O: atomic writes, atomic replacement of several files, directory locks and file modes.

Key and certificate files (`kubelend.pki.files`), TLS contexts (`kubelend.transports.tls`) and object files
(`kubelend.sources.file_objects`) use this. It handles paths, bytes and modes only, not the contents.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kubelend.core.errors import InvalidSettings

# Keys of a Kubernetes TLS secret, and therefore file names where one is mounted.
TLS_CERTIFICATE = "tls.crt"
TLS_KEY = "tls.key"
CA_CERTIFICATES = "ca.crt"

PRIVATE_MODE = 0o600
PUBLIC_MODE = 0o644


def read_file(path: Path, *, hint: str = "") -> bytes:
    """Return the file's content. Missing, unreadable and empty files are errors; `hint` says what to do."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise InvalidSettings(f"{path} is missing", hint=hint) from None
    except OSError as error:
        raise InvalidSettings(
            f"{path} cannot be read: {error.strerror}", hint="check its owner and mode"
        ) from error
    if not content.strip():
        raise InvalidSettings(f"{path} is empty", hint=hint)
    return content


def mode_problem(path: Path, *, content: str = "a private key") -> str:
    """Return what is wrong with a private file's mode, as one sentence; empty if nothing is.

    Group read is allowed if another user owns the file: Kubernetes mounts secrets like this for a process
    that is not root.
    """
    try:
        found = path.stat()
    except OSError:
        return ""
    allowed = 0o700 if found.st_uid == os.geteuid() else 0o740
    mode = stat.S_IMODE(found.st_mode)
    if not mode & ~allowed:
        return ""
    return f"{path} holds {content} and has mode {mode:04o}, so other users can access it"


def write_atomic(path: Path, content: bytes, *, mode: int, overwrite: bool = False) -> None:
    """Write a file atomically. Without `overwrite`, only if the file does not exist."""
    try:
        temporary = _write_temporary(path, content, mode)
        try:
            _move_into_place(temporary, path, overwrite)
        finally:
            temporary.unlink(missing_ok=True)
        sync_directory(path.parent)
    except FileExistsError:
        raise InvalidSettings(f"{path} already exists", hint="move it away first") from None
    except OSError as error:
        raise InvalidSettings(
            f"{path} cannot be written: {error.strerror}",
            hint="choose a directory that this user may write to",
        ) from error


def sync_directory(directory: Path) -> None:
    """Fsync a directory, so that renames survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_file(path: Path) -> None:
    """Remove a file if it exists, durably."""
    try:
        path.unlink(missing_ok=True)
        sync_directory(path.parent)
    except OSError as error:
        raise InvalidSettings(
            f"{path} cannot be removed: {error.strerror}", hint="check the directory's owner"
        ) from error


def remove_temporary_files(path: Path) -> None:
    """Remove temporary files of interrupted writes of `path`. The caller must hold the lock."""
    for leftover in path.parent.glob(f"{_temporary_prefix(path)}*"):
        remove_file(leftover)


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Lock a directory exclusively, for read-modify-write of its files."""
    descriptor = _open_directory(directory)
    try:
        _flock_or_fail(descriptor, directory)
        yield
    finally:
        os.close(descriptor)


def _write_temporary(path: Path, content: bytes, mode: int) -> Path:
    # In the same directory, because a rename does not cross file systems; mkstemp creates it with mode 0600.
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=_temporary_prefix(path))
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
    except BaseException:
        Path(name).unlink()
        raise
    return Path(name)


def _temporary_prefix(path: Path) -> str:
    return f".{path.name}."


def _move_into_place(temporary: Path, path: Path, overwrite: bool) -> None:
    # A hard link fails atomically if the file exists; a check before a rename would be a race.
    if overwrite:
        temporary.replace(path)
    else:
        path.hardlink_to(temporary)


def _open_directory(directory: Path) -> int:
    try:
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise InvalidSettings(
            f"{directory} cannot be opened: {error.strerror}",
            hint="check the path of the directory",
        ) from error


def _flock_or_fail(descriptor: int, directory: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InvalidSettings(
            f"{directory} is locked by another process", hint="retry when it is done"
        ) from None
