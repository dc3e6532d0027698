"""What is known of clusters that run in the background: a directory, and the record of them in it.

The supervisor writes the record; whoever wants to see, try or end them reads it. The supervisor holds the
directory's lock for as long as it lives, so a record without one is of a supervisor that is gone.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

import msgspec

from kubelend.core.errors import InvalidSettings
from kubelend.kits import keyfiles
from kubelend.pki import files

VARIABLE = "KUBELEND_LAB_DIRECTORY"
_RECORD, _LOCK = "lab.json", "kubelend-lab.lock"


class Process(msgspec.Struct, frozen=True):
    """One of ours, that the supervisor has started."""

    name: str
    pid: int
    log: str
    probes: int
    """The port where it says how it is."""


class Record(msgspec.Struct, frozen=True):
    """All that runs. Empty is what has not been started yet."""

    pid: int
    """The supervisor's. It is the session of all that it started, too."""
    is_ready: bool = False
    kind: tuple[str, ...] = ()
    """The clusters that Kind has made for us, and that it is to delete."""
    kubernetes: str = ""
    kubectl: str = ""
    clusters: dict[str, str] = {}
    """The kubeconfigs of their administrators."""
    broker: str = ""
    """Its address."""
    store: str = ""
    processes: tuple[Process, ...] = ()


class Home:
    """The directory, and where things are in it. Nobody else can look inside."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()

    @property
    def log(self) -> Path:
        """The supervisor's."""
        return self.directory / "supervisor.log"

    @property
    def kubeconfig(self) -> Path:
        """Of the administrator of all clusters, with a context for each."""
        return self.directory / "kubeconfig"

    def kubeconfig_of(self, cluster: str) -> Path:
        """The same for one of them."""
        return self.directory / f"{cluster}.kubeconfig"

    @property
    def request(self) -> Path:
        """A ResourceRequest to try."""
        return self.directory / "request.yaml"

    @property
    def authority(self) -> Path:
        return self.directory / "ca"

    def certificate(self, name: str) -> Path:
        return self.directory / "certs" / name

    def is_there(self) -> bool:
        """Whether somebody has started something here."""
        return (self.directory / _LOCK).exists()

    def find(self) -> Record | None:
        try:
            return msgspec.json.decode((self.directory / _RECORD).read_bytes(), type=Record)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise InvalidSettings(f"{self.directory / _RECORD} cannot be read: {error}") from error

    def keep(self, record: Record) -> None:
        content = msgspec.json.format(msgspec.json.encode(record), indent=2)
        path = self.directory / _RECORD
        keyfiles.write(path, content, mode=keyfiles.PRIVATE, overwrite=True)

    def make(self) -> None:
        """`InvalidSettings` if somebody else has something there."""
        files.make_directory(self.directory)
        found = {path.name for path in self.directory.iterdir()}
        if found and _LOCK not in found:
            raise InvalidSettings(f"{self.directory} holds other files", hint="name another one")

    def clear(self) -> None:
        """All but the lock, which is somebody's at this moment."""
        for path in self.directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != _LOCK:
                path.unlink()

    def remove(self) -> None:
        shutil.rmtree(self.directory)

    def lock(self) -> int | None:
        """The descriptor that holds it until it is closed, by all who have it; None if somebody else does."""
        path = self.directory / _LOCK
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, keyfiles.PRIVATE)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return None
            if _is_there(descriptor, path):
                return descriptor
            # It was removed with its directory while we opened it.
            os.close(descriptor)

    def is_locked(self) -> bool:
        """Whether a supervisor lives, or somebody starts or ends one at this moment."""
        if not self.is_there():
            return False
        descriptor = self.lock()
        if descriptor is not None:
            os.close(descriptor)
        return descriptor is None


def usual() -> Path:
    """Outside of the repository, where programs keep what is to survive their end."""
    state = os.environ.get("XDG_STATE_HOME", "") or Path.home() / ".local" / "state"
    return Path(state) / "kubelend" / "clusters"


def _is_there(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
