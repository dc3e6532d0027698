"""The charts as an operator installs them with helm, in clusters with Liqo: a reservation becomes a pod.

The pods of broker and agents are processes of the stand-in for kubelets, with the flags, Secrets and accounts
that the charts give them. Everything is in a network namespace, because Liqo listens on all interfaces.
"""

import asyncio
import base64
import contextlib
import json
import os
import re
import subprocess

import pytest

import audited_cluster
import charts
import kube_objects
from kubelend.core.errors import InvalidSettings, UnexpectedResponse
from kubelend.envtest import network_namespace, servers
from kubelend.peerings.liqo_objects import SLICE_RESOURCE
from labs import path_of
from waiting import PATIENCE, wait_until

pytestmark = [pytest.mark.timeout(600), pytest.mark.kube]

HOME = "kubelend"
ACCOUNT = f"{HOME}/kubelend-agent"
SLICES = SLICE_RESOURCE
FOREIGN_CLUSTERS = "foreignclusters.core.liqo.io"
PEERING_KINDS = (
    *("resourceslices", "foreignclusters", "identities", "tenants", "quotas"),
    *("reservationinstructions", "providerinstructions"),
)

AGENT = {
    "broker": {"url": "https://localhost:8443"},
    # All pods share one network.
    "flags": {"health-probe-bind-address": "0", "metrics-bind-address": "0", "finished-for": "0s"},
}
REQUEST = """
apiVersion: rear.fluidos.eu/v1alpha1
kind: ResourceRequest
metadata: {name: training, namespace: team}
spec: {requestedCPU: 500m, requestedMemory: 256Mi, duration: 1h, wait: 1m}
"""
POD = """
apiVersion: v1
kind: Pod
metadata: {name: worker, namespace: team}
spec:
  nodeSelector: {kubelend.io/reservation: %s}
  containers: [{name: main, image: none, resources: {requests: {cpu: 300m, memory: 64Mi}}}]
"""
OFFLOADING = """
apiVersion: offloading.liqo.io/v1beta1
kind: NamespaceOffloading
metadata: {name: offloading, namespace: team}
spec:
  namespaceMappingStrategy: DefaultName
  podOffloadingStrategy: LocalAndRemote
  clusterSelector: {nodeSelectorTerms: []}
"""

SELDOM = {
    "patch namespaces. in all namespaces": "when somebody has changed its labels",
    "list namespaces. in all namespaces": "when the agent is uninstalled",
    "patch secrets. in all namespaces": "when a handshake is repeated with another nonce",
    "patch identities.authentication.liqo.io in all namespaces": "when a certificate is issued again",
    "patch tenants.authentication.liqo.io in all namespaces": "likewise",
    "get identities.authentication.liqo.io in all namespaces": "likewise",
    "get resourceslices.authentication.liqo.io in all namespaces": "when a slice is resized",
    "patch resourceslices.authentication.liqo.io in all namespaces": "when a requester does not give back",
    "list shadowpods.offloading.liqo.io in all namespaces": "likewise",
    "delete shadowpods.offloading.liqo.io in all namespaces": "likewise",
    "get nodes. in all namespaces": "before nodes are watched",
    "delete nodes. in all namespaces": "when Liqo has left one",
    "patch nodes. in all namespaces": "when a node with pods is removed",
    "create pods/eviction. in all namespaces": "likewise",
    "delete pods. in all namespaces": "likewise, after the deadline",
    "list leases.coordination.k8s.io in all namespaces": "when a node is removed",
    "delete leases.coordination.k8s.io in all namespaces": "likewise",
    "patch foreignclusters.core.liqo.io in all namespaces": "when a provider is gone for good",
    "patch namespacemaps.offloading.liqo.io in all namespaces": "likewise",
    "delete namespacemaps.offloading.liqo.io in all namespaces": "when Liqo has left it",
    "list namespaceoffloadings.offloading.liqo.io in all namespaces": "with spec.namespaces",
    "get namespaceoffloadings.offloading.liqo.io in all namespaces": "likewise",
    "create namespaceoffloadings.offloading.liqo.io in all namespaces": "likewise",
    "patch namespaceoffloadings.offloading.liqo.io in all namespaces": "likewise",
    "delete namespaceoffloadings.offloading.liqo.io in all namespaces": "likewise",
}
"""Rights that a reservation's life need not use, and when they are."""


