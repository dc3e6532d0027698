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

LINK = ".current"
PREFIX = ".generation-"


class Generations:
    """The files `names` of one directory, replaced together. Writers must hold the lock."""

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        self._directory = directory
        self._names = names

    def obstacle(self) -> str:
        """Return why this process cannot replace the files, as one sentence; empty if it can."""
        if not os.access(self._directory, os.W_OK | os.X_OK, effective_ids=True):
            return f"{self._directory} is not writable"
        for path in self._paths():
            if path.is_symlink() and not self._is_ours(path):
                return f"{path} is a symbolic link managed by another program"
            if not path.exists():
                return f"{path} is missing"
            if path.stat().st_uid != os.geteuid():
                return f"{path} belongs to another user"
        return ""

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        """Try to lock the directory; yields False if another process holds the lock. Released when this
        process ends.
        """
        with self._telling():
            descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield _is_locked_by_us(descriptor)
        finally:
            os.close(descriptor)

    def stage(self, contents: Mapping[str, bytes]) -> Path:
        """Write a new generation with the modes of the current files. It is not visible until `switch_to`."""
        with self._telling():
            generation = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._directory))
            for path in self._paths():
                _write_like(path, generation / path.name, contents[path.name])
            generation.chmod(stat.S_IMODE(self._directory.stat().st_mode))
            keyfiles.sync_directory(self._directory)
            return generation

    def take(self, staged: Path) -> None:
        """Switch to the staged generation and remove older ones."""
        with self._telling():
            if not all(map(self._is_ours, self._paths())):
                self._adopt()
            self._link(self._directory / LINK, staged.name)
            self.sweep()

    def sweep(self) -> None:
        """Remove unused generations and leftovers of a crash, as far as possible."""
        current = _target(self._directory / LINK)
        for path in self._directory.glob(f"{PREFIX}*"):
            if path.is_symlink():
                with contextlib.suppress(OSError):
                    path.unlink()
            elif path.name != current:
                shutil.rmtree(path, ignore_errors=True)

    def _adopt(self) -> None:
        """Convert plain files to links, one by one, without changing the content behind any name."""
        present = self.stage({path.name: keyfiles.read(path) for path in self._paths()})
        self._link(self._directory / LINK, present.name)
        for path in self._paths():
            self._link(path, f"{LINK}/{path.name}")

    def _link(self, path: Path, target: str) -> None:
        # A link cannot be changed in place, so a new one is renamed over it.
        temporary = self._directory / f"{PREFIX}{secrets.token_hex(8)}"
        temporary.symlink_to(target)
        temporary.replace(path)
        keyfiles.sync_directory(self._directory)

    def _paths(self) -> list[Path]:
        return [self._directory / name for name in self._names]

    def _is_ours(self, path: Path) -> bool:
        return _target(path) == f"{LINK}/{path.name}"

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InvalidSettings(
                f"files in {self._directory} cannot be replaced: {error.strerror}",
                hint="check the directory's owner and mode, and the free disk space",
            ) from error


def _is_locked_by_us(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_like(old: Path, new: Path, content: bytes) -> None:
    """Write a file with the mode and group of the old one, because other processes of the group may read
    it.
    """
    found = old.stat()
    keyfiles.write(new, content, mode=stat.S_IMODE(found.st_mode))
    with contextlib.suppress(PermissionError):
        os.chown(new, -1, found.st_gid)


def _target(path: Path) -> str:
    return str(path.readlink()) if path.is_symlink() else ""
