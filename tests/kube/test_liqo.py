"""Reservations that end in a virtual node, with Liqo's own programs, Kubernetes' scheduler and our agents."""

import functools
import json
import os
import re
import signal
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest

import processes
from kubelend.lab import hosts
from kubelend.lab.state import LabDirectory
from waiting import PATIENCE, wait_until

pytestmark = [pytest.mark.timeout(300), pytest.mark.kube]

REQUESTER, PROVIDER = hosts.AGENT_CLUSTERS
SLICES, QUOTAS = "resourceslices.authentication.liqo.io", "quotas.offloading.liqo.io"
REQUEST = """
apiVersion: rear.fluidos.eu/v1alpha1
kind: ResourceRequest
metadata: {name: %s}
spec: {requestedCPU: 500m, requestedMemory: 256Mi, duration: 1h}
"""
GRANT = "kubelend.io/grant"
NAMESPACE = """
apiVersion: v1
kind: Namespace
metadata: {name: %(name)s}
---
apiVersion: offloading.liqo.io/v1beta1
kind: NamespaceOffloading
metadata: {name: offloading, namespace: %(name)s}
spec:
  namespaceMappingStrategy: DefaultName
  podOffloadingStrategy: LocalAndRemote
  clusterSelector: {nodeSelectorTerms: []}
"""
POD = """
apiVersion: v1
kind: Pod
metadata: {name: %s, namespace: %s}
spec:
  nodeSelector: {kubelend.io/reservation: %s}
  containers: [{name: main, image: none, resources: {requests: {cpu: 100m, memory: 32Mi}}}]
"""
GRANTED = {"cpu": "500m", "memory": "256Mi", "ephemeral-storage": "0", "pods": "110"}


