"""Files that hold keys and certificates: written whole or not at all, read with clear errors.

The authority's files (`kubelend.pki.files`) are written and read through here, and the TLS contexts
(`kubelend.transports.tls`) read through here. It knows paths, bytes and modes, and nothing of what
the bytes mean.
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

# The names of the parts of a Kubernetes TLS secret, and so of the files where one is mounted.
CERTIFICATE = "tls.crt"
KEY = "tls.key"
AUTHORITIES = "ca.crt"

PRIVATE = 0o600
PUBLIC = 0o644


def read(path: Path, *, hint: str = "") -> bytes:
    """The file's bytes. Missing, unreadable and empty ones are errors; `hint` says what to do."""
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


def exposure(path: Path, *, holds: str = "a private key") -> str:
    """What is wrong with a private file's mode, as one sentence; empty when nothing is.

    Group read is fine on a file of another owner: so does Kubernetes hand a secret to a process
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
    return f"{path} holds {holds} and has mode {mode:04o}, so others can reach it"


def write(path: Path, content: bytes, *, mode: int, overwrite: bool = False) -> None:
    """Put `content` at `path`, whole or not at all. Without `overwrite`, only where nothing is."""
    try:
        temporary = _write_beside(path, content, mode)
        try:
            _move(temporary, path, overwrite)
        finally:
            temporary.unlink(missing_ok=True)
        sync_directory(path.parent)
    except FileExistsError:
        raise InvalidSettings(f"{path} exists already", hint="move it away first") from None
    except OSError as error:
        raise InvalidSettings(
            f"{path} cannot be written: {error.strerror}",
            hint="choose a directory that this user may write to",
        ) from error


def sync_directory(directory: Path) -> None:
    """Let names survive a power cut, as the contents of files do."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Make sure that there is no such file, after a crash too."""
    try:
        path.unlink(missing_ok=True)
        sync_directory(path.parent)
    except OSError as error:
        raise InvalidSettings(
            f"{path} cannot be removed: {error.strerror}", hint="check the directory's owner"
        ) from error


def remove_leftovers(path: Path) -> None:
    """What writes of `path` left behind that were killed half-way. For who holds the lock."""
    for leftover in path.parent.glob(f"{_temporary_prefix(path)}*"):
        remove(leftover)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """For who reads files and writes others by them: nobody else does so here meanwhile."""
    descriptor = _open_directory(directory)
    try:
        _lock(descriptor, directory)
        yield
    finally:
        os.close(descriptor)


def _write_beside(path: Path, content: bytes, mode: int) -> Path:
    # In the same directory, for a rename does not cross file systems; 0600 from the first moment.
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


def _move(temporary: Path, path: Path, overwrite: bool) -> None:
    # A link fails where something is, in one step; a check before a rename would leave a gap.
    if overwrite:
        temporary.replace(path)
    else:
        path.hardlink_to(temporary)


def _open_directory(directory: Path) -> int:
    try:
        return os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise InvalidSettings(
            f"{directory} cannot be opened: {error.strerror}", hint="name the right directory"
        ) from error


def _lock(descriptor: int, directory: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InvalidSettings(
            f"another process is changing {directory}", hint="try again when it is done"
        ) from None
