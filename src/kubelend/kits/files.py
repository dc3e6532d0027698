"""Files: atomic writes, atomic replacement of several files, locks, and checks of file modes.

`AtomicDirectory` replaces several files together, such as a key and its certificate. The files live in a
hidden directory, and their names are symbolic links through one more link, which is what is replaced.
Readers see either all old or all new files, also after a crash. Kubernetes replaces the files of a
mounted secret in the same way.

    certs/tls.crt -> .current/tls.crt
    certs/tls.key -> .current/tls.key
    certs/.current -> .generation-k3v9x0q2

Plain files are converted to such links, with their contents, before they are replaced for the first time.
Certificate renewal (`kubelend.apps.renewal`) uses this. `file_state` and the functions below it are for
object directories (`kubelend.sources.file_objects`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from kubelend.core.errors import InvalidInput, InvalidSettings, StoreFailed

CURRENT_LINK = ".current"
GENERATION_PREFIX = ".generation-"


class AtomicDirectory:
    """The files `names` of one directory, replaced together. Writers must hold the lock."""

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        self._directory = directory
        self._names = names

    def write_problem(self) -> str:
        """Return why this process cannot replace the files, as one sentence; empty if it can."""
        if not os.access(self._directory, os.W_OK | os.X_OK, effective_ids=True):
            return f"{self._directory} is not writable"
        for path in self._paths():
            if path.is_symlink() and not self._is_managed_link(path):
                return f"{path} is a symbolic link managed by another program"
            if not path.exists():
                return f"{path} is missing"
            if path.stat().st_uid != os.geteuid():
                return f"{path} belongs to another user"
        return ""

    @contextlib.contextmanager
    def try_lock(self) -> Iterator[bool]:
        """Try to lock the directory; yields False if another process holds the lock. Released when this
        process ends.
        """
        with self._mapped_errors():
            descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield _try_flock(descriptor)
        finally:
            os.close(descriptor)

    def stage(self, contents: Mapping[str, bytes]) -> Path:
        """Write a new generation with the modes of the current files. It is not visible until `switch_to`."""
        with self._mapped_errors():
            generation = Path(tempfile.mkdtemp(prefix=GENERATION_PREFIX, dir=self._directory))
            for path in self._paths():
                _write_with_mode_of(path, generation / path.name, contents[path.name])
            generation.chmod(stat.S_IMODE(self._directory.stat().st_mode))
            sync_directory(self._directory)
            return generation

    def switch_to(self, staged: Path) -> None:
        """Switch to the staged generation and remove older ones."""
        with self._mapped_errors():
            if not all(map(self._is_managed_link, self._paths())):
                self._convert_to_links()
            self._replace_link(self._directory / CURRENT_LINK, staged.name)
            self.remove_unused()

    def remove_unused(self) -> None:
        """Remove unused generations and leftovers of a crash, as far as possible."""
        current = _link_target(self._directory / CURRENT_LINK)
        for path in self._directory.glob(f"{GENERATION_PREFIX}*"):
            if path.is_symlink():
                with contextlib.suppress(OSError):
                    path.unlink()
            elif path.name != current:
                shutil.rmtree(path, ignore_errors=True)

    def _convert_to_links(self) -> None:
        """Convert plain files to links, one by one, without changing the content behind any name."""
        present = self.stage({path.name: read_file(path) for path in self._paths()})
        self._replace_link(self._directory / CURRENT_LINK, present.name)
        for path in self._paths():
            self._replace_link(path, f"{CURRENT_LINK}/{path.name}")

    def _replace_link(self, path: Path, target: str) -> None:
        # A link cannot be changed in place, so a new one is renamed over it.
        temporary = self._directory / f"{GENERATION_PREFIX}{secrets.token_hex(8)}"
        temporary.symlink_to(target)
        temporary.replace(path)
        sync_directory(self._directory)

    def _paths(self) -> list[Path]:
        return [self._directory / name for name in self._names]

    def _is_managed_link(self, path: Path) -> bool:
        return _link_target(path) == f"{CURRENT_LINK}/{path.name}"

    @contextlib.contextmanager
    def _mapped_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InvalidSettings(
                f"files in {self._directory} cannot be replaced: {error.strerror}",
                hint="check the directory's owner and mode, and the free disk space",
            ) from error


def _try_flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_with_mode_of(old: Path, new: Path, content: bytes) -> None:
    """Write a file with the mode and group of the old one, because other processes of the group may read
    it.
    """
    found = old.stat()
    write_atomic(new, content, mode=stat.S_IMODE(found.st_mode))
    with contextlib.suppress(PermissionError):
        os.chown(new, -1, found.st_gid)


def _link_target(path: Path) -> str:
    return str(path.readlink()) if path.is_symlink() else ""


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


def directory_mode_problem(path: Path) -> str:
    """Return what is wrong with a directory's mode, as one sentence; empty if nothing is.

    With the sticky bit other users cannot replace files that they do not own, as in /tmp and in a mounted
    secret.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return ""
    if not mode & stat.S_IWOTH or mode & stat.S_ISVTX:
        return ""
    return f"{path} has mode {mode:04o}, so other users can replace files in it; chmod o-w {path}"


