"""Reservations that end in a virtual node, with Liqo's own programs, Kubernetes' scheduler and our agents."""

import json
import re
import subprocess

import pytest

import processes
from kubelend.lab import hosts
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


def test_slice_without_a_reservation_is_denied_with_the_reason(site):
    reservation = site.borrow("honest")
    own = site.slice(REQUESTER, reservation)
    own["metadata"] = {
        "name": "forged",
        "namespace": own["metadata"]["namespace"],
        "labels": own["metadata"]["labels"],
    }
    del own["status"], own["spec"]["csr"]
    site.kubectl(REQUESTER, "create", "--filename=-", text=json.dumps(own))

    def answer():
        conditions = site.slice(REQUESTER, "forged").get("status", {}).get("conditions", [])
        return [one["message"] for one in conditions if one["type"] == "Resources"]

    wait_until(lambda: answer() == ["this cluster holds no reservation forged"], explain=answer)
    assert list(site.nodes()) == [reservation]
    site.kubectl(
        REQUESTER, "delete", SLICES, "forged", f"--namespace={own['metadata']['namespace']}"
    )
    site.release("honest")


def test_no_secret_of_the_handshake_is_logged(site):
    texts = [path.read_text() for path in site.directory.glob("*.log")]
    assert len(texts) >= 4
    assert not [
        found for text in texts for found in re.findall(r"LS0tLS1CRUdJTi|PRIVATE KEY", text)
    ]
