"""`kubelend dev bench peering`: from a ResourceRequest to a Ready node, beside Liqo alone.

Both take turns in the same two clusters of the lab, with Liqo's own programs, and are timed by the same
watches. Liqo alone means: a driver with the administrators' kubeconfigs of both clusters makes the objects of
the handshake and a ResourceSlice of Liqo's class `default`, which Liqo grants without asking anybody.

The first one includes the handshake: before each of them nothing is left of a peering. The next ones use one
peering, which another reservation keeps. All are released before the next is measured.

`kubelend dev bench agent` has its second part here: an agent that peers and holds, on a real API server with
Liqo's CRDs and as many nodes and pods as the simulated cluster of the first part; pods come and go at the
same rate. It holds some reservations by placeholders, which nobody schedules. Its metrics verify that it has
processed every event.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager
from typing import Final, NamedTuple

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from msgspec.structs import replace

from kubelend.agent.ports import Peer
from kubelend.bench import agents, fixtures, measure
from kubelend.bench.measure import BenchRun, Figures
from kubelend.core import resources
from kubelend.core.pod_requests import RESERVATION_LABEL
from kubelend.envtest import assets, servers, waiting
from kubelend.envtest.processes import AgentProcess, BrokerProcess
from kubelend.envtest.servers import LocalCluster
from kubelend.envtest.waiting import ObjectTimeline, Observation
from kubelend.kube import config
from kubelend.kube import resources as kube_resources
from kubelend.kube.client import Client
from kubelend.kube.resources import Resource
from kubelend.lab import background, hosts, setup
from kubelend.lab.liqo_walkthrough import LEFTOVERS, condition_status, is_granted
from kubelend.lab.state import LabDirectory
from kubelend.lab.supervisor import Supervisor
from kubelend.peerings import liqo, liqo_objects
from kubelend.peerings.liqo_api import LIQO_NAMESPACE, LiqoApi
from kubelend.peerings.liqo_objects import (
    IDENTITIES,
    MANAGED_LABEL,
    NAMESPACES,
    NODES,
    PODS,
    SECRETS,
    SLICES,
    TENANTS,
    LiqoKind,
    LiqoResource,
    Manifest,
)
from kubelend.pki import liqo_csr
from kubelend.transports.client import BrokerClient
from kubelend.wire import bodies
from kubelend.wire.objects import Metadata, ResourceRequest, ResourceRequestSpec

REQUESTER, PROVIDER = hosts.AGENT_CLUSTERS
CPU, MEMORY = "100m", "64Mi"
AMOUNTS: Final = resources.parse_requested({"cpu": CPU, "memory": MEMORY})

_TIMEOUT = 60.0
_SETTLE_SECONDS = 1.5
"""Pause after a release, in which controllers and agents finish their work on it, Events included."""
_REQUESTS: Final = kube_resources.resource_for(ResourceRequest)
_POLICY_BINDINGS: Final = Resource(
    "admissionregistration.k8s.io",
    "v1",
    "validatingadmissionpolicybindings",
    "ValidatingAdmissionPolicyBinding",
    LiqoResource,
    namespaced=False,
)
_REQUESTER_POLICY: Final = f"{setup.AGENT_ACCOUNT}-liqo-requesters"
"""Denies slices of Liqo's class `default` to the clusters that an agent has admitted."""


class Timing(NamedTuple):
    """Seconds of each step, in order."""

    reserve: float
    """Until the ResourceRequest has its reservation."""
    handshake: float
    """Until the ResourceSlice exists."""
    grant: float
    """Until the provider has accepted it."""
    node: float
    """Until the Node is Ready with the amounts."""

    @property
    def ready(self) -> float:
        return sum(self)


