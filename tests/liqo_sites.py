"""Clusters with Liqo from outside: what their API servers hold, and processes to kill and start again.

    with liqo_sites.started(directory, kube_assets) as site:
        lease = site.borrow()
        site.kill(AGENT, REQUESTER)()         kills it; the call starts it again
        lease.wait_ready()
        lease.release()
        site.wait_clean()

All of it is done by what a person has, too: signals to processes, and objects of API servers. A process is
started again by the command, the environment and the log file of the one that was killed.
"""

from __future__ import annotations

import contextlib
import http
import json
import os
import secrets
import select
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import processes
from kubelend.apps.agent_launcher import SETTINGS_VARIABLE
from kubelend.envtest.assets import Assets
from kubelend.envtest.processes import HttpResponse, call_http
from kubelend.lab import hosts
from kubelend.lab.state import LabDirectory
from kubelend.peerings import liqo_objects
from kubelend.peerings.liqo_objects import REMOTE_LABEL, RESERVATION_LABEL
from kubelend.transports import tls
from waiting import PATIENCE, wait_until

REQUESTER, PROVIDER = hosts.AGENT_CLUSTERS
OTHER = hosts.THIRD_AGENT_CLUSTER

LONGEST = 4 * PATIENCE
"""Seconds in which everything recovers from a fault: caches, leases and backoffs of all programs."""
POLL = 0.02

CPU, MEMORY = "500m", "256Mi"
GRANTED = {"cpu": CPU, "memory": MEMORY, "ephemeral-storage": "0", "pods": "110"}

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

_LIQO_GROUPS = {
    "authentication.liqo.io/v1beta1": "tenants identities resourceslices",
    "core.liqo.io/v1beta1": "foreignclusters",
    "offloading.liqo.io/v1beta1": "quotas virtualnodes shadowpods namespacemaps namespaceoffloadings",
}
_OWN = "rear.fluidos.eu/v1alpha1"
LEFTOVERS = (
    *(f"/api/v1/{kind}" for kind in ("namespaces", "nodes", "secrets", "serviceaccounts")),
    "/apis/apps/v1/deployments",
    "/apis/coordination.k8s.io/v1/leases",
    *(
        f"/apis/rbac.authorization.k8s.io/v1/{kind}"
        for kind in ("clusterrolebindings", "rolebindings")
    ),
    *(f"/apis/{group}/{kind}" for group, kinds in _LIQO_GROUPS.items() for kind in kinds.split()),
    f"/apis/{_OWN}/resourcerequests",
)
"""Kinds of which a cluster has the same objects afterwards as before."""


class Api:
    """The API server of one cluster, as its administrator. It may be down."""

    def __init__(self, directory: Path, cluster: str) -> None:
        entry = yaml.safe_load((directory / f"{cluster}.kubeconfig").read_text())
        self._port = int(entry["clusters"][0]["cluster"]["server"].rpartition(":")[2])
        self._tls = tls.client_context(directory / "lab" / cluster / "admin")

    def call(self, method: str, path: str, body: object = None) -> HttpResponse:
        content = None if body is None else json.dumps(body).encode()
        return call_http(self._port, path, method=method, body=content, tls=self._tls)

    @property
    def is_ready(self) -> bool:
        return self.call("GET", "/readyz").status == http.HTTPStatus.OK

    def get(self, path: str) -> Document:
        """The object; empty if there is none, or no server."""
        answer = self.call("GET", path)
        found: Document = json.loads(answer.body) if answer.status == http.HTTPStatus.OK else {}
        return found

    def list(self, path: str) -> list[Document]:
        """`OSError` if there is no server: an empty list would mean that nothing is left."""
        answer = self.call("GET", path)
        if answer.status != http.HTTPStatus.OK:
            raise OSError(f"{path}: {answer.status} {answer.body.decode(errors='replace')[:200]}")
        found: list[Document] = json.loads(answer.body)["items"]
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


