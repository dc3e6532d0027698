"""`kubelend dev bench agent`, second part: an agent that peers and holds, on a real API server.

The API server has Liqo's CRDs and as many nodes and pods as the simulated cluster of the first part; pods
come and go at the same rate. The agent holds some reservations by placeholders, which nobody schedules.
That it has processed every event is verified by its metrics.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
from collections import deque
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from kubelend.bench import agents, fixtures, measure
from kubelend.bench.measure import BenchRun, Figures
from kubelend.core.errors import InvalidSettings
from kubelend.core.pod_requests import RESERVATION_LABEL
from kubelend.envtest import assets, servers, waiting
from kubelend.envtest.processes import AgentProcess, BrokerProcess
from kubelend.envtest.servers import LocalCluster
from kubelend.kube import config
from kubelend.kube.client import Client
from kubelend.lab import setup
from kubelend.peerings import liqo
from kubelend.peerings.liqo_api import LIQO_NAMESPACE
from kubelend.peerings.liqo_objects import NODES, PODS
from kubelend.transports.client import BrokerClient
from kubelend.wire import bodies

CLUSTER = "lender"
RESERVATIONS = 20
"""Reservations that it holds."""

_REQUEST = bodies.ReservationRequest(bodies.Quantities("100m", "64Mi"))
_NODE_AMOUNTS = {"cpu": "64", "memory": "256Gi", "pods": "1000"}
_PARALLEL_CALLS = 16
_HOLD_TIMEOUT = 60.0
_METRICS_TIMEOUT = 10.0

Manifest = dict[str, Any]


def missing_programs() -> str:
    """Returns why it cannot be measured; empty if it can."""
    try:
        assets.locate_assets()
        assets.find_liqo_assets()
    except InvalidSettings as error:
        return str(error)
    return ""


def measure_peering_agent(pods: int, nodes: int, seconds: float) -> Figures:
    """Measures an agent with `--peering=liqo` and `--hold=placeholders` for `seconds`."""
    with (
        measure.run("agent") as run,
        servers.run_api_servers(assets.find_assets(), run.deployment.directory / "lab") as lab,
        run.broker("--rate-limit=0") as broker,
    ):
        run.progress("starting an API server")
        [cluster] = lab.start(CLUSTER)
        _install(cluster)
        cluster_pods = _ClusterPods(nodes)
        asyncio.run(cluster_pods.create_all(run, cluster, pods))
        with run.deployment.agent(
            CLUSTER,
            broker,
            f"--kubeconfig={cluster.admin_kubeconfig}",
            *("--peering=liqo", "--hold=placeholders", "--metrics-bind-address=127.0.0.1:0"),
        ) as agent:
            agent.wait_until_ready()
            figures = asyncio.run(_measure(run, cluster, broker, agent, cluster_pods, seconds))
    return {f"peering_{name}": value for name, value in figures.items()}


def _install(cluster: LocalCluster) -> None:
    """Installs what the agent reads of Liqo, and what its placeholders need."""
    servers.install_crds(cluster)
    cluster.kubectl("apply", "--server-side", f"--filename={assets.find_liqo_assets().crds}")
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    keys = {"privateKey": base64.b64encode(pem).decode(), "publicKey": ""}
    named = {"namespace": LIQO_NAMESPACE}
    label = {"labels": {"app.kubernetes.io/name": "clusterid-configmap"}}
    for kind, plural, metadata, content in (
        ("ConfigMap", "configmaps", {"name": "id"} | label, {"data": {"CLUSTER_ID": CLUSTER}}),
        ("Secret", "secrets", {"name": liqo.KEYS_SECRET}, {"data": keys}),
    ):
        _create(cluster, "/api/v1/namespaces", {"metadata": {"name": LIQO_NAMESPACE}})
        body = {"apiVersion": "v1", "kind": kind, "metadata": metadata | named} | content
        _create(cluster, f"/api/v1/namespaces/{LIQO_NAMESPACE}/{plural}", body)
    for manifest in setup.shipped_manifests():
        _create(cluster, setup.collection_path(manifest), manifest)


def _create(cluster: LocalCluster, path: str, body: Manifest) -> None:
    cluster.request("POST", path, msgspec.json.encode(body))


async def _measure(
    run: BenchRun,
    cluster: LocalCluster,
    broker: BrokerProcess,
    agent: AgentProcess,
    cluster_pods: _ClusterPods,
    seconds: float,
) -> Figures:
    certificate = run.deployment.certificate(fixtures.REQUESTER)
    async with _open(cluster) as client, BrokerClient(broker.url, certificate) as requester:
        run.progress(f"{RESERVATIONS} reservations")
        for _ in range(RESERVATIONS):
            await requester.reserve(_REQUEST)

        async def are_held() -> bool:
            found = await client.list(PODS, setup.OBJECT_NAMESPACE, labels=RESERVATION_LABEL)
            return len(found.objects) >= RESERVATIONS

        async def are_seen() -> bool:
            return await asyncio.to_thread(agents.allocated_memory, agent) == cluster_pods.memory

        async def replace_pod(_: int) -> None:
            await cluster_pods.replace_one(client)

        await waiting.until(are_held, "no placeholders", _HOLD_TIMEOUT, poll=0.2)
        count = max(1, round(seconds * agents.EVENTS_PER_S / 2))
        window = await run.send_evenly(agent.pid, replace_pod, count, seconds)
        await waiting.until(are_seen, "the agent has not seen all pods", _METRICS_TIMEOUT, poll=0.2)
    return window.figures()


def _open(cluster: LocalCluster) -> AbstractAsyncContextManager[Client]:
    return Client.open(config.config_from_kubeconfig(cluster.admin_kubeconfig))


class _ClusterPods:
    """Bound pods of a real cluster, which come and go."""

    def __init__(self, nodes: int) -> None:
        self.memory = 0
        """Bytes that all of them request."""
        self._nodes = nodes
        self._numbers = itertools.count()
        self._present: deque[int] = deque()

    async def create_all(self, run: BenchRun, cluster: LocalCluster, pods: int) -> None:
        async with _open(cluster) as client:
            for number in range(self._nodes):
                await client.raw("POST", NODES.path(), _node(number))
                # The API server adds a taint that only a controller manager removes.
                await client.patch(NODES, f"node-{number}", "", {"spec": {"taints": None}})
            while len(self._present) < pods:
                run.progress(f"{len(self._present):,} of {pods:,} pods")
                some = min(_PARALLEL_CALLS, pods - len(self._present))
                await asyncio.gather(*(self._add(client) for _ in range(some)))

    async def replace_one(self, client: Client) -> None:
        """Two events."""
        gone = self._present.popleft()
        await client.raw("DELETE", f"{_pods_path()}/{_pod_name(gone)}", {"gracePeriodSeconds": 0})
        self.memory -= _pod_memory(gone)
        await self._add(client)

    async def _add(self, client: Client) -> None:
        number = next(self._numbers)
        await client.raw("POST", _pods_path(), _pod(number, f"node-{number % self._nodes}"))
        self.memory += _pod_memory(number)
        self._present.append(number)


def _pods_path() -> str:
    return PODS.path(setup.OBJECT_NAMESPACE)


def _pod_name(number: int) -> str:
    return f"pod-{number}"


def _pod_memory(number: int) -> int:
    """Different sizes, so that the sum tells which pods were seen."""
    return (16 + number % 61) * fixtures.MIB


def _node(number: int) -> Manifest:
    ready = [{"type": "Ready", "status": "True"}]
    status = {"capacity": _NODE_AMOUNTS, "allocatable": _NODE_AMOUNTS, "conditions": ready}
    return {"metadata": {"name": f"node-{number}"}, "status": status}


def _pod(number: int, node: str) -> Manifest:
    requests = {"cpu": "100m", "memory": str(_pod_memory(number))}
    container = {"name": "main", "image": "none", "resources": {"requests": requests}}
    return {
        "metadata": {"name": _pod_name(number)},
        "spec": {"nodeName": node, "containers": [container]},
    }
