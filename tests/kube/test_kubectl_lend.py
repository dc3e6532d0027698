"""`kubectl lend` in the clusters of a whole set-up, with more and with fewer permissions."""

import json
import re
import secrets
import signal
from pathlib import Path

import pytest

import kube_objects
import kubectl_lend
import processes
from kubelend.envtest import servers
from kubelend.kube import resources
from kubelend.lab import hosts
from kubelend.wire import cluster_namespaces, crds
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation
from kubelend.wire.objects import ResourceRequest
from waiting import wait_until

pytestmark = pytest.mark.timeout(180)

AGENT, PROVIDER = hosts.AGENT_CLUSTERS
REQUESTS = "resourcerequests.rear.fluidos.eu"
BORROW = ("borrow", "--cpu", "500m", "--memory", "256Mi")
LOOK, CHANGE = "get,list,watch", "get,list,watch,create,update,patch,delete"
"""What the shipped viewer and editor roles give."""


class Site:
    """Three clusters with a broker and two agents, and people who use them."""

    def __init__(self, directory: Path, assets):
        self.directory = directory
        self.assets = assets
        self.operator = kubectl_lend.user(assets, directory / "kubeconfig", directory.parent)

    def kubectl(self, context, *arguments):
        said = self.operator.run("kubectl", f"--context={context}", *arguments)
        assert said.code == 0, said.err
        return said.out

    def add_user(self, context, name, rules, namespace="team"):
        """A service account with these rights (verbs by kind) in the namespace."""
        administrator = Path(self.record["clusters"][context])
        path = kubectl_lend.service_account(administrator, self.assets, name, rules, namespace)
        return kubectl_lend.user(self.assets, path, self.directory.parent)

    @property
    def record(self):
        return json.loads((self.directory / "lab.json").read_text())

    def requests(self, context, namespace="team"):
        return self.kubectl(context, "get", "resourcerequests", f"-n{namespace}", "-oname").split()

    def is_reserved(self, cpu):
        path = "{.spec.resources.reserved.cpu}"
        advertisement = f"clusteradvertisement/{PROVIDER}-adv"
        return self.kubectl(hosts.BROKER_CLUSTER, "get", advertisement, f"-ojsonpath={path}") == cpu


@pytest.fixture(scope="module")
def site(plain_lab, kube_assets):
    site = Site(plain_lab[0].directory, kube_assets)
    for name in (AGENT, hosts.BROKER_CLUSTER):
        site.kubectl(name, "create", "namespace", "team")
    return site


@pytest.fixture(scope="module")
def developer(site):
    """May borrow in one namespace of an agent's cluster, and nothing else."""
    return site.add_user(AGENT, "developer", {REQUESTS: CHANGE})


@pytest.fixture(scope="module")
def stranger(site):
    return site.add_user(AGENT, "stranger", {})


def name_in(text):
    [name] = set(re.findall(r"\blend-[0-9a-f]+", text))
    return name


def test_developer_borrows_lists_and_releases_with_a_kubeconfig_only(site, developer):
    borrowed = developer.run("kubectl", "lend", *BORROW, "--for", "2h")
    assert (borrowed.code, borrowed.err) == (0, "")
    name = name_in(borrowed.out)
    assert re.fullmatch(rf"{name} is (Reserved|Active) on {PROVIDER} for 2h\n", borrowed.out)
    wait_until(lambda: site.is_reserved("500m"), poll=0.2)

    shown = developer.lend("get", "reservations").out
    assert re.search(rf"^{name} +(Reserved|Active) +- +{PROVIDER} +500m +256Mi +\d+s$", shown, re.M)
    assert max(map(len, shown.splitlines())) <= 80
    described = developer.lend("describe", "reservation", name).out
    [reservation] = re.findall(r"^Reservation: +(rsv-\S+)$", described, re.M)
    assert f"Target:       {PROVIDER}\n" in described

    # The broker's name for it is as good as its own.
    assert developer.lend("release", reservation) == (0, f"{name} is Released: released\n", "")
    assert site.requests(AGENT) == []
    wait_until(lambda: site.is_reserved("0"), poll=0.2)
    said = developer.lend("get", "reservations")
    assert said == (0, "", "No reservations found in namespace team.\n")