class Site:
    """The clusters of one lab."""

    def __init__(self, directory: Path, assets: Assets) -> None:
        self.directory = directory
        self.assets = assets
        self.apis: dict[str, Api] = {}
        self._before: dict[str, set[str]] = {}
        self._started: list[subprocess.Popen[bytes]] = []

    # -- the lab

    def lab(self, command: str, *flags: str) -> tuple[int, str, str]:
        return self._run("dev", "lab", command, f"--directory={self.directory}", *flags)

    def admin(self, *arguments: str) -> str:
        """Runs a command as administrator of the broker."""
        record = self.record
        access = (f"--broker-url={record['broker']}", f"--cert-path={self.directory}/certs/admin")
        code, out, err = self._run(*arguments, *access)
        assert code == 0, err
        return out

    def check_audit(self) -> None:
        """The broker's ledger and its log of events agree, and nothing is reserved."""
        code, out, err = self._run("audit", "check", f"--store={self.record['store']}")
        assert code == 0, out + err

    @property
    def record(self) -> Document:
        found: Document = json.loads((self.directory / "lab.json").read_text())
        return found

    def _run(self, *arguments: str) -> tuple[int, str, str]:
        started = processes.kubelend(*arguments, temporary=self.directory.parent)
        return processes.finished(started, LONGEST)

    def note_objects(self) -> None:
        """Notes what exists, to find out later what is left."""
        self.apis = {
            name: Api(self.directory, name)
            for name in self.record["clusters"]
            if name != hosts.BROKER_CLUSTER
        }
        self._before = self._objects()

    def stop(self) -> None:
        """Ends what was started again, and then all else."""
        for process in self._started:
            process.kill()
            process.wait()

    # -- objects

    def kubectl(self, cluster: str, *arguments: str, text: str | None = None) -> str:
        kubeconfig = self.directory / f"{cluster}.kubeconfig"
        done = subprocess.run(
            [self.assets.kubectl, f"--kubeconfig={kubeconfig}", *arguments],
            input=text,
            capture_output=True,
            text=True,
            timeout=LONGEST,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def leftovers(self) -> list[str]:
        """Objects that were not there before, and finalizers that hold finished instructions."""
        try:
            found = self._objects()
            held = self._held_instructions()
        except OSError as error:
            return [str(error)]
        new = (
            f"{cluster}: {name}"
            for cluster in found
            for name in found[cluster] - self._before[cluster]
        )
        return [*sorted(new), *held]

    def _objects(self) -> dict[str, set[str]]:
        return {
            cluster: {
                f"{path.rpartition('/')[2]} {_key(one)}"
                for path in LEFTOVERS
                for one in api.list(path)
            }
            for cluster, api in self.apis.items()
        }

    def _held_instructions(self) -> list[str]:
        return [
            f"{cluster}: finalizer of {kind} {_key(one)}"
            for cluster, api in self.apis.items()
            for kind in ("reservationinstructions", "providerinstructions")
            for one in api.list(f"/apis/{_OWN}/{kind}")
            if one["metadata"].get("finalizers")
        ]

    def check_clean(self) -> None:
        """Waits until nothing is left. If something is, the next test does not count it as its own."""
        for cluster in self.apis:
            # Those of a test that has failed.
            self.kubectl(cluster, "delete", "resourcerequests", "--all", "--wait=false")
        try:
            self.wait_clean()
        finally:
            self.note_objects()

    def wait_clean(self) -> None:
        """Nothing is left in any cluster, nor at the broker."""
        wait_until(lambda: not self.leftovers(), LONGEST, poll=0.5, explain=self.leftovers)
        wait_until(lambda: not self.reserved(), LONGEST, poll=0.5, explain=self.reserved)
        self.check_audit()

    def reserved(self) -> list[str]:
        """Reservations that have not ended."""
        found = json.loads(self.admin("get", "reservations", "--output=json"))
        live = ("Pending", "Reserved", "Active")
        items = found["items"] if isinstance(found, dict) else found
        return [one["id"] for one in items if one["status"]["phase"] in live]

    # -- borrowing

    def borrow(
        self, cluster: str = REQUESTER, cpu: str = CPU, memory: str = MEMORY, provider: str = ""
    ) -> Borrowed:
        """Creates a ResourceRequest, and does not wait. Without a provider the broker chooses one."""
        name = f"request-{secrets.token_hex(3)}"
        target = {"targetClusterID": provider} if provider else {}
        request = {
            "apiVersion": _OWN,
            "kind": "ResourceRequest",
            "metadata": {"name": name, "namespace": "default"},
            "spec": {"requestedCPU": cpu, "requestedMemory": memory, "duration": "1h", **target},
        }
        self.kubectl(cluster, "create", "--filename=-", text=json.dumps(request))
        return Borrowed(self, name, cluster, GRANTED | {"cpu": cpu, "memory": memory})

    def logs(self) -> str:
        """What the agents and the broker complained about last."""
        lines = []
        for path in sorted(self.directory.glob("*.log")):
            text = path.read_text(errors="replace").splitlines()
            complaints = [
                one for one in text if '"warning"' in one or '"error"' in one or "Error" in one
            ]
            lines += [f"{path.name}: {one}" for one in complaints[-4:]]
        return "\n".join(lines)

    # -- processes

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
        namespace = f"--net=/proc/{LabDirectory(self.directory).pid}/ns/net"
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


def _key(found: Document) -> str:
    metadata = found["metadata"]
    return f"{metadata.get('namespace', '')}/{metadata['name']}"


class Borrowed:
    """One ResourceRequest, and all that follows from it in both clusters."""

    def __init__(self, site: Site, name: str, cluster: str, granted: Mapping[str, str]) -> None:
        self._site = site
        self.name = name
        self.cluster = cluster
        self.granted = dict(granted)
        self._reservation = ""

    # -- what the API servers say

    @property
    def request(self) -> Document:
        path = f"/apis/{_OWN}/namespaces/default/resourcerequests/{self.name}"
        return self._site.apis[self.cluster].get(path)

    @property
    def phase(self) -> str:
        return str(self.request.get("status", {}).get("phase", ""))

    @property
    def reservation(self) -> str:
        """Its ID at the broker; empty until it is reserved. It never changes."""
        if not self._reservation:
            self._reservation = self.request.get("status", {}).get("reservationName", "")
        return self._reservation

    @property
    def provider(self) -> str:
        return str(self.request.get("status", {}).get("targetClusterID", "")) or PROVIDER

    def own(self, kind: str, name: str = "") -> Document:
        """An object of the requester's cluster, in the namespace for the provider."""
        return self._find(self.cluster, kind, self.provider, name)

    def remote(self, kind: str, name: str = "") -> Document:
        """An object of the provider's cluster, in the namespace for the requester."""
        return self._find(self.provider, kind, self.cluster, name)

    def _find(self, cluster: str, kind: str, other: str, name: str) -> Document:
        """By default the object of the reservation. One that replaces another has a number in its name."""
        api, path = (
            self._site.apis[cluster],
            _collection(kind, liqo_objects.tenant_namespace(other)),
        )
        if name:
            return api.get(f"{path}/{name}")
        own = self._named(api.get(path))
        return max(own, key=lambda one: "deletionTimestamp" not in one["metadata"], default={})

    def _named(self, found: Document) -> list[Document]:
        items: list[Document] = found.get("items", [])
        return [one for one in items if one["metadata"]["name"].startswith(self.reservation)]

    @property
    def node(self) -> Document:
        """The newest virtual node with the present provider; empty if there is none."""
        selector = f"labelSelector={RESERVATION_LABEL}={self.reservation}"
        found = self._site.apis[self.cluster].get(f"/api/v1/nodes?{selector}").get("items", [])
        own = [one for one in found if one["metadata"]["labels"][REMOTE_LABEL] == self.provider]
        return max(own, key=lambda one: one["metadata"]["creationTimestamp"], default={})

    def quotas(self) -> list[Document]:
        namespace = liqo_objects.tenant_namespace(self.cluster)
        return self._named(self._site.apis[self.provider].get(_collection("quotas", namespace)))

    def conditions(self) -> dict[str, str]:
        found = self.request.get("status", {}).get("conditions", [])
        return {one["type"]: f"{one['status']} {one['reason']}: {one['message']}" for one in found}

    # -- pods

    @contextlib.contextmanager
    def pod(self) -> Iterator[None]:
        """Runs a pod on the node, in a namespace of its own, which is deleted at the end."""
        self._site.kubectl(self.cluster, "create", "namespace", self.name)
        for document in (_OFFLOADING, _pod(self.reservation)):
            self._create_soon(json.dumps(document))
        wait_until(lambda: self.remote_pods() == ["Running"], LONGEST, explain=self.explain)
        yield
        self._site.kubectl(self.cluster, "delete", "namespace", self.name, "--wait=false")

    def _create_soon(self, text: str) -> None:
        """Creates an object when the namespace has the service account that a pod needs."""

        def create() -> bool:
            try:
                command = ("create", f"--namespace={self.name}", "--filename=-")
                self._site.kubectl(self.cluster, *command, text=text)
            except AssertionError:
                return False
            return True

        wait_until(create, LONGEST, poll=0.2)

    def remote_pods(self) -> list[str]:
        """The phases of its pods in the provider's cluster."""
        path = f"/api/v1/namespaces/{self.name}-{self.cluster}/pods"
        found = self._site.apis[self.provider].list(path)
        return [one["status"]["phase"] for one in found]

    # -- what is promised

    def is_ready(self) -> bool:
        return self.phase == "Active" and self.conditions().get("Ready", "").startswith("True")

    def has_exactly_what_is_reserved(self) -> bool:
        offered = self.node.get("status", {}).get("allocatable", {})
        enforced = [one["spec"]["resources"] for one in self.quotas()]
        return offered == self.granted and enforced == [self.granted]

    def has_more_than_reserved(self) -> list[str]:
        """Amounts that exceed the reservation, now."""
        most = liqo_objects.parse_amounts(self.granted)
        amounts = [("Node", self.node.get("status", {}).get("allocatable"))]
        amounts += [("Quota", one["spec"]["resources"]) for one in self.quotas()]
        return [
            f"{kind}: {found}"
            for kind, found in amounts
            if found and not liqo_objects.parse_amounts(found).fits_in(most)
        ]

    def wait_ready(self) -> None:
        wait_until(self.is_ready, LONGEST, poll=0.1, explain=self.explain)
        wait_until(self.has_exactly_what_is_reserved, LONGEST, poll=0.1, explain=self.explain)

    def wait_phase(self, phase: str) -> None:
        wait_until(lambda: self.phase == phase, LONGEST, poll=0.1, explain=self.explain)

    def release(self) -> None:
        """Deletes the request, and does not wait."""
        self._site.kubectl(self.cluster, "delete", "resourcerequest", self.name, "--wait=false")

    def wait_released(self) -> None:
        """The request is gone, and its node."""

        def is_gone() -> bool:
            api = self._site.apis[self.cluster]
            return api.is_ready and not self.request and not self.node

        wait_until(is_gone, LONGEST, poll=0.1, explain=self.explain)

    def explain(self) -> str:
        texts = {
            "request": (self.phase, self.conditions()),
            "slice": _answer(self.own("resourceslices")),
            "slice of the provider": _answer(self.remote("resourceslices")),
            "node": self.node.get("status", {}).get("allocatable"),
            "quotas": [one["spec"] for one in self.quotas()],
            "log": self._site.logs(),
        }
        return "\n".join(f"{name}: {text}" for name, text in texts.items())


_OFFLOADING = {
    "apiVersion": "offloading.liqo.io/v1beta1",
    "kind": "NamespaceOffloading",
    "metadata": {"name": "offloading"},
    "spec": {
        "namespaceMappingStrategy": "DefaultName",
        "podOffloadingStrategy": "LocalAndRemote",
        "clusterSelector": {"nodeSelectorTerms": []},
    },
}


def _pod(reservation: str) -> Document:
    requests = {"cpu": "300m", "memory": "64Mi"}
    container = {"name": "main", "image": "none", "resources": {"requests": requests}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "borrower"},
        "spec": {"nodeSelector": {RESERVATION_LABEL: reservation}, "containers": [container]},
    }