class Site:
    """Two clusters, rome and bonn. The broker is in rome, which borrows from bonn."""

    def __init__(self, helm, root, rome, bonn):
        self._helm = helm
        self._root = root
        self.rome, self.bonn = rome, bonn

    def helm(self, cluster, *arguments, values=None):
        flags = (f"--kubeconfig={cluster.admin_kubeconfig}", f"--namespace={HOME}")
        given = (f"--timeout={4 * PATIENCE:g}s",)
        if values is not None:
            path = self._root / "values.json"
            path.write_text(json.dumps(values))
            given = (f"--values={path}",)
        return charts.run(self._helm, *arguments, *flags, *given)

    def install(self, cluster, part, values):
        """Returns the notes. The pods run when this returns."""
        chart = charts.CHARTS / f"kubelend-{part}"
        notes = self.helm(cluster, "install", f"kubelend-{part}", chart, values=values)
        name = f"deployment/kubelend-{part}"
        timeout = f"--timeout={PATIENCE:g}s"
        cluster.kubectl("rollout", "status", name, f"--namespace={HOME}", timeout)
        return notes

    def install_all(self):
        """Returns the notes of the agents."""
        self.install(self.rome, "broker", {"store": {"kind": "memory"}})
        return [self.install(cluster, "agent", AGENT) for cluster in (self.rome, self.bonn)]

    def uninstall(self, cluster, part):
        return self.helm(cluster, "uninstall", f"kubelend-{part}")

    def apply(self, cluster, text):
        path = self._root / "applied.yaml"
        path.write_text(text)
        return cluster.kubectl("apply", f"--filename={path}")

    def borrow(self):
        """Returns the reservation, whose virtual node is ready."""
        self.apply(self.rome, REQUEST)
        named = ("resourcerequest/training", "--namespace=team")
        self.rome.kubectl("wait", *named, "--for=condition=Ready", f"--timeout={PATIENCE:g}s")
        path = "-ojsonpath={.status.reservationName}"
        return self.rome.kubectl("get", *named, path)

    def leftovers(self):
        """What is left of Liqo's and of our objects, in both clusters."""
        return [
            f"{cluster.name}: {kind} {one['metadata']['name']}"
            for cluster in (self.rome, self.bonn)
            for kind in PEERING_KINDS
            for one in json.loads(cluster.call("GET", path_of(kind)))["items"]
        ]

    def wait_until_clean(self):
        wait_until(lambda: not self.leftovers(), poll=0.5, explain=self.leftovers)

    def run_documented(self, cluster, page, word):
        """The one block of a page that contains this word."""
        text = (charts.ROOT / "docs" / page).read_text()
        blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
        [script] = [one for one in blocks if word in one]
        subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            check=True,
            env=os.environ
            | {
                "PATH": f"{cluster.assets.kubectl.parent}:{os.environ['PATH']}",
                "KUBECONFIG": str(cluster.admin_kubeconfig),
                "KUBECACHEDIR": str(cluster.directory / "kubectl"),
            },
            timeout=4 * PATIENCE,
        )

    def identity(self):
        """A kubeconfig with which Liqo in rome acts in bonn."""
        path = "-ojsonpath={.data.kubeconfig}"
        secret = ("secret", "kubeconfig-controlplane-bonn", "--namespace=liqo-tenant-bonn")
        found = self._root / "identity.kubeconfig"
        found.write_bytes(base64.b64decode(self.rome.kubectl("get", *secret, path)))
        return found


@pytest.fixture(scope="module")
def site(kube_assets, liqo_assets, helm, certificates, tmp_path_factory):
    try:
        network_namespace.check_permitted()
    except InvalidSettings as error:
        pytest.skip(str(error))
    root = tmp_path_factory.mktemp("install")
    with (
        network_namespace.isolate(),
        servers.run_api_servers(kube_assets, root / "lab") as lab,
        contextlib.ExitStack() as stack,
    ):
        pair = [start(lab, name, liqo_assets, stack) for name in ("rome", "bonn")]
        asyncio.run(install_liqo(pair, liqo_assets))
        site = Site(helm, root, *pair)
        for cluster in pair:
            kube_objects.create_namespace(cluster, HOME)
            add_secret(cluster, "agent-client-tls", certificates.cluster(cluster.name))
        add_secret(site.rome, "broker-server-tls", certificates.server())
        kube_objects.create_namespace(site.rome, "team")
        yield site


