"""The directory of the lab: PID file, state file, certificates, kubeconfigs and logs.

`lab up` writes the PID file. The background process writes the state file; the other commands read both.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

import msgspec

from kubelend.core.errors import InvalidSettings
from kubelend.kits import files
from kubelend.pki import files as pki_files

DIRECTORY_VARIABLE = "KUBELEND_LAB_DIRECTORY"
_PID_FILE, _STATE_FILE = "supervisor.pid", "lab.json"


class LabProcess(msgspec.Struct, frozen=True):
    """A broker or agent."""

    name: str
    pid: int
    log: str
    probes: int
    """Port of the health probes."""


class LabState(msgspec.Struct, frozen=True):
    """The state of the lab. Fields are empty until their component has been started."""

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
    """The directory and the paths in it. Only its owner can read it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self.log = self.directory / "supervisor.log"
        """Log of the background process."""
        self.kubeconfig = self.directory / "kubeconfig"
        """Administrator kubeconfig with one context per cluster."""
        self.request = self.directory / "request.yaml"
        """Manifest of an example ResourceRequest."""

    def kubeconfig_of(self, cluster: str) -> Path:
        """Administrator kubeconfig of one cluster."""
        return self.directory / f"{cluster}.kubeconfig"

    def certificate(self, name: str) -> Path:
        return self.directory / "certs" / name

    def read_state(self) -> LabState | None:
        path = self.directory / _STATE_FILE
        try:
            return msgspec.json.decode(path.read_bytes(), type=LabState)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise InvalidSettings(f"{path} cannot be read: {error}") from error

    def write_state(self, state: LabState) -> None:
        content = msgspec.json.format(msgspec.json.encode(state), indent=2)
        path = self.directory / _STATE_FILE
        files.write_atomic(path, content, mode=files.PRIVATE_MODE, overwrite=True)

    def create(self) -> None:
        """Creates the directory; raises `InvalidSettings` if it contains files of others."""
        pki_files.make_private_directory(self.directory)
        if not self.exists() and any(self.directory.iterdir()):
            raise InvalidSettings(
                f"{self.directory} contains other files", hint="use another directory"
            )

    def remove(self) -> None:
        with suppress(FileNotFoundError):
            shutil.rmtree(self.directory)

    # -- processes

    def exists(self) -> bool:
        """Whether a lab has been started in this directory."""
        return (self.directory / _PID_FILE).exists()

    @property
    def pid(self) -> int:
        """PID of the background process, which is also the process group of all others; 0 without any."""
        with suppress(FileNotFoundError):
            return int((self.directory / _PID_FILE).read_text())
        return 0

    def write_pid(self, pid: int) -> None:
        """Raises `FileExistsError` if another `lab up` was faster."""
        with (self.directory / _PID_FILE).open("x") as file:
            file.write(str(pid))

    def is_running(self) -> bool:
        """Whether the background process is running, also while it starts or stops."""
        return self.pid in self.processes()

    def processes(self) -> list[int]:
        """Returns the running processes of the lab, without zombies.

        They are in one process group, with this working directory: after a crash, the number in the PID
        file may be that of a process of others.
        """
        found, group = [], self.pid
        for path in Path("/proc").glob("[0-9]*/cwd") if group else ():
            # A process may end while we look, or belong to another user.
            with suppress(OSError):
                pid = int(path.parent.name)
                if os.getpgid(pid) == group and path.readlink() == self.directory.resolve():
                    found.append(pid)
        return found


def default_directory() -> Path:
    """Returns the default directory, below XDG_STATE_HOME."""
    state = os.environ.get("XDG_STATE_HOME", "") or Path.home() / ".local" / "state"
    return Path(state) / "kubelend" / "clusters"
