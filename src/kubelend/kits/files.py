"""Files: atomic writes, atomic replacement of several files, locks, and checks of file modes.

`AtomicDirectory` replaces several files together, such as a key and its certificate. The files live in a
hidden directory, and their names are symbolic links through one more link, which is what is replaced.
Readers see either all old or all new files, also after a crash. Kubernetes replaces the files of a
mounted secret in the same way.

    certs/tls.crt -> .current/tls.crt
    certs/tls.key -> .current/tls.key
    certs/.current -> .generation-k3v9x0q2

Plain files are converted to such links, with their contents, before they are replaced for the first time.
Certificate renewal (`kubelend.apps.join`) uses this. `file_states` and the functions below it are for
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from kubelend.core.errors import InvalidInput, InvalidSettings, KubelendError, StoreFailed

# Keys of a Kubernetes TLS secret, and therefore file names where one is mounted.
TLS_CERTIFICATE = "tls.crt"
TLS_KEY = "tls.key"
CA_CERTIFICATES = "ca.crt"
CREDENTIAL_FILES = (TLS_CERTIFICATE, TLS_KEY, CA_CERTIFICATES)

PRIVATE_MODE = 0o600
PUBLIC_MODE = 0o644

CURRENT_LINK = ".current"
GENERATION_PREFIX = ".generation-"


class AtomicDirectory:
    """The files `names` of one directory, replaced together. Writers must hold the lock."""

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        self._directory = directory
        self._paths = [directory / name for name in names]

    def write_problem(self) -> str:
        """Return why this process cannot replace the files, as one sentence; empty if it can."""
        if not os.access(self._directory, os.W_OK | os.X_OK, effective_ids=True):
            return f"{self._directory} is not writable"
        for path in self._paths:
            if path.is_symlink() and not _is_managed_link(path):
                return f"{path} is a symbolic link managed by another program"
            if not path.exists():
                return f"{path} is missing"
            if path.stat().st_uid != os.geteuid():
                return f"{path} belongs to another user"
        return ""

    @contextmanager
    def try_lock(self) -> Iterator[bool]:
        """Try to lock the directory; yields False if another process holds the lock. Released when this
        process ends.
        """
        with self._mapped_errors():
            descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield _flock(descriptor)
        finally:
            os.close(descriptor)

    def stage(self, contents: Mapping[str, bytes]) -> Path:
        """Write a new generation with the modes of the current files. It is not visible until `switch_to`."""
        with self._mapped_errors():
            generation = Path(tempfile.mkdtemp(prefix=GENERATION_PREFIX, dir=self._directory))
            for path in self._paths:
                # Mode and group stay, because other processes of the group may read the file.
                old, new = path.stat(), generation / path.name
                write_atomic(new, contents[path.name], mode=stat.S_IMODE(old.st_mode))
                with contextlib.suppress(PermissionError):
                    os.chown(new, -1, old.st_gid)
            generation.chmod(stat.S_IMODE(self._directory.stat().st_mode))
            sync_directory(self._directory)
            return generation

    def switch_to(self, staged: Path) -> None:
        """Switch to the staged generation and remove older ones."""
        with self._mapped_errors():
            if not all(map(_is_managed_link, self._paths)):
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
        present = self.stage({path.name: read_file(path) for path in self._paths})
        self._replace_link(self._directory / CURRENT_LINK, present.name)
        for path in self._paths:
            self._replace_link(path, f"{CURRENT_LINK}/{path.name}")

    def _replace_link(self, path: Path, target: str) -> None:
        # A link cannot be changed in place, so a new one is renamed over it.
        temporary = self._directory / f"{GENERATION_PREFIX}{secrets.token_hex(8)}"
        temporary.symlink_to(target)
        temporary.replace(path)
        sync_directory(self._directory)

    def _mapped_errors(self) -> contextlib.AbstractContextManager[None]:
        hint = "check the directory's owner and mode, and the free disk space"
        return _mapped_errors(f"files in {self._directory} cannot be replaced", hint)


def _is_managed_link(path: Path) -> bool:
    return _link_target(path) == f"{CURRENT_LINK}/{path.name}"


def _link_target(path: Path) -> str:
    return str(path.readlink()) if path.is_symlink() else ""


def read_file(path: Path, *, hint: str = "") -> bytes:
    """Return the file's content. Missing, unreadable and empty files are errors; `hint` says what to do."""
    with _mapped_errors(f"{path} cannot be read", "check its owner and mode"):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise InvalidSettings(f"{path} is missing", hint=hint) from None
    if not content.strip():
        raise InvalidSettings(f"{path} is empty", hint=hint)
    return content