def test_same_key_borrows_once_and_another_request_with_it_is_rejected(site, developer):
    first, second = (developer.lend(*BORROW, "--key", "deploy-7", "-oname") for _ in range(2))
    assert (first.code, second) == (0, first)
    assert len(site.requests(AGENT)) == 1
    other = developer.lend("borrow", "--cpu=2", "--memory=1Gi", "--key=deploy-7")
    assert (other.code, other.out) == (2, "")
    assert "requests something else; use a new key" in other.err
    assert developer.lend("release", first.out.strip()).code == 0


def test_request_that_does_not_fit_is_reported_with_a_suggestion_and_leaves_nothing(
    site, developer
):
    said = developer.lend("borrow", "--cpu", "500", "--memory", "256Mi")
    assert (said.code, said.out) == (5, "")
    assert re.search(r"a cluster fits if you request \d+m? cpu less\n$", said.err)
    wait_until(lambda: site.requests(AGENT) == [], poll=0.2)


@pytest.mark.parametrize("context", [AGENT, hosts.BROKER_CLUSTER])
def test_rejected_request_has_the_error_of_the_broker(site, context):
    said = site.operator.lend(*BORROW, "--for=90000h", "--context", context)
    assert (said.code, said.out) == (2, "")
    assert said.err.startswith("error: --for: ")


@pytest.mark.parametrize("command", [("get", "reservations"), BORROW, ("release", "x")], ids=str)
def test_missing_permissions_are_reported(stranger, command):
    said = stranger.lend(*command)
    assert (said.code, said.out, said.err.count("\n")) == (4, "", 1)
    assert 'User "system:serviceaccount:team:stranger" cannot' in said.err
    assert "the role `view` in the namespace allows reading, `edit` borrowing" in said.err


def test_viewer_can_read_and_not_borrow(site):
    viewer = site.add_user(AGENT, "viewer", {REQUESTS: LOOK})
    assert viewer.lend("get", "reservations").code == 0
    said = viewer.lend(*BORROW)
    assert said.code == 4
    assert "cannot create resource" in said.err
    everywhere = viewer.lend("get", "reservations", "--all-namespaces")
    assert everywhere.code == 4
    assert "at the cluster scope" in everywhere.err


def test_operator_sees_clusters_in_the_brokers_context(site):
    said = site.operator.lend("get", "clusters")
    assert (said.code, said.err) == (0, "")
    rows = [line.split()[:2] for line in said.out.splitlines()[1:]]
    assert rows == [[AGENT, "Active"], [PROVIDER, "Active"]]
    assert max(map(len, said.out.splitlines())) <= 80
    body = json.loads(site.operator.lend("get", "clusters", PROVIDER, "-ojson").out)
    assert body["advertisement"]["resources"]["available"]["cpu"] == "8950m"
    described = site.operator.lend("describe", "cluster", PROVIDER).out
    assert re.search(r"^cpu +10 +10 +1050m +0 +8950m$", described, re.M)
    assert site.operator.lend("describe", "cluster", "nowhere").code == 3


def test_operator_borrows_in_the_brokers_cluster_by_reservations(site):
    name = name_in(site.operator.lend(*BORROW).out)
    wait_until(lambda: site.is_reserved("500m"), poll=0.2)
    listed = site.operator.lend("get", "reservations", "--phase=Reserved", "-owide").out
    assert re.search(rf"^{name} .* default ", listed, re.M)
    assert site.operator.lend("release", name).out == f"{name} is Released: released\n"
    wait_until(lambda: site.is_reserved("0"), poll=0.2)
    assert site.operator.lend("release", name).code == 3


def test_operator_explains_requests_and_reservations(site):
    said = site.operator.lend("explain", "--cpu=500", "--memory=1Gi")
    assert (said.code, said.err) == (0, "")
    assert re.search(
        rf"^{PROVIDER} +no +.*InsufficientCPU: request \d+m? cpu less$", said.out, re.M
    )
    planned = site.operator.lend("borrow", "--cpu=1", "--memory=1Gi", "--dry-run", "-oname").out
    assert f"cluster/{PROVIDER}\n" in planned
    name = name_in(site.operator.lend(*BORROW).out)
    assert PROVIDER in site.operator.lend("explain", name).out
    invalid = site.operator.lend("explain", "--cpu=1", "--memory=1Gi", "--for=90000h")
    assert (invalid.code, invalid.err.startswith("error: --for: ")) == (2, True)
    assert site.operator.lend("explain", "nothing").code == 3
    assert site.operator.lend("release", name).code == 0
    assert site.kubectl(hosts.BROKER_CLUSTER, "get", "placementreviews", "-A") == ""
    assert site.operator.lend("get", "reservations", "--phase=Reserved,Active").out == ""
    said = site.operator.lend("explain", "--cpu=1", "--memory=1Gi", "--context", AGENT)
    assert "only the broker's cluster explains requests; select it with" in said.err


