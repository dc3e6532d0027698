"""How borrowed nodes go: drained, by force, with a restarted agent, with their offloaded namespaces."""

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

import processes
from kubelend.lab import hosts
from kubelend.lab.state import LabDirectory
from waiting import PATIENCE, wait_until

pytestmark = [pytest.mark.timeout(400), pytest.mark.kube]

REQUESTER, PROVIDER = hosts.AGENT_CLUSTERS
LIMITS = ("--drain-timeout=10s", "--force-unpeer-after=10s", "--reclaim-after=5s")
SLICES, OFFLOADINGS = "resourceslices.authentication.liqo.io", "namespaceoffloadings"
REQUEST = """
apiVersion: rear.fluidos.eu/v1alpha1
kind: ResourceRequest
metadata: {name: %s, namespace: %s}
spec: {requestedCPU: 500m, requestedMemory: 256Mi, duration: 1h, namespaces: %s}
"""
POD = """
apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: %s, labels: {app: kept}}
spec:
  nodeSelector: {kubelend.io/reservation: %s}
  containers: [{name: main, image: none, resources: {requests: {cpu: 100m, memory: 32Mi}}}]
"""
BUDGET = """
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata: {name: kept, namespace: %s}
spec: {maxUnavailable: 0, selector: {matchLabels: {app: kept}}}
"""
OFFLOADING = """
apiVersion: offloading.liqo.io/v1beta1
kind: NamespaceOffloading
metadata: {name: offloading, namespace: %s}
spec: {podOffloadingStrategy: Local, namespaceMappingStrategy: DefaultName}
"""
NODE = """
apiVersion: v1
kind: Node
metadata: {name: %s, labels: {liqo.io/type: virtual-node, liqo.io/remote-cluster-id: another}}
"""


