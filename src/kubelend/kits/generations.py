"""Several files exchanged in one step: a key and its certificate are two files, and belong together.

The files lie in a hidden directory, a generation, and their names are links through one more link, which
is what is exchanged. Whoever reads sees all old ones or all new ones, and a crash at any moment leaves
one of both. (So does Kubernetes exchange the files of a mounted secret.)

    certs/tls.crt -> .current/tls.crt
    certs/tls.key -> .current/tls.key
    certs/.current -> .generation-k3v9x0q2

Plain files are made into such links, with the contents that they have, before their first exchange. The
renewal of certificates (`kubelend.apps.renewal`) calls this.
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
    """The files `names` of one directory. Whoever writes holds the lock."""

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        self._directory = directory
        self._names = names

    def obstacle(self) -> str:
        """Why the files cannot be exchanged by this process, as one sentence; empty if they can."""
        if not os.access(self._directory, os.W_OK | os.X_OK, effective_ids=True):
            return f"{self._directory} cannot be written to"
        for path in self._paths():
            if path.is_symlink() and not self._is_ours(path):
                return f"{path} is a link, so somebody else exchanges it"
            if not path.exists():
                return f"{path} is missing"
            if path.stat().st_uid != os.geteuid():
                return f"{path} belongs to another user"
        return ""

    @contextlib.contextmanager
    def lock(self) -> Iterator[bool]:
        """False if another process has it. The kernel lets go of it however this process ends."""
        with self._telling():
            descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield _is_locked_by_us(descriptor)
        finally:
            os.close(descriptor)

    def stage(self, contents: Mapping[str, bytes]) -> Path:
        """Write a generation, with the modes that the files have now; nobody sees it yet."""
        with self._telling():
            generation = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._directory))
            for path in self._paths():
                _write_like(path, generation / path.name, contents[path.name])
            generation.chmod(stat.S_IMODE(self._directory.stat().st_mode))
            keyfiles.sync_directory(self._directory)
            return generation

    def take(self, staged: Path) -> None:
        """From here on, the files are those of the staged generation; older ones are removed."""
        with self._telling():
            if not all(map(self._is_ours, self._paths())):
                self._adopt()
            self._link(self._directory / LINK, staged.name)
            self.sweep()

    def sweep(self) -> None:
        """Remove what is not in use, as far as it can be: older generations, and what a crash left."""
        current = _target(self._directory / LINK)
        for path in self._directory.glob(f"{PREFIX}*"):
            if path.is_symlink():
                with contextlib.suppress(OSError):
                    path.unlink()
            elif path.name != current:
                shutil.rmtree(path, ignore_errors=True)

    def _adopt(self) -> None:
        """Make links of plain files, one by one; what each name shows stays the same throughout."""
        present = self.stage({path.name: keyfiles.read(path) for path in self._paths()})
        self._link(self._directory / LINK, present.name)
        for path in self._paths():
            self._link(path, f"{LINK}/{path.name}")

    def _link(self, path: Path, target: str) -> None:
        # A link cannot be changed in place: another one is made, and renamed over it.
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
                f"the files in {self._directory} cannot be exchanged: {error.strerror}",
                hint="check the directory's owner and mode, and the space on its disk",
            ) from error


def _is_locked_by_us(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_like(old: Path, new: Path, content: bytes) -> None:
    """With the mode and the group of the old one: others of the group may live on it."""
    found = old.stat()
    keyfiles.write(new, content, mode=stat.S_IMODE(found.st_mode))
    with contextlib.suppress(PermissionError):
        os.chown(new, -1, found.st_gid)


def _target(path: Path) -> str:
    return str(path.readlink()) if path.is_symlink() else ""
