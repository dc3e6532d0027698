"""Broker and agents under exactly the roles, flags and accounts that we ship: a reservation's whole life."""

import asyncio
import contextlib

import pytest

import audited_cluster
import broker_process
import charts
import kube_agents
import kube_objects
import shipped
from audited_cluster import Right
from kubelend.core.errors import UnexpectedResponse
from kubelend.envtest import servers
from kubelend.kube import resources
from kubelend.wire import cluster_namespaces
from kubelend.wire.broker_objects import ClusterAdvertisement, PlacementReview, Reservation
from kubelend.wire.objects import (
    Advertisement,
    ProviderInstruction,
    ReservationInstruction,
    ResourceRequest,
)
from shipped import HOME
from waiting import PATIENCE

pytestmark = pytest.mark.timeout(240)

PODS = ("kubelend-broker-0", "kubelend-broker-1")
"""Of the brokers, which nobody runs: but their labels are set."""

NAMESPACE = "cluster-bonn"

ACCOUNTS = [
    ("hub", f"{HOME}/kubelend-broker"),
    ("hub", f"{HOME}/kubelend-agent"),
    ("hub", f"{NAMESPACE}/{cluster_namespaces.AGENT_ACCOUNT}"),
    ("lender", f"{HOME}/kubelend-agent"),
]

TOO_MUCH = """
apiVersion: rear.fluidos.eu/v1alpha1
kind: ResourceRequest
metadata: {name: too-much, namespace: team}
spec: {requestedCPU: "500", requestedMemory: 256Mi, duration: 1h}
"""

GHOSTS = """
apiVersion: broker.fluidos.eu/v1alpha1
kind: Reservation
metadata: {name: orphan, namespace: kubelend, labels: {broker.fluidos.eu/managed-by: broker}}
spec: {requesterID: rome, requestedResources: {cpu: 250m, memory: 128Mi}, duration: 1h}
---
apiVersion: broker.fluidos.eu/v1alpha1
kind: ClusterAdvertisement
metadata: {name: orphan-adv, namespace: kubelend, labels: {broker.fluidos.eu/managed-by: broker}}
spec:
  clusterID: orphan
  resources:
    capacity: {cpu: "1", memory: 1Gi}
    allocatable: {cpu: "1", memory: 1Gi}
    allocated: {cpu: "0", memory: "0"}
    available: {cpu: "1", memory: 1Gi}
"""
"""What a broker has written that another has forgotten."""

REQUEST = """
apiVersion: rear.fluidos.eu/v1alpha1
kind: ResourceRequest
metadata: {name: training, namespace: team}
spec: {requestedCPU: 500m, requestedMemory: 256Mi, duration: 1h}
"""

SELDOM = {
    "broker": {
        "patch ledgerrecords.broker.fluidos.eu in kubelend": "when a membership changes",
        "delete placementreviews.broker.fluidos.eu in kubelend": "ten minutes after they were created",
        "delete ledgerrecords.broker.fluidos.eu in kubelend": "when it or old lines of the audit log end",
    },
    "agent": {
        "get reservationinstructions.rear.fluidos.eu in kubelend": "when somebody else changes one",
        "get providerinstructions.rear.fluidos.eu in kubelend": "likewise",
        "patch reservationinstructions.rear.fluidos.eu in kubelend": "with a peering, or when it is renewed",
        "patch providerinstructions.rear.fluidos.eu in kubelend": "when a reservation is renewed",
        # There is no scheduler here: tests/kube/test_placeholders.py uses the rest.
        "create pods. in kubelend": "when there is room for placeholders",
        "delete pods. in kubelend": "when they are handed over, or no longer needed",
        "patch pods. in all namespaces": "when room is handed over to a requester's pod",
        "patch pods/status. in all namespaces": "likewise",
        "get pods. in all namespaces": "when somebody else has removed its gate",
        "use priorityclasses.scheduling.k8s.io in all namespaces": "asked for by a policy",
    },
    "cluster namespace": {
        "get reservations.broker.fluidos.eu in cluster-bonn": "when it asks again, or has to wait long",
        "update leases.coordination.k8s.io in cluster-bonn": "when it is renewed or released",
        "list clusteradvertisements.broker.fluidos.eu in cluster-bonn": "when people look",
    },
}
"""Rights that the lives below need not use, and when they are."""

RENEWAL = Right(HOME, "coordination.k8s.io", "leases", "update")
"""Of the lease by which an agent leads; the rest may be over before the first one."""