def measure_peering(reservations: int, firsts: int) -> Figures:
    """Measures `firsts` new peerings of each kind, then `reservations` of each kind on one peering."""
    background.check_prerequisites(uses_liqo=True)
    with measure.run("peering") as run, ExitStack() as stack:
        home = LabDirectory(run.deployment.directory / "clusters")
        home.create()
        run.progress("starting the clusters")
        supervisor = Supervisor(home, stack, print_step=lambda _: None)
        supervisor.start(uses_kind=False, uses_liqo=True)
        # In this thread, which is in the network namespace of the clusters.
        timings = asyncio.run(_measure(run, home, reservations, firsts))
    return {"reservations": reservations, "firsts": firsts, **_figures(*timings)}


class _Timings(NamedTuple):
    """All measurements of one kind."""

    first: list[Timing]
    next: list[Timing]


async def _measure(
    run: BenchRun, home: LabDirectory, reservations: int, firsts: int
) -> tuple[_Timings, _Timings]:
    ours, alone = _Timings([], []), _Timings([], [])
    async with _open_site(home) as site:
        for number in range(firsts):
            run.progress(f"{number} of {firsts} new peerings")
            alone.first.append(await site.measure_liqo_alone(is_first=True))
            ours.first.append(await site.measure_reservation())
            await site.disconnect()
        async with site.kept_peering():
            for number in range(reservations):
                run.progress(f"{number} of {reservations} reservations")
                # Neither always goes first.
                for kind in (0, 1) if number % 2 else (1, 0):
                    if kind:
                        ours.next.append(await site.measure_reservation())
                    else:
                        alone.next.append(await site.measure_liqo_alone())
    return ours, alone


def _figures(ours: _Timings, alone: _Timings) -> Figures:
    """Medians in milliseconds: of Kubelend, and of Liqo alone."""
    found: Figures = {}
    for prefix, timings in (("", ours), ("liqo_", alone)):
        for which, measured in timings._asdict().items():
            for step in ("ready", *Timing._fields):
                name = f"{prefix}{which}_{step}_ms"
                found[name] = _median_ms(getattr(one, step) for one in measured)
    for which in _Timings._fields:
        ratio = found[f"{which}_ready_ms"] / found[f"liqo_{which}_ready_ms"]
        found[f"{which}_ratio"] = round(ratio, 3)
    return found


def _median_ms(seconds: Iterable[float]) -> float:
    return round(measure.percentile([*seconds], 50) * 1000, 1)