LOCK_TIMEOUT: Final = 5.0
"""Seconds. A process holds the lock only for a few writes."""

_NANOSECONDS: Final = 1_000_000_000
_MISSING_ERRNOS: Final = (
    errno.ENOENT,
    errno.ELOOP,
)  # deleted meanwhile, or a dangling link


class FileState(NamedTuple):
    """Identity and timestamps of a file; differs after every write."""

    inode: int
    size: int
    modified: int
    changed: int
    is_file: bool

    def age(self) -> float:
        """Seconds since the last write, by ctime, which a copy cannot preserve."""
        return (time.time_ns() - self.changed) / _NANOSECONDS


def file_state(path: Path) -> FileState | None:
    """State of a file; None if it does not exist."""
    try:
        return _state_from_stat(path.stat())
    except OSError as error:
        if error.errno in _MISSING_ERRNOS:
            return None
        raise _store_failed(path, "be read", error) from error


def file_states(directory: Path, suffixes: tuple[str, ...]) -> dict[str, FileState]:
    """States of all files with these suffixes that are not hidden, by name."""
    found: dict[str, FileState] = {}
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.endswith(suffixes) and not entry.name.startswith("."):
                    _add_file_state(entry, found)
    except OSError as error:
        raise _store_failed(directory, "be listed", error) from error
    return found


def read_limited(path: Path, limit: int) -> bytes:
    """Read at most one byte more than the limit. Check `is_file` before: opening a pipe would block."""
    try:
        with path.open("rb") as file:
            return file.read(limit + 1)
    except OSError as error:
        raise InvalidInput(f"cannot be read: {error.strerror}") from error


def replace_file(path: Path, text: bytes) -> FileState:
    """Replace a file atomically and durably. The caller must hold the lock."""
    # A fixed name: an interrupted write leaves one temporary file at most.
    temporary = path.with_name(f".{path.name}.new")
    try:
        with temporary.open("wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _fsync_directory(path.parent)
        return _state_from_stat(path.stat())
    except OSError as error:
        raise _store_failed(path, "be written", error) from error


def move_file(path: Path, to: Path) -> None:
    """Move a file durably; creates the target directory."""
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        path.replace(to)
        _fsync_directory(to.parent)
        _fsync_directory(path.parent)
    except OSError as error:
        raise _store_failed(path, "be moved", error) from error


def unlink_file(path: Path) -> None:
    """Remove a file if it exists, without fsync."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise _store_failed(path, "be removed", error) from error


@contextmanager
def lock_directory_waiting(directory: Path) -> Iterator[None]:
    """Lock a directory exclusively; waits for up to `LOCK_TIMEOUT` seconds."""
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
                raise StoreFailed(f"{directory} is locked by another process") from None
            time.sleep(0.002)


def _store_failed(path: Path, verb: str, error: OSError) -> StoreFailed:
    return StoreFailed(f"{path} cannot {verb}: {error.strerror}")