def start(lab, name, liqo_assets, stack):
    """A cluster with a node, and with controllers and a stand-in for its kubelet."""
    directory = lab.directory / name
    directory.mkdir(mode=0o700)
    cluster = audited_cluster.Audited(name, lab.assets, lab.etcd, directory, liqo_assets)
    stack.callback(cluster.stop_all)
    for process in (cluster, *cluster.controllers):
        process.start()
        process.wait_until_ready()
    asyncio.run(add_node(cluster))
    kube_objects.create_namespace(cluster, servers.NAMESPACE)
    kubelet = servers.KubeletProcess(cluster, liqo_assets)
    stack.callback(kubelet.stop)
    kubelet.start()
    return cluster


async def add_node(cluster):
    async with kube_objects.opened(cluster) as client:
        await kube_objects.Machines(client).node("a", cpu="16", memory="32Gi")


async def install_liqo(clusters, liqo_assets):
    for step in (servers.install_liqo, servers.wait_until_liqo_runs):
        await asyncio.gather(*(asyncio.to_thread(step, one, liqo_assets) for one in clusters))


def add_secret(cluster, name, directory):
    files = f"--from-file={directory}"
    cluster.kubectl("create", "secret", "generic", name, f"--namespace={HOME}", files)


@pytest.fixture(scope="module")
def notes(site):
    """Of the agents' charts; broker and agents run."""
    return site.install_all()


@pytest.fixture(scope="module")
def life(site, notes):
    """A reservation from request to release, with a pod on its node."""
    reservation = site.borrow()
    site.apply(site.rome, OFFLOADING)
    site.apply(site.rome, POD % reservation)
    running = ("--for=jsonpath={.status.phase}=Running", f"--timeout={PATIENCE:g}s")
    site.rome.kubectl("wait", "pod/worker", "--namespace=team", *running)
    remote = site.bonn.kubectl("get", "pod", "worker", "--namespace=team-rome", "--output=json")
    refusals = [*attempts(site, reservation)]
    site.rome.kubectl("delete", "pod", "worker", "--namespace=team")
    site.rome.kubectl("delete", "namespaceoffloading", "offloading", "--namespace=team")
    site.rome.kubectl("delete", "resourcerequest", "training", "--namespace=team")
    site.wait_until_clean()
    return json.loads(remote), dict(refusals)


def attempts(site, reservation):
    """What a requester tries with its own identity in the provider's cluster: step and answer."""
    identity, namespace = site.identity(), "--namespace=liqo-tenant-rome"

    def attempt(*arguments):
        try:
            return site.bonn.kubectl(*arguments, namespace, kubeconfig=identity)
        except UnexpectedResponse as error:
            return str(error)

    patch = ("patch", SLICES, reservation, "--type=merge")
    raised = '--patch={"status": {"resources": {"cpu": "64"}}}'
    yield "raise", attempt(*patch, "--subresource=status", raised)
    yield "change class", attempt(*patch, '--patch={"spec": {"class": "default"}}')
    yield "note", attempt(*patch, '--patch={"metadata": {"annotations": {"note": "x"}}}')
    found = json.loads(site.bonn.kubectl("get", SLICES, reservation, namespace, "--output=json"))
    found["metadata"] = {"name": "greedy", "namespace": "liqo-tenant-rome"}
    found["spec"]["class"] = "default"
    path = site.bonn.directory / "greedy.json"
    path.write_text(json.dumps(found))
    choose = ("create", "--dry-run=server", f"--filename={path}")
    yield "choose class", attempt(*choose)
    yield "granted", found["status"]["resources"]["cpu"]
    # As in the namespace of another peering of Liqo.
    label = ("label", "namespace", "liqo-tenant-rome", "--overwrite")
    site.bonn.kubectl(*label, "app.kubernetes.io/managed-by=liqoctl")
    wait_until(lambda: "Forbidden" not in attempt(*choose))
    yield "another peering", attempt(*choose)
    site.bonn.kubectl(*label, "app.kubernetes.io/managed-by=kubelend-agent")


def test_reservation_becomes_a_pod_in_the_providers_cluster(life, notes):
    remote, _ = life
    assert remote["status"]["phase"] == "Running"
    assert remote["metadata"]["labels"]["offloading.liqo.io/origin"] == "rome"
    assert all("Peering: liqo" in text for text in notes)


def test_requester_can_neither_grant_itself_more_nor_choose_a_class(life):
    _, answers = life
    assert "(Forbidden)" in answers["raise"]
    assert "only the provider may write the status" in answers["raise"]
    for step in ("change class", "choose class"):
        assert "(Forbidden)" in answers[step]
        assert "only ResourceSlices of class kubelend" in answers[step]
    assert "patched" in answers["note"]
    assert "created" in answers["another peering"]
    assert answers["granted"] == "500m"


