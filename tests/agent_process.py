"""A real agent in a process of its own, as a user starts it, for tests from outside.

with agent_process.running(broker.url, certificates.cluster("rome"), tmp_path / "rome") as rome:
    rome.put("w", cpu="2")
    rome.sees(ResourceRequest, "w", lambda found: found.status.phase == "Reserved")
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kubelend.core.errors import InvalidInput
from kubelend.sources import file_objects
from kubelend.wire.objects import Kind, Object
from waiting import PATIENCE, wait_until

SOME = "nodes: [{capacity: {cpu: 64, memory: 256Gi}}]\n"


class Running:
    """An agent that was started, with its files in a directory."""

    def __init__(self, directory: Path, process: subprocess.Popen[bytes]) -> None:
        self.directory = directory
        self.process = process

    # -- what it says

    @property
    def text(self) -> str:
        return (self.directory / "log").read_text()

    def log(self) -> list[dict[str, Any]]:
        """Its log so far, a value for each whole line."""
        whole, _, _ = self.text.rpartition("\n")
        return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]

    def logged(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.log() if line["event"] == event]

    def get(self, path: str, listener: str = "probes") -> tuple[int, str]:
        """Status and text of what it answers without TLS; 0 if nobody answers."""
        ports = {line["component"]: line["port"] for line in self.logged("Listening")}
        if listener not in ports:
            return 0, "does not listen"
        connection = http.client.HTTPConnection("127.0.0.1", ports[listener], timeout=5)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        except OSError as error:
            return 0, str(error)
        finally:
            connection.close()

    def wait_until_ready(self) -> None:
        self.wait_for(lambda: self.get("/readyz")[0] == 200)

    def wait_for(self, what: Callable[[], bool], patience: float = PATIENCE) -> None:
        """Until it holds, while the agent lives; else the test fails with its log."""

        def holds() -> bool:
            found = what()
            assert found or self.process.poll() is None, f"it has ended: {self.text}"
            return found

        wait_until(
            holds, patience, poll=0.03, explain=lambda: f"{self.get('/readyz')}: {self.text}"
        )

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal it, wait for its end, and give its exit code."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE)

    # -- the objects of its cluster, as a person sees them

    def put(self, name: str, cpu: str = "1", **spec: str) -> None:
        """Drop a ResourceRequest in."""
        path = self.manifest(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        more = "".join(f"  {field}: {value}\n" for field, value in spec.items())
        path.write_text(
            "apiVersion: rear.fluidos.eu/v1alpha1\nkind: ResourceRequest\n"
            f"metadata: {{name: {name}}}\n"
            f'spec:\n  requestedCPU: "{cpu}"\n  requestedMemory: 1Gi\n{more}'
        )

    def remove(self, name: str) -> None:
        self.manifest(name).unlink()

    def manifest(self, name: str) -> Path:
        return self.directory / "objects" / "requests" / f"default.{name}.yaml"

    def find_in(self, kind: type[Kind], name: str, namespace: str = "default") -> Kind | None:
        """None if it is not there, or being written."""
        try:
            return file_objects.parse_object(self._path(kind, name, namespace).read_bytes(), kind)
        except (FileNotFoundError, InvalidInput):
            return None

    def sees(
        self,
        kind: type[Kind],
        name: str,
        wanted: Callable[[Kind], bool] = lambda _: True,
        namespace: str = "default",
    ) -> Kind:
        """Wait until an object is as wanted."""
        found: Kind | None = None

        def look() -> bool:
            nonlocal found
            found = self.find_in(kind, name, namespace)
            return found is not None and wanted(found)

        self.wait_for(look)
        assert found is not None
        return found

    def misses(self, kind: type[Kind], name: str) -> None:
        self.wait_for(lambda: not self._path(kind, name, "default").exists())

    def _path(self, kind: type[Kind], name: str, namespace: str) -> Path:
        return self.directory / "objects" / kind.plural / f"{namespace}.{name}.yaml"


class ObjectFiles:
    """The objects of an agent in another process, as its users see and request them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def list(self, kind: type[Kind]) -> list[Kind]:
        found = (
            file_objects.parse_object(path.read_bytes(), kind)
            for path in sorted((self._directory / kind.plural).glob("[!.]*.yaml"))
        )
        with contextlib.suppress(FileNotFoundError):
            return list(found)
        return await self.list(kind)

    async def find(self, kind: type[Kind], key: str) -> Kind | None:
        return file_objects.read_object(self._directory, kind, key)

    async def apply(self, wanted: Kind) -> Kind:
        self._manifest(wanted.key).write_bytes(file_objects.dump_object(wanted))
        return wanted

    async def delete(self, kind: type[Object], key: str) -> None:
        self._manifest(key).unlink(missing_ok=True)

    def _manifest(self, key: str) -> Path:
        return self._directory / file_objects.REQUESTS_DIRECTORY / f"{key.replace('/', '.')}.yaml"


@contextlib.contextmanager
def running(
    url: str, certificates: Path, directory: Path, *flags: str, cluster: str = SOME
) -> Iterator[Running]:
    """Start it with its log and objects in `directory`; kill it at the end, if it still runs."""
    directory.mkdir(exist_ok=True)
    simulation = directory / "cluster.yaml"
    simulation.write_text(cluster)
    process = started(
        directory,
        f"--broker-url={url}",
        f"--broker-cert-path={certificates}",
        f"--simulation={simulation}",
        f"--objects-dir={directory / 'objects'}",
        *flags,
    )
    try:
        yield Running(directory, process)
    finally:
        process.kill()
        process.wait(PATIENCE)


def started(directory: Path, *flags: str) -> subprocess.Popen[bytes]:
    """The command, run in `directory`, on free ports of loopback. To its log there later ones append."""
    with (directory / "log").open("ab") as log:
        return subprocess.Popen(
            [
                *(Path(sys.executable).with_name("kubelend"), "agent", "--source=simulated"),
                *("--health-probe-bind-address=127.0.0.1:0", "--metrics-bind-address=127.0.0.1:0"),
                *("--advertisement-requeue-interval=1s", "--advertisement-damping=50ms", *flags),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={name: text for name, text in os.environ.items() if "KUBELEND" not in name},
            cwd=directory,
            process_group=0,
        )
