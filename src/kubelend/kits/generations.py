"""Atomic replacement of several files, such as a key and its certificate.

The files live in a hidden directory, and their names are symbolic links through one more link, which is
what is replaced. Readers see either all old or all new files, also after a crash. Kubernetes replaces the
files of a mounted secret in the same way.

    certs/tls.crt -> .current/tls.crt
    certs/tls.key -> .current/tls.key
    certs/.current -> .generation-k3v9x0q2

Plain files are converted to such links, with their contents, before they are replaced for the first time.
Certificate renewal (`kubelend.apps.renewal`) uses this.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kubelend.core.errors import InvalidSettings
from kubelend.kits import keyfiles

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
            keyfiles.sync_directory(self._directory)
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
        present = self.stage({path.name: keyfiles.read_file(path) for path in self._paths()})
        self._replace_link(self._directory / CURRENT_LINK, present.name)
        for path in self._paths():
            self._replace_link(path, f"{CURRENT_LINK}/{path.name}")

    def _replace_link(self, path: Path, target: str) -> None:
        # A link cannot be changed in place, so a new one is renamed over it.
        temporary = self._directory / f"{GENERATION_PREFIX}{secrets.token_hex(8)}"
        temporary.symlink_to(target)
        temporary.replace(path)
        keyfiles.sync_directory(self._directory)

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
    keyfiles.write_atomic(new, content, mode=stat.S_IMODE(found.st_mode))
    with contextlib.suppress(PermissionError):
        os.chown(new, -1, found.st_gid)


def _link_target(path: Path) -> str:
    return str(path.readlink()) if path.is_symlink() else ""