class Site:
    """Three clusters, two of them with Liqo."""

    def __init__(self, directory, assets):
        self.directory = directory
        self.assets = assets

    def lab(self, command, *flags):
        arguments = ("dev", "lab", command, f"--directory={self.directory}", *flags)
        started = processes.kubelend(*arguments, temporary=self.directory.parent)
        return processes.finished(started, 4 * PATIENCE)

    @property
    def state(self):
        found = LabDirectory(self.directory).read_state()
        assert found is not None
        return found

    def as_requester(self, *command):
        """A command with the certificate of the requester."""
        certificate = LabDirectory(self.directory).certificate(REQUESTER)
        flags = (f"--broker-url={self.state.broker}", f"--cert-path={certificate}")
        started = processes.kubelend(*command, *flags, temporary=self.directory.parent)
        code, out, err = processes.finished(started)
        assert code == 0, err
        return out

    @contextmanager
    def dead_agent(self, cluster):
        """The cluster's agent does nothing, though its connections are open."""
        [found] = [each for each in self.state.processes if each.name == f"agent of {cluster}"]
        os.kill(found.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(found.pid, signal.SIGCONT)

    def kubectl(self, cluster, *arguments, text=None):
        done = self.try_kubectl(cluster, *arguments, text=text)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def try_kubectl(self, cluster, *arguments, text=None):
        kubeconfig = self.directory / f"{cluster}.kubeconfig"
        return subprocess.run(
            [self.assets.kubectl, f"--kubeconfig={kubeconfig}", *arguments],
            input=text,
            capture_output=True,
            text=True,
            timeout=4 * PATIENCE,
            check=False,
        )

    def list(self, cluster, kind, *arguments):
        found = self.kubectl(cluster, "get", kind, "--all-namespaces", "-ojson", *arguments)
        return json.loads(found)["items"]

    def borrow(self, name):
        """Returns the reservation, whose virtual node is ready."""
        self.kubectl(REQUESTER, "apply", "--filename=-", text=REQUEST % name)
        wait = ("wait", f"resourcerequest/{name}", "--for=condition=Ready")
        self.kubectl(REQUESTER, *wait, f"--timeout={PATIENCE:g}s")
        path = "{.status.reservationName}"
        return self.kubectl(REQUESTER, "get", "resourcerequest", name, f"-ojsonpath={path}")

    def release(self, name):
        self.kubectl(REQUESTER, "delete", "resourcerequest", name)

    def slice(self, cluster, reservation):
        [found] = [
            one for one in self.list(cluster, SLICES) if one["metadata"]["name"] == reservation
        ]
        return found

    def offload(self, name):
        """A namespace whose pods can run in the provider's cluster."""
        self.kubectl(REQUESTER, "apply", "--filename=-", text=NAMESPACE % {"name": name})
        path = "--for=jsonpath={.status.offloadingPhase}=Ready"
        wait = ("wait", "namespaceoffloading/offloading", f"--namespace={name}", path)
        self.kubectl(REQUESTER, *wait, f"--timeout={PATIENCE:g}s")

    def run_pod(self, name, namespace, reservation):
        def is_created():
            done = self.try_kubectl(
                REQUESTER, "apply", "-f-", text=POD % (name, namespace, reservation)
            )
            return done.returncode == 0  # the namespace has no service account at first

        wait_until(is_created)

    def lent_pods(self, namespace):
        """Phases of the pods of a requester's namespace in the provider's cluster."""
        found = self.list(PROVIDER, "pods", "--selector=liqo.io/managed-by=shadowpod")
        remote = f"{namespace}-{REQUESTER}"
        return {
            one["metadata"]["name"]: one["status"].get("phase")
            for one in found
            if one["metadata"]["namespace"] == remote
        }

    def quota_of(self, reservation):
        found = [
            one["spec"]
            for one in self.list(PROVIDER, QUOTAS)
            if one["metadata"]["name"].startswith(f"{reservation}-")
        ]
        return found[0] if found else None

    def answer(self, name):
        """The provider's answer to a slice, as the requester sees it."""
        conditions = self.slice(REQUESTER, name).get("status", {}).get("conditions", [])
        return [one["message"] for one in conditions if one["type"] == "Resources"]

    def forge(self, own, name, grant):
        """Another slice beside one that was accepted."""
        metadata = {key: own["metadata"][key] for key in ("namespace", "labels")}
        annotations = {"liqo.io/create-virtual-node": "true", GRANT: grant}
        forged = {key: own[key] for key in ("apiVersion", "kind")} | {
            "metadata": metadata | {"name": name, "annotations": annotations},
            "spec": {key: own["spec"][key] for key in ("class", "providerClusterID", "resources")},
        }
        self.kubectl(REQUESTER, "create", "--filename=-", text=json.dumps(forged))

    def delete_slice(self, own, name):
        self.kubectl(
            REQUESTER, "delete", SLICES, name, f"--namespace={own['metadata']['namespace']}"
        )

    def nodes(self):
        found = self.list(REQUESTER, "nodes", "--selector=liqo.io/type=virtual-node")
        return {one["metadata"]["name"]: one["status"]["allocatable"] for one in found}

    def quotas(self):
        return sorted(one["spec"]["resources"]["cpu"] for one in self.list(PROVIDER, QUOTAS))

    def leftovers(self):
        kinds = (
            f"{SLICES},{QUOTAS},tenants.authentication.liqo.io,identities.authentication.liqo.io"
        )
        return [
            f"{cluster}: {one['kind']} {one['metadata']['name']}"
            for cluster in (REQUESTER, PROVIDER)
            for one in self.list(cluster, f"{kinds},foreignclusters.core.liqo.io")
        ]


@pytest.fixture(scope="module")
def site(kube_assets, liqo_assets, tmp_path_factory):
    site = Site(tmp_path_factory.mktemp("liqo") / "clusters", kube_assets)
    code, out, err = site.lab("up", "--liqo")
    assert (code, err) == (0, ""), out
    yield site
    assert site.lab("down")[0] == 0


@pytest.fixture(autouse=True)
def clean(site):
    """Every test leaves nothing in either cluster."""
    yield
    wait_until(lambda: not site.leftovers(), explain=site.leftovers)


def test_pod_runs_in_the_provider_and_nothing_is_left(site):
    code, out, err = site.lab("test")
    assert (code, err) == (0, ""), out
    shown = " ".join(out.split())
    steps = [
        "placeholders hold all of it",
        "CPU is Pending: it needs held room",
        "Tenant admitted",
        "Identity established",
        "ResourceSlice created",
        "ResourceSlice granted",
        "Quota of 500m CPU / 256Mi Memory set",
        "Node is Ready with exactly 500m CPU / 256Mi Memory",
        "ResourceRequest is Active",
        "scheduled onto the virtual node",
        "the same pod is Running",
        "CPU is still Pending",
        "second pod of 300m CPU refused: 0/3 nodes are available: 1 Insufficient cpu",
        "CPU is Running",
        "virtual node removed",
        "nothing of Liqo is left",
    ]
    assert [step for step in steps if step not in shown] == []
    assert sorted(steps, key=shown.index) == steps
    assert max(map(len, out.splitlines())) <= 80


def test_two_reservations_with_one_provider_have_a_node_each(site):
    first, second = site.borrow("first"), site.borrow("second")
    assert site.nodes() == {first: GRANTED, second: GRANTED}
    site.release("first")
    wait_until(lambda: site.nodes() == {second: GRANTED})
    site.release("second")


def test_requester_cannot_raise_its_own_grant(site):
    """Where there are no admission policies, its identity in the provider's cluster may write the status of
    its slices. Here an administrator does so, whom the policy does not refuse: the agent takes it back.
    """
    reservation = site.borrow("greedy")
    found = site.slice(PROVIDER, reservation)
    raised = json.dumps({"status": {"resources": found["status"]["resources"] | {"cpu": "64"}}})
    namespace = f"--namespace={found['metadata']['namespace']}"
    patch = ("patch", SLICES, reservation, namespace, "--subresource=status", "--type=merge")
    site.kubectl(PROVIDER, *patch, f"--patch={raised}")
    wait_until(lambda: site.slice(PROVIDER, reservation)["status"]["resources"] == GRANTED)
    wait_until(lambda: site.quotas() == ["500m"])
    site.release("greedy")


def has_answer(site, name, message):
    return site.answer(name) == [message]


def test_slice_with_a_grant_of_something_else_is_denied_with_the_reason(site):
    """Replayed for a reservation that does not exist, or that of another slice; forged; or none at all."""
    first, second = site.borrow("first"), site.borrow("second")
    own, other = site.slice(REQUESTER, first), site.slice(REQUESTER, second)
    granted = own["metadata"]["annotations"][GRANT]
    site.forge(own, "replayed", granted)
    wait_until(lambda: site.answer("replayed") == ["this cluster holds no reservation replayed"])
    site.delete_slice(own, "replayed")

    header, claims, signature = other["metadata"]["annotations"][GRANT].split(".")
    answers = {
        granted: f"the grant is of reservation {first}",
        f"{header}.{claims}.{signature[::-1]}": "grant has an invalid signature",
        "": "the slice has no grant of the broker",
    }
    with site.dead_agent(REQUESTER):  # it would put back what it has created
        for grant, message in answers.items():
            site.delete_slice(other, second)
            site.forge(other, second, grant)
            wait_until(functools.partial(has_answer, site, second, message))
            wait_until(lambda: list(site.nodes()) == [first])
        site.delete_slice(other, second)
    wait_until(lambda: site.nodes() == {first: GRANTED, second: GRANTED})
    site.release("first")
    site.release("second")


def test_requester_that_keeps_its_slice_loses_it_and_no_other_one(site):
    """After the end no new pods at once, and after a time none at all; its other reservation goes on."""
    ended, kept = site.borrow("ended"), site.borrow("kept")
    site.offload("work")
    for name, reservation in (("old", ended), ("stays", kept)):
        site.run_pod(name, "work", reservation)
    wait_until(lambda: site.lent_pods("work") == {"old": "Running", "stays": "Running"})
    with site.dead_agent(REQUESTER):
        site.as_requester("release", ended)
        wait_until(lambda: site.quota_of(ended).get("cordoned") is True)
        site.run_pod("late", "work", ended)
        wait_until(
            lambda: site.lent_pods("work") == {"stays": "Running"},
            explain=lambda: site.lent_pods("work"),
        )
        wait_until(lambda: site.quota_of(ended) is None)
        site.run_pod("new", "work", kept)
        wait_until(lambda: site.lent_pods("work") == {"stays": "Running", "new": "Running"})
        assert site.quota_of(kept)["resources"]["cpu"] == "500m"
        assert "late" not in site.lent_pods("work")
    site.kubectl(REQUESTER, "delete", "namespace", "work", "--wait=false")
    site.release("ended")
    site.release("kept")


def test_no_secret_of_the_handshake_is_logged(site):
    texts = [path.read_text() for path in site.directory.glob("*.log")]
    assert len(texts) >= 4
    assert not [
        found for text in texts for found in re.findall(r"LS0tLS1CRUdJTi|PRIVATE KEY", text)
    ]


def test_ten_lines_of_the_readme_run_a_pod_in_the_other_cluster(site):
    """All but the first two, which start the clusters and name their kubeconfig."""
    root = Path(__file__).parents[2]
    _, _, rest = (
        (root / "README.md").read_text("utf-8").partition("## On real Kubernetes API servers")
    )
    [block] = re.findall(r"^```bash\n(.*?)^```$", rest.partition("\n## ")[0], re.M | re.S)
    first, second, *lines = block.splitlines()
    assert len(lines) == 8
    assert first.startswith("make clusters ")
    assert second.startswith("export KUBECONFIG=")
    environment = {
        **os.environ,
        "KUBECONFIG": str(site.directory / "kubeconfig"),
        "PATH": f"{site.assets.kubectl.parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", "-euc", "\n".join(lines)],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        timeout=8 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^hello +1/1 +Running ", done.stdout, re.M)
    site.kubectl(REQUESTER, "delete", "--filename=examples/liqo/")
    site.kubectl(REQUESTER, "delete", "namespace", "demo")