class Site:
    """Two clusters with Liqo, whose agents have short limits."""

    def __init__(self, directory, assets):
        self.directory = directory
        self.assets = assets
        self.agents = {}

    def lab(self, command, *flags):
        arguments = ("dev", "lab", command, f"--directory={self.directory}", *flags)
        started = processes.kubelend(*arguments, temporary=self.directory.parent)
        return processes.finished(started, 4 * PATIENCE)

    @property
    def state(self):
        found = LabDirectory(self.directory).read_state()
        assert found is not None
        return found

    def replace_agents(self):
        """The agents of the lab have the default limits."""
        for found in self.state.processes:
            if found.name.startswith("agent of "):
                os.kill(found.pid, signal.SIGKILL)
        for cluster in hosts.AGENT_CLUSTERS:
            self.start_agent(cluster)

    def start_agent(self, cluster):
        home = LabDirectory(self.directory)
        command = [sys.executable, "-m", "kubelend", "agent", "--hold=placeholders", *LIMITS]
        command += [
            f"--broker-url={self.state.broker}",
            f"--broker-cert-path={home.certificate(cluster)}",
            f"--kubeconfig={self.directory}/lab/{cluster}/kubelend-agent.kubeconfig",
            *("--instruction-namespace=default", "--health-probe-bind-address=0"),
            "--metrics-bind-address=0",
        ]
        with (self.directory / f"{cluster}.restarted.log").open("ab") as log:
            self.agents[cluster] = subprocess.Popen(command, stdout=log, stderr=log)

    def kill_agent(self, cluster):
        self.agents[cluster].kill()
        self.agents[cluster].wait()

    def stop_agents(self):
        for cluster in self.agents:
            self.kill_agent(cluster)

    @contextmanager
    def suspended(self, pid):
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def api_server(self, cluster):
        """The process of its API server."""
        pattern = f"kube-apiserver .*{self.directory}/lab/{cluster}/"
        return int(subprocess.check_output(["pgrep", "-f", pattern], text=True))

    def kubectl(self, cluster, *arguments, text=None):
        kubeconfig = self.directory / f"{cluster}.kubeconfig"
        done = subprocess.run(
            [self.assets.kubectl, f"--kubeconfig={kubeconfig}", *arguments],
            input=text,
            capture_output=True,
            text=True,
            timeout=4 * PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def apply(self, text):
        self.kubectl(REQUESTER, "apply", "--filename=-", text=text)

    def list(self, cluster, kind, *arguments):
        found = self.kubectl(cluster, "get", kind, "--all-namespaces", "-ojson", *arguments)
        return json.loads(found)["items"]

    def names(self, cluster, kind, *arguments, namespace=""):
        """In all namespaces, or in one."""
        found = [one["metadata"] for one in self.list(cluster, kind, *arguments)]
        return [one["name"] for one in found if namespace in ("", one.get("namespace"))]

    def add_namespace(self, name):
        self.kubectl(REQUESTER, "create", "namespace", name)
        wait_until(lambda: self.names(REQUESTER, "serviceaccounts", namespace=name))

    def reserve(self, name, namespace="default", offloaded=()):
        """Returns the reservation."""
        self.apply(REQUEST % (name, namespace, json.dumps(offloaded)))
        path = "-ojsonpath={.status.reservationName}"
        get = ("get", "resourcerequest", name, f"--namespace={namespace}", path)
        wait_until(lambda: self.kubectl(REQUESTER, *get))
        return self.kubectl(REQUESTER, *get)

    def borrow(self, name, namespace="default", offloaded=()):
        """Returns the reservation, whose virtual node is ready."""
        reservation = self.reserve(name, namespace, offloaded)
        wait = ("wait", f"resourcerequest/{name}", f"--namespace={namespace}")
        self.kubectl(REQUESTER, *wait, "--for=condition=Ready", f"--timeout={PATIENCE:g}s")
        return reservation

    def run_pod(self, name, namespace, reservation):
        """A pod that runs in the provider's cluster, and that may not be evicted."""
        self.apply(BUDGET % namespace)
        self.apply(POD % (name, namespace, reservation))
        wait = ("wait", f"pod/{name}", f"--namespace={namespace}", "--for=condition=Ready")
        self.kubectl(REQUESTER, *wait, f"--timeout={PATIENCE:g}s")

    def release(self, name, namespace="default"):
        self.kubectl(REQUESTER, "delete", "resourcerequest", name, f"--namespace={namespace}")

    def events(self, reservation):
        found = self.list(
            REQUESTER, "events", f"--field-selector=involvedObject.name={reservation}"
        )
        return {one["reason"] for one in found}

    def offloadings(self):
        return [one["metadata"]["namespace"] for one in self.list(REQUESTER, OFFLOADINGS)]

    def leftovers(self, *clusters):
        kinds = f"{SLICES},tenants.authentication.liqo.io,identities.authentication.liqo.io"
        kinds += ",quotas.offloading.liqo.io,foreignclusters.core.liqo.io"
        found = [
            f"{cluster}: {one['kind']} {one['metadata']['name']}"
            for cluster in clusters or hosts.AGENT_CLUSTERS
            for one in (
                *self.list(cluster, kinds),
                *self.list(cluster, "namespaces", "--selector=liqo.io/tenant-namespace=true"),
                *self.list(cluster, "nodes", "--selector=liqo.io/type=virtual-node"),
            )
        ]
        return [one for one in found if not one.endswith(" another")]


@pytest.fixture(scope="module")
def site(kube_assets, liqo_assets, tmp_path_factory):
    site = Site(tmp_path_factory.mktemp("removal") / "clusters", kube_assets)
    code, out, err = site.lab("up", "--liqo")
    assert (code, err) == (0, ""), out
    site.replace_agents()
    yield site
    site.stop_agents()
    assert site.lab("down")[0] == 0


@pytest.fixture(autouse=True)
def clean(site):
    """Every test leaves nothing in either cluster."""
    yield
    wait_until(lambda: not site.leftovers(), explain=site.leftovers)


def test_node_goes_at_the_deadline_though_a_budget_forbids_evictions(site):
    site.add_namespace("budget")
    other = site.borrow("other")
    reservation = site.borrow("small", "budget", ["budget"])
    site.run_pod("kept", "budget", reservation)
    site.release("small", "budget")
    nodes = "--selector=liqo.io/type=virtual-node"
    wait_until(lambda: site.names(REQUESTER, "nodes", nodes) == [other])
    wait_until(lambda: {"Draining", "Disconnected"} <= site.events(reservation))
    assert site.names(REQUESTER, "pods", namespace="budget") == []
    assert reservation not in site.names(REQUESTER, "leases")
    assert other in site.names(REQUESTER, "leases"), "Liqo names its leases otherwise now"
    site.release("other")


def test_dead_provider_is_force_unpeered_and_cleans_up_when_it_is_back(site):
    site.add_namespace("stranded")
    reservation = site.borrow("small", "stranded", ["stranded"])
    site.run_pod("kept", "stranded", reservation)
    with site.suspended(site.api_server(PROVIDER)):
        site.release("small", "stranded")
        wait_until(lambda: not site.leftovers(REQUESTER), explain=lambda: site.leftovers(REQUESTER))
        assert site.names(REQUESTER, "pods", namespace="stranded") == []
        wait_until(lambda: not site.offloadings())
        assert {"ProviderUnreachable", "ForceUnpeering"} <= site.events(reservation)
    wait_until(lambda: not site.leftovers(PROVIDER), explain=lambda: site.leftovers(PROVIDER))
    remote = f"stranded-{REQUESTER}"
    wait_until(lambda: remote not in site.names(PROVIDER, "namespaces"))


def test_agent_may_be_killed_at_any_step_of_a_removal(site):
    """After each object that goes, so that nothing in memory can say what is left."""
    site.borrow("small")
    site.release("small")
    left = site.leftovers(REQUESTER)
    assert left
    while left:
        site.kill_agent(REQUESTER)
        site.start_agent(REQUESTER)
        seen = left
        wait_until(lambda: site.leftovers(REQUESTER) != seen, explain=lambda: seen)  # noqa: B023
        left = site.leftovers(REQUESTER)


def test_namespaces_are_offloaded_while_a_reservation_names_them(site):
    site.add_namespace("shared")
    site.add_namespace("mine")
    site.apply(OFFLOADING % "mine")
    site.borrow("own", "mine", ["mine"])
    for name in ("first", "second"):
        site.borrow(name, "shared", ["shared"])
    assert sorted(site.offloadings()) == ["mine", "shared"]
    site.release("first", "shared")
    site.release("own", "mine")
    nodes = "--selector=liqo.io/type=virtual-node"
    wait_until(lambda: len(site.names(REQUESTER, "nodes", nodes)) == 1)
    assert sorted(site.offloadings()) == ["mine", "shared"]
    site.release("second", "shared")
    wait_until(lambda: site.offloadings() == ["mine"])
    [found] = site.list(REQUESTER, OFFLOADINGS)
    assert found["spec"]["podOffloadingStrategy"] == "Local"
    assert found["metadata"].get("labels", {}) == {}


def test_node_gets_a_number_while_the_name_of_its_reservation_is_taken(site):
    """As after a move, while the previous provider's node is there."""
    with site.suspended(site.agents[PROVIDER].pid):
        reservation = site.reserve("moved")
        site.apply(NODE % reservation)
    site.borrow("moved")
    label = f"--selector=kubelend.io/reservation={reservation}"
    assert site.names(REQUESTER, "nodes", label) == [f"{reservation}.2"]
    site.release("moved")
    wait_until(lambda: site.names(REQUESTER, "nodes", label) == [])
    site.kubectl(REQUESTER, "delete", "node", reservation)