@pytest.mark.parametrize("name", ["rome", "bonn"])
def test_nothing_is_refused_to_the_agents(life, site, name):
    assert getattr(site, name).refused(ACCOUNT) == []


def test_no_right_for_liqo_is_granted_that_nobody_uses(life, site):
    used = site.rome.rights_used(ACCOUNT) | site.bonn.rights_used(ACCOUNT)
    roles = charts.of_kind(charts.rendered("agent", "components/liqo"), "Role", "ClusterRole")
    rights = audited_cluster.granted(roles)
    assert {str(one) for one in rights if not audited_cluster.covers(one, used)} <= SELDOM.keys()
    assert SELDOM.keys() <= {str(one) for one in rights}


def test_agent_may_change_only_what_belongs_to_a_peering(life, site):
    """RBAC alone would let it create and delete any namespace, and any Secret."""
    agent = site.bonn.kubeconfig_of_account("kubelend-agent", HOME)
    kube_objects.create_namespace(site.bonn, "liqo-tenant-other")
    site.bonn.kubectl("run", "local", "--image=none", "--namespace=default")
    eviction = site.bonn.directory / "eviction.json"
    names = {"name": "local", "namespace": "default"}
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": names}
    eviction.write_text(json.dumps(body))
    secret = ("create", "secret", "generic")
    for refused in (
        ("create", "namespace", "mine"),
        ("delete", "namespace", HOME),
        ("delete", "namespace", "liqo-tenant-other"),
        (*secret, "mine", "--namespace=liqo-tenant-other"),
        (*secret, "liqo-nonce", f"--namespace={HOME}"),
        ("delete", "secret", "agent-client-tls", f"--namespace={HOME}"),
        ("label", "node", "a", "note=x"),
        ("delete", "pod", "local", "--namespace=default"),
        ("create", "-f", str(eviction), "--raw=/api/v1/namespaces/default/pods/local/eviction"),
        ("delete", "lease", "a", "--namespace=kube-node-lease"),
        ("get", "secret", "agent-client-tls", f"--namespace={HOME}"),
        ("get", "secrets", "--namespace=liqo"),
    ):
        with pytest.raises(UnexpectedResponse, match=r"(?i)forbidden"):
            site.bonn.kubectl(*refused, kubeconfig=agent)
    site.bonn.kubectl("delete", "namespace", "liqo-tenant-other")
    site.bonn.kubectl("delete", "pod", "local", "--namespace=default")


def test_uninstalling_an_agent_gives_back_what_it_has_borrowed(life, site):
    site.borrow()
    site.uninstall(site.rome, "agent")
    site.wait_until_clean()
    named = ("resourcerequest", "training", "--namespace=team", "--output=json")
    found = json.loads(site.rome.kubectl("get", *named))
    assert found["status"]["phase"] == "Released"
    assert "finalizers" not in found["metadata"]
    site.rome.kubectl("delete", "resourcerequest", "training", "--namespace=team")
    assert "NotFound" not in site.install(site.rome, "agent", AGENT)


def test_nothing_is_left_by_the_commands_for_agents_that_are_gone(life, site):
    """Those of the documentation, in both clusters."""
    site.borrow()
    for cluster in (site.rome, site.bonn):
        site.helm(cluster, "uninstall", "kubelend-agent", "--no-hooks")
    for cluster in (site.rome, site.bonn):
        for page, word in (("deploy.md", "finalizers"), ("liqo.md", "ours=")):
            site.run_documented(cluster, page, word)
        for name in ("rome", "bonn"):
            cluster.kubectl("delete", FOREIGN_CLUSTERS, name, "--ignore-not-found")
    site.wait_until_clean()
    site.rome.kubectl("delete", "resourcerequest", "training", "--namespace=team")
    site.uninstall(site.rome, "broker")  # which still has the reservation
    site.install_all()


def test_agents_can_be_uninstalled_without_broker_and_agent(life, site):
    site.borrow()
    site.uninstall(site.rome, "broker")
    stop = ("scale", "deployment", "kubelend-agent", "--replicas=0")
    site.rome.kubectl(*stop, f"--namespace={HOME}")
    for cluster in (site.rome, site.bonn):
        site.uninstall(cluster, "agent")
    site.wait_until_clean()
    deleted = site.rome.kubectl("delete", "resourcerequest", "training", "--namespace=team")
    assert "deleted" in deleted