def test_operator_cordons_drains_and_uncordons(site):
    said = site.operator.lend("cordon", PROVIDER, "--reason=new switch")
    assert said == (0, f"cluster/{PROVIDER} cordoned\n", "")
    described = site.operator.lend("describe", "cluster", PROVIDER).out
    assert re.search("^Cordon reason: +new switch$", described, re.M)
    site.operator.lend("uncordon", PROVIDER)
    name = name_in(site.operator.lend(*BORROW, "--cluster", PROVIDER).out)

    asked = site.operator.lend("drain", PROVIDER)
    assert (asked.code, "add --yes, or --dry-run" in asked.err) == (2, True)
    planned = site.operator.lend("drain", PROVIDER, "--dry-run").out
    assert f"{PROVIDER} would be cordoned, and 1 reservation moved or released" in planned
    assert name in planned
    drained = site.operator.lend("drain", PROVIDER, "--yes")
    assert (drained.code, drained.err) == (0, "")
    assert f"cluster/{PROVIDER} drained: 0 moved to other clusters, 1 released" in drained.out
    assert re.search(rf"^{name} +Released +default ", drained.out, re.M)
    assert site.operator.lend("uncordon", PROVIDER).out == f"cluster/{PROVIDER} uncordoned\n"
    assert site.operator.lend("cordon", "nowhere").code == 3


def test_only_administrators_cordon(site):
    kinds = {"clusteradvertisements.broker.fluidos.eu": LOOK}
    viewer = site.add_user(hosts.BROKER_CLUSTER, "watcher", kinds, "default")
    assert viewer.lend("get", "clusters").code == 0
    said = viewer.lend("cordon", PROVIDER)
    assert (said.code, said.out) == (4, "")
    assert "cannot patch resource" in said.err
    assert "`admin` draining" in said.err


def test_provider_sees_the_requesters(site, developer):
    name = developer.lend(*BORROW, "-oname").out.strip().removeprefix("reservation/")
    lends = ("get", "reservations", "--role=provider", "--phase=Reserved", "-owide")
    wait_until(lambda: AGENT in site.operator.lend(*lends, "--context", PROVIDER).out, poll=0.2)
    everywhere = site.operator.lend("get", "reservations", "-A", "-oname", "--context", AGENT).out
    assert everywhere == f"reservation/team/{name}\n"
    assert site.operator.lend("release", everywhere.strip(), "--context", AGENT).code == 0


def test_agents_cluster_has_no_other_clusters(site):
    said = site.operator.lend("get", "clusters", "--context", AGENT)
    assert (said.code, said.out) == (2, "")
    assert "only the broker's cluster has the list of clusters; select it with" in said.err


def test_request_without_a_response_is_deleted(site):
    """There are ResourceRequests in the broker's cluster, and no agent."""
    said = site.operator.lend(*BORROW, "-nteam", "--timeout=1s")
    assert (said.code, said.out) == (7, "")
    assert (
        "was not reconciled within 1s: Not reconciled by an agent yet; it was deleted" in said.err
    )
    assert site.requests(hosts.BROKER_CLUSTER) == []


def test_watch_shows_each_change_until_it_is_interrupted(site, developer):
    name = developer.lend(*BORROW, "-oname").out.strip().removeprefix("reservation/")
    watch = developer.start("kubectl", "lend", "get", "reservations", "--watch")
    assert watch.stdout is not None
    assert watch.stdout.readline().startswith("NAME")
    developer.lend("release", name)
    phases = []
    while "Released" not in phases:
        shown, phase, *_ = watch.stdout.readline().split()
        assert shown == name
        phases.append(phase)
    assert phases[0] in {"Reserved", "Active"}
    watch.send_signal(signal.SIGINT)
    assert processes.finished(watch)[::2] == (130, "")


# -- where it looks

AMOUNTS = {"cpu": "4", "memory": "8Gi"}
RECORD = {"revision": 1, "checksum": "0", "data": "{}"}


@pytest.fixture(scope="module")
def empty(lab):
    """A cluster that knows none of our kinds yet."""
    [cluster] = lab.start(f"empty-{secrets.token_hex(4)}")
    yield cluster
    cluster.kill()