class _Site:
    """Both clusters, and the watches on them."""

    def __init__(self, clients: dict[str, Client]) -> None:
        self._clients = clients
        self._numbers = itertools.count(1)
        self._driver = _LiqoDriver(LiqoApi(clients[REQUESTER]), LiqoApi(clients[PROVIDER]))
        client, provider = clients[REQUESTER], clients[PROVIDER]
        self._requests = ObjectTimeline(client, REQUESTER, _REQUESTS, _TIMEOUT)
        self._slices = ObjectTimeline(client, REQUESTER, SLICES, _TIMEOUT)
        self._nodes = ObjectTimeline(client, REQUESTER, NODES, _TIMEOUT)
        self._granted = ObjectTimeline(provider, PROVIDER, SLICES, _TIMEOUT)

    @property
    def timelines(self) -> Sequence[ObjectTimeline[LiqoResource] | ObjectTimeline[ResourceRequest]]:
        return self._requests, self._slices, self._nodes, self._granted

    async def measure_reservation(self) -> Timing:
        """Creates a ResourceRequest, and deletes it when its node is ready."""
        began = time.perf_counter()
        name, reserved = await self._reserve()
        reservation = reserved.found.status.reservation_name
        timing = await self._wait_ready(reservation, began, reserved.at)
        await self._release(name, reservation)
        return timing

    async def measure_liqo_alone(self, *, is_first: bool = False) -> Timing:
        """Creates a slice of class `default`, and deletes it when its node is ready."""
        name = f"liqo-alone-{next(self._numbers)}"
        began = time.perf_counter()
        if is_first:
            await self._driver.connect()
        await self._driver.create_slice(name)
        timing = await self._wait_ready(name, began, began)
        await self._driver.delete_slice(name)
        await self._wait_gone(name)
        if is_first:
            await self.disconnect()
        return timing

    @asynccontextmanager
    async def kept_peering(self) -> AsyncIterator[None]:
        """A reservation that keeps the peering while others come and go."""
        _, reserved = await self._reserve()
        await self._wait_ready(reserved.found.status.reservation_name, 0, 0)
        await self._clients[PROVIDER].delete(_POLICY_BINDINGS, _REQUESTER_POLICY)
        yield

    async def disconnect(self) -> None:
        """Removes the peering, until nothing of it is left. Agents would keep it for a while."""
        await self._driver.disconnect()

        async def is_clean() -> bool:
            for client in self._clients.values():
                for kind in (*LEFTOVERS, NAMESPACES):
                    found = (await client.list(kind)).objects
                    if any(kind is not NAMESPACES or _is_of_tenant(one) for one in found):
                        return False
            return True

        await waiting.until(is_clean, "objects of a peering are left", _TIMEOUT, poll=0.2)

    async def _reserve(self) -> tuple[str, Observation[ResourceRequest]]:
        name = f"bench-{next(self._numbers)}"
        spec = ResourceRequestSpec(requested_cpu=CPU, requested_memory=MEMORY, duration="1h")
        wanted = ResourceRequest(Metadata(name, setup.OBJECT_NAMESPACE), spec)
        await self._clients[REQUESTER].create(_REQUESTS, wanted)
        return name, await self._requests.wait_for(
            name, lambda one: bool(one.found.status.reservation_name), "was not reserved"
        )

    async def _wait_ready(self, name: str, began: float, reserved: float) -> Timing:
        requested = await self._slices.wait_for(name, lambda _: True, "was not created")
        granted = await self._granted.wait_for(
            name, lambda seen: is_granted(seen.found), "was not granted"
        )
        ready = await self._nodes.wait_for(name, _is_ready, "was not ready")
        moments = (began, reserved, requested.at, granted.at, ready.at)
        return Timing(*(after - before for before, after in itertools.pairwise(moments)))

    async def _release(self, request: str, reservation: str) -> None:
        await self._clients[REQUESTER].delete(_REQUESTS, request, setup.OBJECT_NAMESPACE)
        await self._requests.wait_for(request, lambda one: one.is_deleted, "was not deleted")
        await self._wait_gone(reservation)

    async def _wait_gone(self, name: str) -> None:
        for timeline in (self._nodes, self._slices, self._granted):
            await timeline.wait_for(name, lambda one: one.is_deleted, "was not deleted")
        await asyncio.sleep(_SETTLE_SECONDS)


@asynccontextmanager
async def _open_site(home: LabDirectory) -> AsyncIterator[_Site]:
    async with AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(
                Client.open(config.config_from_kubeconfig(home.kubeconfig_of(name)))
            )
            for name in hosts.AGENT_CLUSTERS
        }
        site = _Site(clients)
        await stack.enter_async_context(waiting.watching(*site.timelines))
        yield site