def write_atomic(path: Path, content: bytes, *, mode: int, overwrite: bool = False) -> None:
    """Write a file atomically and durably. Without `overwrite`, only if the file does not exist."""
    temporary = path.with_name(f"{_temporary_prefix(path)}{secrets.token_hex(8)}")
    with _mapped_errors(
        f"{path} cannot be written", "choose a directory that this user may write to"
    ):
        try:
            _write_through(temporary, path, content, mode=mode, overwrite=overwrite)
        except FileExistsError:
            raise InvalidSettings(f"{path} already exists", hint="move it away first") from None


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically and durably, with the mode of a new file. The caller must hold the lock."""
    # A fixed name: an interrupted write leaves one temporary file at most.
    temporary = path.with_name(f"{_temporary_prefix(path)}new")
    with _mapped_errors(f"{path} cannot be written", failure=StoreFailed):
        _write_through(temporary, path, content, mode=None, overwrite=True)


def _write_through(
    temporary: Path, path: Path, content: bytes, *, mode: int | None, overwrite: bool
) -> None:
    """Write a temporary file, in the same directory because a rename does not cross file systems."""
    created = 0o666 if mode is None else PRIVATE_MODE
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(temporary, flags, created), "wb") as file:
            file.write(content)
            file.flush()
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        # A hard link fails atomically if the file exists; a check before a rename would be a race.
        temporary.replace(path) if overwrite else path.hardlink_to(temporary)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def _temporary_prefix(path: Path) -> str:
    return f".{path.name}."


def sync_directory(directory: Path) -> None:
    """Fsync a directory, so that renames survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_file(path: Path, target: Path) -> None:
    """Rename a file over another one of its directory, durably."""
    with _mapped_errors(f"{target} cannot be replaced", "check the directory's owner"):
        path.replace(target)
        sync_directory(target.parent)


def remove_temporary_files(path: Path) -> None:
    """Remove temporary files of interrupted writes of `path`. The caller must hold the lock."""
    with _mapped_errors(f"{path.parent} cannot be changed", "check the directory's owner"):
        for leftover in path.parent.glob(f"{_temporary_prefix(path)}*"):
            leftover.unlink(missing_ok=True)


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Lock a directory exclusively, for read-modify-write of its files."""
    with _mapped_errors(f"{directory} cannot be opened", "check the path of the directory"):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not _flock(descriptor):
            raise InvalidSettings(
                f"{directory} is locked by another process", hint="retry when it is done"
            )
        yield
    finally:
        os.close(descriptor)


def _flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _mapped_errors(
    what: str, hint: str = "", failure: type[KubelendError] = InvalidSettings
) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise failure(f"{what}: {error.strerror}", hint=hint) from error


# -- file modes


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


# -- object directories

_MISSING_ERRNOS: Final = (errno.ENOENT, errno.ELOOP)  # deleted meanwhile, or a dangling link


class FileState(NamedTuple):
    """Identity and timestamps of a file; differs after every write."""

    inode: int
    size: int
    modified: int
    changed: int
    is_file: bool


def file_states(directory: Path, suffixes: tuple[str, ...]) -> dict[str, FileState]:
    """States of all files with these suffixes that are not hidden, by name."""
    with (
        _mapped_errors(f"{directory} cannot be listed", failure=StoreFailed),
        os.scandir(directory) as entries,
    ):
        return {
            entry.name: state
            for entry in entries
            if entry.name.endswith(suffixes) and not entry.name.startswith(".")
            if (state := _file_state(entry))
        }


def read_limited(path: Path, limit: int) -> bytes:
    """Read at most one byte more than the limit. Check `is_file` before: opening a pipe would block."""
    with _mapped_errors("cannot be read", failure=InvalidInput), path.open("rb") as file:
        return file.read(limit + 1)


def unlink_file(path: Path) -> None:
    """Remove a file if it exists, without fsync."""
    with _mapped_errors(f"{path} cannot be removed", failure=StoreFailed):
        path.unlink(missing_ok=True)


def _file_state(entry: os.DirEntry[str]) -> FileState | None:
    try:
        found = entry.stat()
    except OSError as error:
        if error.errno in _MISSING_ERRNOS:
            return None
        raise
    is_file = stat.S_ISREG(found.st_mode)
    return FileState(found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns, is_file)