@pytest.fixture(scope="module")
def operator(empty):
    return kubectl_lend.user(empty.assets, empty.admin_kubeconfig, empty.directory)


def define(cluster, *kinds):
    servers.create_crds(cluster, map(crds.crd, kinds))


def create_advertisement(cluster, namespace, name):
    """An advertisement as a broker has it in its own namespace."""
    shares = dict.fromkeys(("capacity", "allocated", "available"), AMOUNTS)
    found = {
        "apiVersion": f"{ClusterAdvertisement.group}/{ClusterAdvertisement.version}",
        "kind": ClusterAdvertisement.kind,
        "metadata": {"name": f"{name}-adv", "namespace": namespace},
        "spec": {"clusterID": name, "resources": shares},
    }
    path = resources.resource_for(ClusterAdvertisement).path(namespace)
    found = json.loads(cluster.call("POST", path, json.dumps(found).encode()))
    found["status"] = {"phase": "Active", "active": True, "score": "50.00", "record": RECORD}
    cluster.call("PUT", f"{path}/{name}-adv/status", json.dumps(found).encode())


def test_each_kind_of_cluster_is_told_apart_by_what_it_serves(empty, operator):
    said = operator.lend("get", "reservations")
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert f"the cluster of context '{empty.name}' serves neither ResourceRequests nor" in said.err
    assert (
        "install Kubelend there (docs/deploy.md), or select another with --kube-context" in said.err
    )
    define(empty, ResourceRequest)
    said = operator.lend("get", "reservations")
    assert said == (0, "", "No reservations found in namespace default.\n")

    # An agent's cluster that is also the broker's.
    define(empty, ClusterAdvertisement, Reservation)
    kube_objects.create_namespace(empty, "lending")
    create_advertisement(empty, "lending", "rome")
    want = ("borrow", "--cpu=1", "--memory=1Gi", "--timeout=1s")
    assert "Not reconciled by a broker yet" in operator.lend(*want, "-nlending").err
    assert "Not reconciled by an agent yet" in operator.lend(*want).err
    assert operator.lend("get", "clusters", "-oname").out == "cluster/rome\n"


@pytest.fixture(scope="module")
def brokers(empty, operator):
    """A cluster of brokers alone, of which there is none yet; the last test leaves two."""
    for kind in (ResourceRequest, ClusterAdvertisement, Reservation):
        empty.kubectl("delete", "crd", "--ignore-not-found", f"{kind.plural}.{kind.group}")
    define(empty, ClusterAdvertisement, Reservation)
    return operator


def test_requester_in_a_cluster_namespace_is_its_cluster(empty, brokers):
    kube_objects.create_namespace(empty, "mail-7", **{cluster_namespaces.CLUSTER_LABEL: "rome"})
    kube_objects.create_namespace(empty, "team")
    for namespace in ("mail-7", "team"):
        body = {
            "apiVersion": f"{Reservation.group}/{Reservation.version}",
            "kind": Reservation.kind,
            "metadata": {"name": "mine", "namespace": namespace},
            "spec": {"requestedResources": AMOUNTS},
        }
        path = resources.resource_for(Reservation).path(namespace)
        empty.call("POST", path, json.dumps(body).encode())

    def requesters(*flags):
        found = json.loads(brokers.lend("get", "reservations", "-ojson", *flags).out)
        return [(one["id"], one["requesterID"]) for one in found["items"]]

    assert requesters("-nmail-7") == requesters("-nmail-7", "--cluster=rome") == [("mine", "rome")]
    assert requesters("-nteam") == [("mine", "team")]
    assert requesters("-A") == [("mail-7/mine", "rome"), ("team/mine", "team")]


def test_brokers_namespace_is_found_unless_there_are_several(empty, brokers):
    assert brokers.lend("get", "clusters").err == "No clusters found in namespace default.\n"
    kube_objects.create_namespace(empty, "only")
    create_advertisement(empty, "only", "rome")
    assert brokers.lend("get", "clusters", "-oname").out == "cluster/rome\n"
    assert brokers.lend("get", "reservations").err == "No reservations found in namespace only.\n"

    kube_objects.create_namespace(empty, "other")
    create_advertisement(empty, "other", "oslo")
    said = brokers.lend("get", "clusters")
    assert (said.code, said.out) == (2, "")
    assert "brokers in the namespaces only, other; select one with --namespace" in said.err
    assert brokers.lend("get", "clusters", "-oname", "-nother").out == "cluster/oslo\n"
