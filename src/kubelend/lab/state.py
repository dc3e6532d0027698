"""The state directory of the lab, and the progress messages of its supervisor.

The supervisor writes the state file; `kubelend dev lab` reads it. The supervisor holds a lock in
the directory while it runs, so a state file without a lock is from a supervisor that has crashed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

import msgspec

from kubelend.core.errors import InvalidSettings
from kubelend.kits import files
from kubelend.pki import files as pki_files

DIRECTORY_VARIABLE = "KUBELEND_LAB_DIRECTORY"
_STATE_FILE, _LOCK_FILE = "lab.json", "kubelend-lab.lock"


class LabProcess(msgspec.Struct, frozen=True):
    """A process that the supervisor has started."""

    name: str
    pid: int
    log: str
    probes: int
    """Port of the health probes."""


class LabState(msgspec.Struct, frozen=True):
    """The state of the lab. Fields are empty until their component has been started."""

    pid: int
    """PID of the supervisor, which is also the session ID of all its child processes."""
    is_ready: bool = False
    kind: tuple[str, ...] = ()
    """Clusters created by kind, to be deleted when the lab stops."""
    kubernetes: str = ""
    kubectl: str = ""
    clusters: dict[str, str] = {}
    """Administrator kubeconfigs by cluster."""
    broker: str = ""
    """URL of the broker."""
    store: str = ""
    processes: tuple[LabProcess, ...] = ()


class LabDirectory:
    """The state directory and the paths in it. Only its owner can read it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()

    @property
    def log(self) -> Path:
        """Log of the supervisor."""
        return self.directory / "supervisor.log"

    @property
    def kubeconfig(self) -> Path:
        """Administrator kubeconfig with one context per cluster."""
        return self.directory / "kubeconfig"

    def kubeconfig_of(self, cluster: str) -> Path:
        """Administrator kubeconfig of one cluster."""
        return self.directory / f"{cluster}.kubeconfig"

    @property
    def request(self) -> Path:
        """Manifest of an example ResourceRequest."""
        return self.directory / "request.yaml"

    @property
    def authority(self) -> Path:
        return self.directory / "ca"

    def certificate(self, name: str) -> Path:
        return self.directory / "certs" / name

    def exists(self) -> bool:
        """Whether a lab has been started in this directory."""
        return (self.directory / _LOCK_FILE).exists()

    def read_state(self) -> LabState | None:
        try:
            return msgspec.json.decode((self.directory / _STATE_FILE).read_bytes(), type=LabState)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise InvalidSettings(
                f"{self.directory / _STATE_FILE} cannot be read: {error}"
            ) from error

    def write_state(self, state: LabState) -> None:
        content = msgspec.json.format(msgspec.json.encode(state), indent=2)
        path = self.directory / _STATE_FILE
        files.write_atomic(path, content, mode=files.PRIVATE_MODE, overwrite=True)

    def create(self) -> None:
        """Creates the directory; raises `InvalidSettings` if it contains files of others."""
        pki_files.make_private_directory(self.directory)
        found = {path.name for path in self.directory.iterdir()}
        if found and _LOCK_FILE not in found:
            raise InvalidSettings(
                f"{self.directory} contains other files", hint="use another directory"
            )

    def clear(self) -> None:
        """Removes everything but the lock file, which the caller holds."""
        for path in self.directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != _LOCK_FILE:
                path.unlink()

    def remove(self) -> None:
        shutil.rmtree(self.directory)

    def lock(self) -> int | None:
        """Acquires the lock; returns its descriptor, or None if it is held by another process.

        The lock is held until all processes that have the descriptor have closed it.
        """
        path = self.directory / _LOCK_FILE
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, files.PRIVATE_MODE)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return None
            if _is_same_file(descriptor, path):
                return descriptor
            # The lock file was removed with its directory while we opened it.
            os.close(descriptor)

    def is_locked(self) -> bool:
        """Whether a supervisor is running, or one is being started or stopped."""
        if not self.exists():
            return False
        descriptor = self.lock()
        if descriptor is not None:
            os.close(descriptor)
        return descriptor is None


def default_directory() -> Path:
    """Returns the default directory, below XDG_STATE_HOME."""
    state = os.environ.get("XDG_STATE_HOME", "") or Path.home() / ".local" / "state"
    return Path(state) / "kubelend" / "clusters"


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


class StepStarted(msgspec.Struct, frozen=True, tag="begun"):
    """A step has started."""

    title: str


class StepFinished(msgspec.Struct, frozen=True, tag="done"):
    """A step has finished."""

    title: str
    seconds: float
    lines: tuple[str, ...] = ()


class StartFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The start failed; all processes are stopped."""

    code: str
    message: str


class LabReady(msgspec.Struct, frozen=True, tag="ready"):
    """Everything is running. The last message."""


Message = StepStarted | StepFinished | StartFailed | LabReady


def encode_message(message: Message) -> bytes:
    return msgspec.json.encode(message) + b"\n"


def decode_message(line: bytes) -> Message:
    return _DECODER.decode(line)


_DECODER: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)
