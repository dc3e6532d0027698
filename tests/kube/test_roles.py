"""Broker and agents under exactly the roles, flags and accounts that we ship: a reservation's whole life."""

import asyncio
import contextlib
import json

import pytest

import audited_cluster
import broker_process
import charts
import kube_agents
import kube_objects
import kube_roles
from kubelend.core.errors import UnexpectedAnswer
from kubelend.lab import manifests
from kubelend.wire.broker_objects import Reservation
from kubelend.wire.objects import (
    Advertisement,
    ProviderInstruction,
    ReservationInstruction,
    ResourceRequest,
)

pytestmark = pytest.mark.timeout(240)

HOME = "kubelend"
"""The namespace of all that we ship."""

POD = "kubelend-broker-0"
"""The broker's, which nobody runs: but its label is set."""

WISH = """
apiVersion: rear.fluidos.eu/v1alpha1
kind: ResourceRequest
metadata: {name: training, namespace: team}
spec: {requestedCPU: 500m, requestedMemory: 256Mi, duration: 1h}
"""

SELDOM = {
    "broker": {
        "delete clusteradvertisements.broker.fluidos.eu": "when a cluster is removed",
        "delete reservations.broker.fluidos.eu": "when the archive's time is over",
        "delete ledgerrecords.broker.fluidos.eu": "when a membership or old lines of the journal end",
        "patch ledgerrecords.broker.fluidos.eu": "when a membership changes",
        "watch ledgerrecords.broker.fluidos.eu": "by those that follow the leader",
        "get clusteradvertisements.broker.fluidos.eu": "when somebody else has changed one",
        "get pods.": "every ten seconds, in case somebody has taken the leader's label off",
        "list namespaces.": "for agents whose transport is kubernetes",
        "watch namespaces.": "likewise",
        "list mailboxes.broker.fluidos.eu": "likewise",
        "watch mailboxes.broker.fluidos.eu": "likewise",
        "patch mailboxes/status.broker.fluidos.eu": "likewise",
        "list providerinstructions.rear.fluidos.eu": "likewise",
        "watch providerinstructions.rear.fluidos.eu": "likewise",
        "create providerinstructions.rear.fluidos.eu": "likewise",
        "patch providerinstructions.rear.fluidos.eu": "likewise",
        "delete providerinstructions.rear.fluidos.eu": "likewise",
    },
    "agent": {
        "get reservationinstructions.rear.fluidos.eu": "when somebody else has changed one",
        "get providerinstructions.rear.fluidos.eu": "likewise",
        "patch providerinstructions.rear.fluidos.eu": "when a reservation is renewed",
    },
}
"""Rights that the lives below do not use, and when they are."""

BY_HAND = """
apiVersion: broker.fluidos.eu/v1alpha1
kind: Reservation
metadata: {name: by-hand, namespace: kubelend}
spec: {requesterID: rome, requestedResources: {cpu: 250m, memory: 128Mi}, duration: 1h}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("roles")


@pytest.fixture(scope="module")
def hub(lab):
    """Where the broker and the borrower's agent are."""
    with installed(lab, "hub", "broker", "agent") as cluster:
        asyncio.run(add_pod(cluster))
        yield cluster


@pytest.fixture(scope="module")
def lender(lab):
    with installed(lab, "lender", "agent") as cluster:
        asyncio.run(add_node(cluster))
        yield cluster


@contextlib.contextmanager
def installed(lab, name, *parts):
    """A cluster with what we ship for these, all but the Deployments."""
    cluster = audited_cluster.started(lab, name)
    try:
        for namespace in (HOME, "team"):
            cluster.kubectl("create", "namespace", namespace)
        manifests.install_kinds(cluster)
        for part in parts:
            apply(cluster, charts.of_kind(shipped(part), "ServiceAccount", *ROLES, *BINDINGS))
        yield cluster
    finally:
        cluster.kill()


ROLES = ("Role", "ClusterRole")
BINDINGS = ("RoleBinding", "ClusterRoleBinding")


def shipped(part):
    return charts.rendered(part, {"broker": "overlays/replicated", "agent": "base"}[part])


def own_roles(part):
    """Those of the program itself, and not those of people."""
    found = shipped(part)
    bound = {one["roleRef"]["name"] for one in charts.of_kind(found, *BINDINGS)}
    return [one for one in charts.of_kind(found, *ROLES) if one["metadata"]["name"] in bound]


def apply(cluster, found):
    path = cluster.directory / "applied.json"
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": found}))
    cluster.kubectl("apply", "--server-side", f"--filename={path}")


async def add_pod(cluster):
    async with kube_objects.opened(cluster) as client:
        await kube_objects.Machines(client, HOME).pod(POD)


async def add_node(cluster):
    async with kube_objects.opened(cluster) as client:
        machines = kube_objects.Machines(client)
        await machines.node("a", cpu="4", memory="8Gi")
        await machines.pod("p", "a", cpu="1", memory="1Gi")


def account(cluster, part):
    return cluster.kubeconfig_of_account(f"kubelend-{part}", HOME)


def flags_of(part, *left_out):
    """Those of the Deployment, but for paths and ports, which are the test's."""
    known = ("--health-probe-bind-address", "--metrics-bind-address", "--http-port", *left_out)
    arguments = charts.container(shipped(part))["args"][1:]
    return [
        argument.replace("$(POD_NAMESPACE)", HOME).replace("$(POD_NAME)", POD)
        for argument in arguments
        if not argument.startswith(known)
    ]