def _answer(found: Document) -> object:
    status = found.get("status", {})
    return found.get("spec", {}).get("resources"), status.get("resources"), status.get("conditions")


def _collection(kind: str, namespace: str) -> str:
    for group, kinds in _LIQO_GROUPS.items():
        if kind in kinds.split():
            return f"/apis/{group}/namespaces/{namespace}/{kind}"
    return f"/api/v1/namespaces/{namespace}/{kind}"


def condition(found: Document, kind: str) -> str:
    """The status of a condition; empty if there is none."""
    conditions = found.get("status", {}).get("conditions") or []
    return next((str(one["status"]) for one in conditions if one["type"] == kind), "")


# -- the steps of a reservation

Step = Callable[[Borrowed], object]

CONNECTING: dict[str, Step] = {
    "reserved": lambda one: one.reservation,
    "nonce": lambda one: one.remote("secrets", "liqo-nonce").get("data"),
    "signed nonce": lambda one: (
        one.own("secrets", "liqo-signed-nonce").get("data", {}).get("signedNonce")
    ),
    "tenant": lambda one: one.remote("tenants", one.cluster).get("status", {}).get("authParams"),
    "identity": lambda one: one.own("identities", f"controlplane-{one.provider}"),
    "slice": lambda one: one.own("resourceslices"),
    "replicated": lambda one: one.remote("resourceslices"),
    "granted": lambda one: condition(one.remote("resourceslices"), "Resources"),
    "quota": lambda one: one.quotas(),
    "virtual node": lambda one: one.own("virtualnodes"),
    "node": lambda one: one.node,
    "node ready": lambda one: condition(one.node, "Ready") == "True",
    "active": lambda one: one.is_ready(),
}
"""From the request to a node that can be used; each by an object that shows it."""

