"""A lab from outside: its commands, its API servers, and its processes, to kill and to start again.

All of it is done by what a person has, too: signals to processes, and objects of API servers. A process is
started again by the command, the environment and the log file of the one that was killed. API servers are
asked over HTTP: while a test waits, a kubectl for each question would take a whole core.
"""

from __future__ import annotations

import contextlib
import functools
import http
import json
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import processes
from kubelend.apps.agent_launcher import SETTINGS_VARIABLE
from kubelend.envtest.processes import LocalConnection
from kubelend.lab import hosts
from kubelend.lab.state import LabDirectory
from kubelend.transports import tls
from processes import Running
from waiting import PATIENCE, wait_until

REQUESTER, PROVIDER = hosts.AGENT_CLUSTERS

LONGEST = 4 * PATIENCE
"""Seconds in which everything recovers from a fault: caches, leases and backoffs of all programs."""

AGENT, BROKER, API_SERVER, LIQO, KUBELETS = (
    "agent",
    "broker",
    "API server",
    "Liqo",
    "virtual kubelets",
)
LIQO_PROGRAMS = ("liqo-controller-manager", "crd-replicator", "webhook")

Document = dict[str, Any]
Restart = Callable[[], None]

_CORE = "namespaces nodes secrets serviceaccounts pods events"
_GROUPS = {
    "authentication.liqo.io/v1beta1": "tenants identities resourceslices",
    "core.liqo.io/v1beta1": "foreignclusters",
    "offloading.liqo.io/v1beta1": "quotas virtualnodes shadowpods namespacemaps namespaceoffloadings",
    "apps/v1": "deployments",
    "coordination.k8s.io/v1": "leases",
    "rbac.authorization.k8s.io/v1": "clusterrolebindings rolebindings",
    "policy/v1": "poddisruptionbudgets",
    "rear.fluidos.eu/v1alpha1": "resourcerequests reservationinstructions providerinstructions",
}
VERSIONS = dict.fromkeys(_CORE.split(), "v1") | {
    kind: version for version, kinds in _GROUPS.items() for kind in kinds.split()
}


def path_of(kind: str, namespace: str = "", name: str = "") -> str:
    version = VERSIONS[kind]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    scope = f"/namespaces/{namespace}" if namespace else ""
    return f"{root}{scope}/{kind}" + (f"/{name}" if name else "")