BY_HAND = """
apiVersion: broker.fluidos.eu/v1alpha1
kind: Reservation
metadata: {name: by-hand, namespace: kubelend}
spec: {requesterID: bonn, requestedResources: {cpu: 250m, memory: 128Mi}, duration: 1h}
---
apiVersion: broker.fluidos.eu/v1alpha1
kind: PlacementReview
metadata: {name: by-hand, namespace: kubelend}
spec: {reservationName: by-hand}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("roles")


@pytest.fixture(scope="module")
def hub(lab):
    """Where the brokers are, the borrower's agent, and the provider's cluster namespace."""
    with installed(lab, "hub", "broker", "agent") as cluster:
        shipped.apply(cluster, cluster_namespaces.cluster_namespace_manifests("bonn", NAMESPACE))
        asyncio.run(add_pods(cluster))
        yield cluster


@pytest.fixture(scope="module")
def lender(lab):
    with installed(lab, "lender", "agent-by-namespace") as cluster:
        yield cluster


@contextlib.contextmanager
def installed(lab, name, *parts):
    """A cluster with a node, and with what we ship for these, all but the Deployments."""
    cluster = audited_cluster.started(lab, name)
    try:
        for namespace in (HOME, "team"):
            kube_objects.create_namespace(cluster, namespace)
        servers.install_crds(cluster)
        shipped.install(cluster, *parts)
        asyncio.run(add_node(cluster))
        yield cluster
    finally:
        cluster.kill()


async def add_pods(cluster):
    async with kube_objects.opened(cluster) as client:
        for pod in PODS:
            await kube_objects.Machines(client, HOME).pod(pod)


async def add_node(cluster):
    async with kube_objects.opened(cluster) as client:
        machines = kube_objects.Machines(client)
        await machines.node("a", cpu="4", memory="8Gi")
        await machines.pod("p", "a", cpu="1", memory="1Gi")


def account(cluster, part):
    return cluster.kubeconfig_of_account(f"kubelend-{part}", HOME)


@pytest.fixture(scope="module")
def brokers(hub, certificates, root):
    """Two, of which the first leads."""
    with contextlib.ExitStack() as stack:
        found = []
        for pod in PODS:
            (root / pod).mkdir()
            flags = shipped.flags("broker", "--http-cert-path", "--store", "--grant-key", pod=pod)
            store = f"--store=kubernetes://{account(hub, 'broker')}"
            running = broker_process.running(
                certificates.server(), root / pod, *flags, store, "--retention=2s"
            )
            found.append(stack.enter_context(running))
        yield found


@contextlib.contextmanager
def agent(name, cluster, directory, *flags):
    with kube_agents.running(
        cluster, account(cluster, "agent"), directory / name, *flags, "--finished-for=0s"
    ) as running:
        running.wait_until_ready()
        yield running


@pytest.fixture(scope="module")
def bonn(brokers, hub, lender, root):
    """Knows the API server of the brokers' cluster, and not the brokers."""
    kubeconfig = hub.kubeconfig_of_account(cluster_namespaces.AGENT_ACCOUNT, NAMESPACE)
    flags = (
        *shipped.flags(
            "agent-by-namespace", "--broker-kubeconfig", "--broker-namespace", "--cluster-id"
        ),
        f"--broker-kubeconfig={kubeconfig}",
        f"--broker-namespace={NAMESPACE}",
        "--cluster-id=bonn",
    )
    with agent("bonn", lender, root, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def rome(brokers, hub, certificates, root):
    flags = (
        *shipped.flags("agent", "--broker-cert-path"),
        f"--broker-url={brokers[0].url}",
        f"--broker-cert-path={certificates.cluster('rome')}",
    )
    with agent("rome", hub, root, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def life(bonn, rome, brokers, hub):
    """Requests both ways that become promises at both ends and are given back, and a change of the leader;
    all of it seen by the audit of both clusters."""
    for each in (bonn, rome):
        each.shows(Advertisement, "cluster-advertisement", lambda one: one.status.published, HOME)
    lives = [live(rome, bonn), live(bonn, rome)]
    bonn.apply(TOO_MUCH)
    bonn.shows(ResourceRequest, "too-much", has("Failed"), "team")
    rome.apply(GHOSTS)
    for kind, name in ((Reservation, "orphan"), (ClusterAdvertisement, "orphan-adv")):
        rome.wait_for(lambda kind=kind, name=name: rome.find_in(kind, name, HOME) is None)
    rome.wait_for(lambda: not objects_in_namespace(hub))
    hub.kubectl("label", "pod", PODS[0], f"--namespace={HOME}", "kubelend.io/role-")
    rome.wait_for(lambda: leading(hub) == [PODS[0]])
    leader = [leading(hub)]
    brokers[0].process.terminate()
    brokers[0].process.wait(PATIENCE)
    hub.kubectl("delete", "pod", PODS[0], f"--namespace={HOME}", "--force")  # with its process
    rome.wait_for(lambda: leading(hub) == [PODS[1]])
    reserve_by_hand(rome)
    rome.wait_for(lambda: RENEWAL in hub.rights_used(f"{HOME}/kubelend-agent"))
    return lives, [*leader, leading(hub)]


def live(borrower, lender):
    """Gives the request as it was, and the state of the broker about it."""
    borrower.apply(REQUEST)
    found = borrower.shows(ResourceRequest, "training", has("Reserved"), "team")
    reservation = found.status.reservation_name
    lender.shows(ProviderInstruction, f"{reservation}-provider", has("Held"), HOME)
    borrower.shows(ReservationInstruction, reservation, has("NotPeered"), HOME)
    borrower.cluster.kubectl("delete", "resourcerequest", "training", "--namespace=team")
    for one, kind, name in (
        (lender, ProviderInstruction, f"{reservation}-provider"),
        (borrower, ReservationInstruction, reservation),
    ):
        one.wait_for(lambda one=one, kind=kind, name=name: one.find_in(kind, name, HOME) is None)
    return found


def objects_in_namespace(hub):
    """What was said there, until the ledger archives it."""
    kinds = (resources.resource_for(kind) for kind in (Reservation, ProviderInstruction))
    return [one for kind in kinds for one in kube_objects.listed(hub, kind.path(NAMESPACE))]


def leading(hub):
    """The pods that the Service chooses."""
    [service] = (
        one
        for one in charts.of_kind(shipped.part("broker"), "Service")
        if one["metadata"]["name"] == "liqo-resource-broker"
    )
    wanted = f"kubelend.io/role={service['spec']['selector']['kubelend.io/role']}"
    found = kube_objects.listed(hub, f"/api/v1/namespaces/{HOME}/pods?labelSelector={wanted}")
    return [one["metadata"]["name"] for one in found]


def reserve_by_hand(rome):
    """As somebody who has the editor's role in the broker's namespace, and no other."""
    role = "kubelend-broker-reservations-editor"
    flags = (f"--clusterrole={role}", "--user=alice", f"--namespace={HOME}")
    rome.cluster.kubectl("create", "rolebinding", "alice", *flags)
    alice = rome.cluster.kubeconfig_for("alice")
    reviews = "kubelend-broker-placementreviews-editor"
    flags = (f"--clusterrole={reviews}", "--user=alice", f"--namespace={HOME}")
    rome.cluster.kubectl("create", "rolebinding", "alice-reviews", *flags)
    path = rome.directory / "by-hand.yaml"
    path.write_text(BY_HAND)
    rome.cluster.kubectl("apply", f"--filename={path}", kubeconfig=alice)
    rome.shows(Reservation, "by-hand", has("Reserved"), HOME)
    rome.wait_for(lambda: bool(objects_in_namespace(rome.cluster)))
    rome.shows(PlacementReview, "by-hand", lambda found: bool(found.status.conditions), HOME)
    rome.cluster.kubectl("delete", "--timeout=30s", f"--filename={path}", kubeconfig=alice)


def has(phase):
    return lambda found: found.status.phase == phase


def test_reservations_live_under_the_shipped_roles(life):
    lives, _ = life
    assert [found.status.target_cluster_id for found in lives] == ["bonn", "rome"]


def test_service_finds_the_broker_that_leads(life):
    _, leaders = life
    assert leaders == [[PODS[0]], [PODS[1]]]


@pytest.mark.parametrize("cluster, account", ACCOUNTS, ids=str)
def test_nothing_is_refused(life, request, cluster, account):
    assert request.getfixturevalue(cluster).refused(account) == []


def unused(roles, used):
    """What a Role grants in its namespace counts there; a ClusterRole has to be needed elsewhere."""
    rights = audited_cluster.granted(roles)
    elsewhere = used - {right for right in rights if right.namespace}
    return {
        str(right)
        for right in rights
        if not audited_cluster.covers(right, used if right.namespace else elsewhere)
    }


def roles(part):
    if part == "cluster namespace":
        return charts.of_kind(
            cluster_namespaces.cluster_namespace_manifests("bonn", NAMESPACE), "Role"
        )
    return shipped.roles(part)


@pytest.mark.parametrize(
    "part, account",
    [
        ("broker", f"{HOME}/kubelend-broker"),
        ("agent", f"{HOME}/kubelend-agent"),
        ("cluster namespace", f"{NAMESPACE}/{cluster_namespaces.AGENT_ACCOUNT}"),
    ],
)
def test_nothing_is_granted_that_nobody_uses(life, hub, lender, part, account):
    used = hub.rights_used(account) | lender.rights_used(account)
    assert unused(roles(part), used) <= SELDOM[part].keys()


@pytest.mark.parametrize("part", SELDOM)
def test_every_right_that_is_seldom_used_is_granted(part):
    assert SELDOM[part].keys() <= {str(one) for one in audited_cluster.granted(roles(part))}


@pytest.mark.parametrize(
    "refused",
    [
        ("get", "secrets", f"--namespace={HOME}"),
        ("get", "pods", "--all-namespaces"),
        ("get", "ledgerrecords", "--namespace=team"),
        ("delete", "clusteradvertisement", "x", "--namespace=team"),
        ("delete", "lease", "kubelend-broker", f"--namespace={HOME}"),
        ("get", "lease", "another", f"--namespace={HOME}"),
        ("create", "role", "x", "--verb=get", "--resource=pods", f"--namespace={HOME}"),
    ],
    ids=" ".join,
)
def test_broker_may_do_nothing_else(hub, refused):
    with pytest.raises(UnexpectedResponse, match="forbidden"):
        hub.kubectl(*refused, kubeconfig=account(hub, "broker"))