DISCONNECTING: dict[str, Step] = {
    "deleted": lambda _: True,
    "slice deleting": lambda one: (
        not (found := one.own("resourceslices")) or "deletionTimestamp" in found["metadata"]
    ),
    "slice gone": lambda one: not one.own("resourceslices"),
    "node gone": lambda one: not one.node,
    "identity gone": lambda one: not one.own("identities", f"controlplane-{one.provider}"),
    "tenant gone": lambda one: not one.remote("tenants", one.cluster),
}
"""From the deletion of the request to nothing."""


def wait_step(borrowed: Borrowed, name: str) -> None:
    """Waits until a step has been taken."""
    step = {**CONNECTING, **DISCONNECTING}[name]
    wait_until(lambda: step(borrowed), LONGEST, poll=POLL, explain=borrowed.explain)


def check_skew(site: Site, seconds: int) -> None:
    """Borrows with agents whose clocks are wrong, in opposite directions."""
    site.restart_with_skew(seconds, AGENT, PROVIDER)
    site.restart_with_skew(-seconds, AGENT, REQUESTER)
    borrowed = site.borrow()
    borrowed.wait_ready()
    borrowed.release()
    borrowed.wait_released()
    for cluster in (REQUESTER, PROVIDER):
        site.restart_with_skew(0, AGENT, cluster)


@contextlib.contextmanager
def started(directory: Path, assets: Assets, *flags: str) -> Iterator[Site]:
    """Starts a lab with Liqo, and ends it."""
    site = Site(directory, assets)
    code, out, err = site.lab("up", "--liqo", *flags)
    assert (code, err) == (0, ""), out
    try:
        site.note_objects()
        yield site
    finally:
        site.stop()
        code, _, err = site.lab("down")
        assert code == 0, err