class _LiqoDriver:
    """Makes the objects of a peering of Liqo in both clusters, as an administrator of both can."""

    def __init__(self, requester: LiqoApi, provider: LiqoApi) -> None:
        self._requester = requester
        self._provider = provider

    async def connect(self) -> None:
        """The handshake of Liqo; every object is created as soon as its content is known."""
        remote, own = PROVIDER, REQUESTER
        keys = await self._requester.find(SECRETS, liqo.KEYS_SECRET, self._requester.namespace)
        assert keys is not None  # noqa: S101 - Liqo has started
        key = base64.b64decode(keys.data["privateKey"])
        csr = base64.b64encode(liqo_csr.signing_request(key, own)).decode()
        await _apply(self._provider, NAMESPACES, liqo_objects.namespace_manifest(own))
        nonce = await _complete(self._provider, liqo_objects.nonce_manifest(own), "nonce")
        await _apply(self._requester, NAMESPACES, liqo_objects.namespace_manifest(remote))
        signed_nonce = liqo_objects.signed_nonce_manifest(remote, nonce)
        signed = await _complete(self._requester, signed_nonce, "signedNonce")
        handshake = bodies.Handshake(
            own, signed_nonce=signed, public_key=keys.data["publicKey"], csr=csr
        )
        await _apply(self._provider, TENANTS, liqo_objects.tenant_manifest("", handshake))
        issued = await self._provider.complete(
            TENANTS, own, liqo_objects.tenant_namespace(own), liqo_objects.handshake_parameters
        )
        assert issued is not None  # noqa: S101 - else `complete` has waited in vain
        provider = replace(issued, cluster_id=remote)
        await _apply(self._requester, IDENTITIES, liqo_objects.identity_manifest("", provider))

    async def create_slice(self, name: str) -> None:
        wanted = liqo_objects.slice_manifest(Peer(name, PROVIDER, AMOUNTS), PROVIDER, "")
        wanted["spec"]["class"] = "default"
        await _apply(self._requester, SLICES, wanted)

    async def delete_slice(self, name: str) -> None:
        namespace = liqo_objects.tenant_namespace(PROVIDER)
        await self._requester.client.delete(SLICES, name, namespace)

    async def disconnect(self) -> None:
        """Removes what `connect`, or an agent, has created, and what Liqo leaves."""
        for api, kind, name, remote in (
            (self._requester, IDENTITIES, f"controlplane-{PROVIDER}", PROVIDER),
            (self._provider, TENANTS, REQUESTER, REQUESTER),
        ):
            namespace = liqo_objects.tenant_namespace(remote)
            await api.client.delete(kind, name, namespace)
            is_gone = functools.partial(_is_gone, api, kind, name, namespace)
            await waiting.until(is_gone, f"{kind.kind} {name} was not deleted", _TIMEOUT)
            await api.client.delete(NAMESPACES, namespace)
            await api.client.delete(liqo_objects.FOREIGN_CLUSTERS, remote)


async def _apply(api: LiqoApi, kind: LiqoKind, manifest: Manifest) -> None:
    """Without the label of what agents have created: they would remove it."""
    del manifest["metadata"]["labels"][MANAGED_LABEL]
    await api.apply(kind, manifest)


async def _complete(api: LiqoApi, secret: Manifest, field: str) -> str:
    await _apply(api, SECRETS, secret)
    name, namespace = secret["metadata"]["name"], secret["metadata"]["namespace"]
    found = await api.complete(SECRETS, name, namespace, lambda one: one.data.get(field))
    return found or ""


async def _is_gone(api: LiqoApi, kind: LiqoKind, name: str, namespace: str) -> bool:
    return await api.find(kind, name, namespace) is None


def _is_of_tenant(namespace: LiqoResource) -> bool:
    return "liqo.io/tenant-namespace" in namespace.metadata.labels


def _is_ready(seen: Observation[LiqoResource]) -> bool:
    offered = liqo_objects.parse_amounts(seen.found.status.get("allocatable") or {})
    is_ready = condition_status(seen.found, "Ready") == "True"
    return is_ready and offered == AMOUNTS


CLUSTER = "lender"
RESERVATIONS = 20
"""Reservations that it holds."""

_REQUEST = bodies.ReservationRequest(bodies.Quantities("100m", "64Mi"))
_NODE_AMOUNTS = {"cpu": "64", "memory": "256Gi", "pods": "1000"}
_PARALLEL_CALLS = 16
_HOLD_TIMEOUT = 60.0
_METRICS_TIMEOUT = 10.0


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
            figures = asyncio.run(
                _measure_cluster(run, cluster, broker, agent, cluster_pods, seconds)
            )
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
    for manifest in setup.liqo_manifests():
        _create(cluster, setup.collection_path(manifest), manifest)


def _create(cluster: LocalCluster, path: str, body: Manifest) -> None:
    cluster.request("POST", path, msgspec.json.encode(body))


async def _measure_cluster(
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