@pytest.fixture(scope="module")
def broker(hub, certificates, root):
    flags = flags_of("broker", "--http-cert-path", "--store", "--grant-key")
    store = f"--store=kubernetes://{account(hub, 'broker')}"
    with broker_process.running(certificates.server(), root, *flags, store) as broker:
        yield broker


@pytest.fixture(scope="module")
def agent(broker, certificates, root):
    @contextlib.contextmanager
    def agent(name, cluster):
        with kube_agents.running(
            cluster,
            account(cluster, "agent"),
            root / name,
            f"--broker-url={broker.url}",
            f"--broker-cert-path={certificates.cluster(name)}",
            *flags_of("agent", "--broker-cert-path"),
            "--finished-for=0s",
        ) as running:
            running.wait_until_ready()
            yield running

    return agent


@pytest.fixture(scope="module")
def life(agent, hub, lender):
    """A request that becomes a promise at both ends and is given back, seen by the audit of both clusters."""
    with agent("bonn", lender) as bonn, agent("rome", hub) as rome:
        bonn.shows(Advertisement, "cluster-advertisement", lambda one: one.status.published, HOME)
        rome.apply(WISH)
        found = rome.shows(ResourceRequest, "training", has("Active"), "team")
        reservation = found.status.reservation_name
        bonn.shows(ProviderInstruction, f"{reservation}-provider", has("Held"), HOME)
        rome.shows(ReservationInstruction, reservation, has("Ready"), HOME)
        kept = hub.kubectl(
            "get", "reservation", reservation, f"--namespace={HOME}", "--output=name"
        )
        reserve_by_hand(rome)
        rome.cluster.kubectl("delete", "resourcerequest", "training", "--namespace=team")
        for one, kind, name in (
            (bonn, ProviderInstruction, f"{reservation}-provider"),
            (rome, ReservationInstruction, reservation),
        ):
            one.wait_for(
                lambda one=one, kind=kind, name=name: one.find_in(kind, name, HOME) is None
            )
    return found, kept


def reserve_by_hand(rome):
    """As somebody who has the editor's role in the broker's namespace, and no other."""
    role = "kubelend-broker-reservations-editor"
    flags = (f"--clusterrole={role}", "--user=alice", f"--namespace={HOME}")
    rome.cluster.kubectl("create", "rolebinding", "alice", *flags)
    alice = rome.cluster.kubeconfig_for("alice")
    path = rome.directory / "by-hand.yaml"
    path.write_text(BY_HAND)
    rome.cluster.kubectl("apply", f"--filename={path}", kubeconfig=alice)
    rome.shows(Reservation, "by-hand", has("Reserved"), HOME)
    rome.cluster.kubectl("delete", "--timeout=30s", f"--filename={path}", kubeconfig=alice)


def has(phase):
    return lambda found: found.status.phase == phase


def test_reservation_lives_under_the_shipped_roles(life):
    found, kept = life
    assert found.status.target_cluster_id == "bonn"
    assert found.status.reservation_name in kept


def test_service_finds_the_broker_that_leads(life, hub):
    [service] = (
        one
        for one in charts.of_kind(shipped("broker"), "Service")
        if one["metadata"]["name"] == "liqo-resource-broker"
    )
    wanted = f"kubelend.io/role={service['spec']['selector']['kubelend.io/role']}"
    found = hub.kubectl(
        "get", "pods", f"--namespace={HOME}", f"--selector={wanted}", "--output=name"
    )
    assert found.split() == [f"pod/{POD}"]


@pytest.mark.parametrize(
    "cluster, part", [("hub", "broker"), ("hub", "agent"), ("lender", "agent")]
)
def test_nothing_is_refused(life, request, cluster, part):
    assert request.getfixturevalue(cluster).refused(f"{HOME}/kubelend-{part}") == []


@pytest.mark.parametrize("part", ["broker", "agent"])
def test_nothing_is_granted_that_nobody_uses(life, hub, lender, part):
    account = f"{HOME}/kubelend-{part}"
    used = hub.rights_used(account) | lender.rights_used(account)
    unused = {
        f"{right.verb} {right.resource}.{right.group}"
        for right in audited_cluster.granted(own_roles(part))
        if not audited_cluster.covers(right, used)
    }
    assert used
    assert unused <= SELDOM[part].keys()


@pytest.mark.parametrize("part", ["broker", "agent"])
def test_every_right_that_is_seldom_used_is_granted(part):
    rights = audited_cluster.granted(own_roles(part))
    named = {f"{right.verb} {right.resource}.{right.group}" for right in rights}
    assert SELDOM[part].keys() <= named


def test_roles_in_the_manual_are_those_of_the_chart():
    """docs/agent.md explains them one by one."""

    def rights(roles):
        return {right[1:] for right in audited_cluster.granted(roles)}

    with_certificate = [
        role | {"rules": [rule for rule in role["rules"] if rule["resources"] != ["namespaces"]]}
        for role in kube_roles.documented()
    ]
    assert rights(own_roles("agent")) == rights(with_certificate)


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
    with pytest.raises(UnexpectedAnswer, match="forbidden"):
        hub.kubectl(*refused, kubeconfig=account(hub, "broker"))