class Api:
    """The API server of one cluster, as its administrator. It may be down."""

    def __init__(self, directory: Path, cluster: str) -> None:
        entry = yaml.safe_load((directory / f"{cluster}.kubeconfig").read_text())
        port = int(entry["clusters"][0]["cluster"]["server"].rpartition(":")[2])
        context = tls.client_context(directory / "lab" / cluster / "admin")
        self._connection = LocalConnection(port, context)

    def call(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        """Status 0 if there is no server."""
        content = None if body is None else json.dumps(body).encode()
        return self._connection.request(method, path, content)

    def close(self) -> None:
        self._connection.close()

    @property
    def is_ready(self) -> bool:
        return self.call("GET", "/readyz")[0] == http.HTTPStatus.OK

    def get(self, path: str) -> Document:
        """The object; empty if there is none, or no server."""
        status, body = self.call("GET", path)
        found: Document = json.loads(body) if status == http.HTTPStatus.OK else {}
        return found

    def list(self, kind: str, namespace: str = "", labels: str = "") -> list[Document]:
        """`OSError` if there is no server: an empty list would mean that nothing is left."""
        path = path_of(kind, namespace) + (f"?labelSelector={labels}" if labels else "")
        found: list[Document] = json.loads(self.change("GET", path))["items"]
        return found

    def create(self, kind: str, document: Document) -> None:
        namespace = document["metadata"].get("namespace", "")
        typed = {"apiVersion": VERSIONS[kind], **document}
        self.change("POST", path_of(kind, namespace), typed)

    def change(self, method: str, path: str, body: object = None) -> bytes:
        """`OSError` unless the server does it."""
        status, found = self.call(method, path, body)
        if not http.HTTPStatus.OK <= status < http.HTTPStatus.MULTIPLE_CHOICES:
            raise OSError(f"{method} {path}: {status} {found.decode(errors='replace')[:400]}")
        return found


class Killed(NamedTuple):
    """What is needed to start a process again."""

    command: list[str]
    environment: dict[str, str]
    log: Path

    @classmethod
    def read(cls, pid: int) -> Killed:
        process = Path(f"/proc/{pid}")
        command = process.joinpath("cmdline").read_bytes().decode().rstrip("\0").split("\0")
        variables = process.joinpath("environ").read_bytes().decode().split("\0")
        environment = dict(each.split("=", 1) for each in variables if "=" in each)
        return cls(command, environment, (process / "fd" / "2").readlink())


class Lab:
    """The lab of one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._started: list[subprocess.Popen[bytes]] = []

    # -- commands

    @property
    def record(self) -> Document:
        found: Document = json.loads((self.directory / "lab.json").read_text())
        return found

    def start(self, command: str, *flags: str) -> subprocess.Popen[str]:
        arguments = ("dev", "lab", command, f"--directory={self.directory}", *flags)
        return processes.kubelend(*arguments, temporary=self.directory.parent)

    def lab(self, command: str, *flags: str) -> tuple[int, str, str]:
        """Exit code, output and errors."""
        return processes.finished(self.start(command, *flags), LONGEST)

    def admin(self, *arguments: str) -> str:
        """Runs a command as administrator of the broker."""
        return self.run_as("admin", *arguments)

    def run_as(self, name: str, *arguments: str) -> str:
        """Runs a command with the certificate of the administrator, or of a cluster."""
        code, out, err = self.run_command(name, *arguments)
        assert code == 0, err
        return out

    def run_command(self, name: str, *arguments: str) -> tuple[int, str, str]:
        """Exit code, output and errors."""
        access = (
            f"--broker-url={self.record['broker']}",
            f"--cert-path={self.directory}/certs/{name}",
        )
        return self.run(*arguments, *access)

    def rejoin(self, cluster: str) -> None:
        """As a cluster whose certificate was revoked has to: by a token and an approval."""
        made = json.loads(self.admin("create", "token", f"--name={cluster}", "--output=json"))
        out = self.directory / "certs" / f"{cluster}.new"
        flags = (f"--token={made['token']}", f"--ca-hash={made['caHash']}", f"--out={out}")
        enrolment = ("join", f"https://localhost:{made['enrolPort']}", f"--cluster-id={cluster}")
        joining = processes.kubelend(*enrolment, *flags, temporary=self.directory.parent)
        wait_until(lambda: self._is_waiting(cluster), LONGEST, poll=0.5)
        self.admin("approve", cluster)
        code, _, err = processes.finished(joining, LONGEST)
        assert code == 0, err
        for path in out.iterdir():
            shutil.copy(path, self.directory / "certs" / cluster / path.name)

    def _is_waiting(self, cluster: str) -> bool:
        """Whether somebody has asked to join as this cluster, and waits for an approval."""
        members = json.loads(self.admin("get", "members", "--output=json"))["items"]
        return any(one["name"] == cluster and one.get("pendingKey") for one in members)

    def run(self, *arguments: str) -> tuple[int, str, str]:
        started = processes.kubelend(*arguments, temporary=self.directory.parent)
        return processes.finished(started, LONGEST)

    # -- API servers

    @functools.cached_property
    def apis(self) -> dict[str, Api]:
        """Of the agents' clusters."""
        names = self.record["clusters"]
        return {name: Api(self.directory, name) for name in names if name != hosts.BROKER_CLUSTER}

    def kubectl(self, cluster: str, *arguments: str) -> str:
        access = (f"--kubeconfig={self.directory}/kubeconfig", f"--context={cluster}")
        return processes.output(self.record["kubectl"], *access, *arguments)

    # -- processes

    @property
    def supervisor(self) -> int:
        return LabDirectory(self.directory).pid

    def is_gone(self) -> bool:
        return not self.directory.exists() and not self.runs()

    def runs(self) -> list[Running]:
        """What is left of it, the commands apart."""
        found = processes.naming(self.directory)
        return [one for one in found if "kubelend dev lab " not in one.command]

    def stop(self) -> None:
        """Ends what was started again; `down` ends the rest."""
        for api in self.apis.values():
            api.close()
        for process in self._started:
            process.kill()
            process.wait()

    def find(self, part: str, cluster: str = "") -> list[int]:
        """The processes of a part, such as the agent of a cluster; of Liqo there are several."""
        return [
            int(path.name)
            for path in Path("/proc").glob("[0-9]*")
            if self._is_part(path, part, cluster)
        ]

    def _is_part(self, process: Path, part: str, cluster: str) -> bool:
        try:
            command = process.joinpath("cmdline").read_bytes().decode(errors="replace").split("\0")
            variables = process.joinpath("environ").read_bytes().decode(errors="replace")
        except OSError:  # it has ended
            return False
        program, own = Path(command[0]).name, self.directory / "lab" / cluster
        match part:
            case "agent":
                is_agent = any(one.endswith("agent_process") for one in command)
                return is_agent and f'{self.directory}/certs/{cluster}"' in variables
            case "broker":
                return "broker" in command and f"--ca-path={self.directory}/ca" in command
            case "API server":
                flags = {f"--etcd-prefix=/{cluster}", f"--cert-dir={own}/unused"}
                return flags <= set(command)
            case "Liqo":
                return program in LIQO_PROGRAMS and f"{own}/pods/" in variables
        return program == "virtual-kubelet" and f"{own}/pods/" in variables

    def kill(self, part: str, cluster: str = "") -> Restart:
        """Kills a part with SIGKILL; returns what starts it again.

        Liqo's programs are started again by the kubelet, a second later.
        """
        found = self.find(part, cluster)
        assert found, f"no {part} of {cluster} to kill"
        killed = [Killed.read(pid) for pid in found]
        for pid in found:
            _kill(pid)
        if part in (LIQO, KUBELETS):
            return lambda: wait_until(lambda: len(self.find(part, cluster)) >= len(found), LONGEST)
        return lambda: self._start(part, cluster, killed[0])

    @contextlib.contextmanager
    def suspended(self, part: str, cluster: str) -> Iterator[None]:
        """It does nothing, though its connections are open."""
        [pid] = self.find(part, cluster)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def restart(self, part: str, cluster: str = "") -> None:
        self.kill(part, cluster)()

    def restart_agent(self, cluster: str, **settings: object) -> None:
        """Starts an agent again with other settings, by their names in the code."""
        [pid] = self.find(AGENT, cluster)
        killed = Killed.read(pid)
        self.kill(AGENT, cluster)
        launch = json.loads(killed.environment[SETTINGS_VARIABLE])
        launch["settings"] |= settings
        changed = killed.environment | {SETTINGS_VARIABLE: json.dumps(launch)}
        self._start(AGENT, cluster, killed._replace(environment=changed))

    def restart_with_skew(self, seconds: int, part: str, cluster: str = "") -> None:
        """Starts an agent, or the broker, again with a wrong clock."""
        [pid] = self.find(part, cluster)
        killed = Killed.read(pid)
        self.kill(part, cluster)
        at = killed.command.index("-m") if "-m" in killed.command else killed.command.index("-c")
        module = killed.command[at + 1].rpartition("run ")[2] if at else ""
        code = _SKEWED.format(seconds=seconds, module=module)
        command = [*killed.command[:at], "-c", code, *killed.command[at + 2 :]]
        self._start(part, cluster, killed._replace(command=command))

    def _start(self, part: str, cluster: str, killed: Killed) -> None:
        command = killed.command
        if part == BROKER:
            command = [*command, f"--http-port={self.record['broker'].rpartition(':')[2]}"]
        namespace = f"--net=/proc/{self.supervisor}/ns/net"
        with killed.log.open("ab") as stream:
            self._started.append(
                subprocess.Popen(
                    ["nsenter", namespace, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stream,
                    env=killed.environment,
                    cwd=self.directory,
                )
            )
        if part == API_SERVER:
            wait_until(lambda: self.apis[cluster].is_ready, LONGEST)


_SKEWED = """\
import datetime, runpy
from kubelend.kits import clock
real = clock.utc_now
clock.utc_now = lambda: real() + datetime.timedelta(seconds={seconds})
runpy.run_module("{module}", run_name="__main__", alter_sys=True)
# run {module}"""
"""Runs a module of ours with another clock. The certificates of TLS are checked by the real one."""


def _kill(pid: int) -> None:
    """Kills a process, and waits until all of its threads have ended: only then its ports are free."""
    process = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(process, signal.SIGKILL)
        ended, _, _ = select.select([process], [], [], PATIENCE)
        assert ended, f"process {pid} does not end"
    finally:
        os.close(process)
