"""The agent as a person runs it in Kubernetes, with the documented roles and no more, and what is shown."""

import secrets

import msgspec
import pytest

import broker_process
import kube_agents
import kube_objects
import kube_roles
import kubectl_lend
import processes
from kube_objects import Machines
from kubelend.core.errors import UnexpectedResponse
from kubelend.envtest import servers
from kubelend.wire.objects import (
    Advertisement,
    ProviderInstruction,
    ReservationInstruction,
    ResourceRequest,
)
from waiting import wait_until

pytestmark = pytest.mark.timeout(180)

LENDING = "lending"

REQUEST = """
apiVersion: rear.fluidos.eu/v1alpha1
kind: ResourceRequest
metadata: {name: %s, namespace: team}
spec: {requestedCPU: 500m, requestedMemory: 256Mi, duration: 1h}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("agents")


@pytest.fixture(scope="module")
def broker(certificates, root):
    with broker_process.running(certificates.server(), root) as broker:
        yield broker


@pytest.fixture(scope="module")
def start(broker, certificates, root):
    """Starts an agent of this name in a cluster, under the documented roles."""

    def start(name, cluster, *flags):
        return kube_agents.running(
            cluster,
            cluster.kubeconfig_for("agent"),
            root / name,
            f"--broker-url={broker.url}",
            f"--broker-cert-path={certificates.cluster(name)}",
            *flags,
        )

    return start


@pytest.fixture(scope="module")
def pair(lab):
    """Two clusters that know our kinds."""
    found = lab.start(*(f"{name}-{secrets.token_hex(4)}" for name in ("rome", "bonn")))
    for cluster in found:
        servers.install_crds(cluster)
        for namespace in ("team", LENDING):
            kube_objects.create_namespace(cluster, namespace)
    yield found
    for cluster in found:
        cluster.kill()


@pytest.fixture(scope="module")
def rome(pair, start):
    """It borrows, and keeps instructions in a namespace."""
    kube_roles.grant(pair[0], "agent", instructions=LENDING, advertisement=LENDING)
    places = (f"--instruction-namespace={LENDING}", f"--advertisement-namespace={LENDING}")
    with start("rome", pair[0], "--request-namespace=team", *places) as agent:
        agent.wait_until_ready()
        yield agent


@pytest.fixture(scope="module")
def bonn(pair, start):
    """It has something to lend, at a price."""
    kube_roles.grant(pair[1], "agent")
    prices = ("--cpu-cost=0.5", "--memory-cost=0", "--currency=EUR")
    with start("bonn", pair[1], *prices) as agent:
        agent.wait_until_ready()
        yield agent


@pytest.fixture
async def machines(bonn):
    async with kube_objects.opened(bonn.cluster) as client:
        machines = Machines(client)
        await machines.clear()
        await machines.node("a", cpu="4", memory="8Gi")
        await machines.node("b", cpu="2", memory="4Gi")
        await machines.pod("p", "a", cpu="1500m", memory="1Gi")
        await machines.pod("done", "b", cpu="1")
        await machines.pod_says("done", phase="Succeeded")
        bonn.shows(Advertisement, "cluster-advertisement", is_published)
        yield machines


def is_published(shown):
    return shown.status.published and amount(shown.spec.resources.allocated) == ("1500m", "1Gi")


def amount(found):
    return found.cpu, found.memory


def has(phase):
    return lambda found: found.status.phase == phase


def test_sums_are_advertised_and_a_request_is_reserved_held_used_and_released(rome, bonn, machines):
    shown = bonn.shows(Advertisement, "cluster-advertisement", has("Active")).spec
    assert shown.cluster_id == "bonn"
    assert amount(shown.resources.capacity) == amount(shown.resources.allocatable) == ("6", "12Gi")
    assert amount(shown.resources.available) == ("4500m", "11Gi")
    rome.apply(REQUEST % "training")
    found = rome.shows(ResourceRequest, "training", has("Reserved"), "team")
    reservation = found.status.reservation_name
    assert found.status.target_cluster_id == "bonn"
    held = bonn.shows(ProviderInstruction, f"{reservation}-provider", has("Held"))
    assert (held.spec.requester_cluster_id, held.status.enforced) == ("rome", True)
    use = rome.shows(ReservationInstruction, reservation, has("NotPeered"), LENDING)
    assert (use.spec.target_cluster_id, use.spec.requested_cpu) == ("bonn", "500m")
    # It waits until the finalizer is gone, and with it the reservation.
    rome.cluster.kubectl("delete", "resourcerequest", "training", "--namespace=team")
    rome.shows(ReservationInstruction, reservation, has("Finished"), LENDING)
    bonn.shows(ProviderInstruction, held.metadata.name, has("Withdrawn"))


# -- what kubectl shows

TRAINING = """
apiVersion: rear.fluidos.eu/v1alpha1
kind: ResourceRequest
metadata: {name: training, namespace: team}
spec: {requestedCPU: 1, requestedMemory: 268435456, duration: 1h, wait: 1m}
"""


@pytest.fixture
async def reserved(rome, bonn, machines):
    """A reserved request; gives the reservation's ID."""
    rome.apply(TRAINING)
    wait_ready(rome, "Reserved")
    found = rome.shows(ResourceRequest, "training", lambda one: reason(one) == "NoPeering", "team")
    name = found.status.reservation_name
    bonn.shows(ProviderInstruction, f"{name}-provider", lambda one: one.status.phase)
    yield name
    rome.cluster.kubectl("delete", "resourcerequest", "training", "--namespace=team")


def reason(found):
    return {one.type: one.reason for one in found.status.conditions}.get("Ready", "")


def wait_ready(agent, condition, timeout="30s"):
    agent.cluster.kubectl(
        *("wait", "resourcerequest/training", "--namespace=team"),
        *(f"--for=condition={condition}", f"--timeout={timeout}"),
    )


def described(agent, kind, name, namespace):
    return agent.cluster.kubectl("describe", kind, name, f"--namespace={namespace}")


def has_events(agent, kind, name, namespace, *reasons):
    wait_until(
        lambda: all(
            f" {reason} " in described(agent, kind, name, namespace).partition("Events:")[2]
            for reason in reasons
        ),
        poll=0.2,
    )


def test_request_without_a_peering_is_reserved_and_ready_once_activated(
    rome, reserved, broker, certificates, tmp_path
):
    found = rome.shows(ResourceRequest, "training", namespace="team")
    assert found.status.phase == "Reserved"
    assert found.status.message.endswith("; no peering is configured")
    use = rome.shows(ReservationInstruction, reserved, namespace=LENDING)
    assert (use.status.phase, use.status.peered_cluster_ids) == ("NotPeered", ())
    with pytest.raises(UnexpectedResponse, match="timed out"):
        wait_ready(rome, "Ready", "1s")
    activation = processes.kubelend(
        *("dev", "activate", reserved, f"--broker-url={broker.url}"),
        *("--cert-path", str(certificates.cluster("rome"))),
        temporary=tmp_path,
    )
    assert processes.finished(activation)[0] == 0
    wait_ready(rome, "Ready")
    table = rome.cluster.kubectl("get", "resourcerequests", "--namespace=team", "--output=wide")
    headers, row = (line.split() for line in table.splitlines())
    assert headers[:6] == ["NAME", "CPU", "MEMORY", "TARGET", "PHASE", "READY"]
    assert row[:6] == ["training", "1", "268435456", "bonn", "Active", "True"]


def test_each_step_is_an_event(rome, bonn, reserved):
    has_events(rome, "resourcerequest", "training", "team", "Requested", "Reserved", "NoPeering")
    has_events(rome, "reservationinstruction", reserved, LENDING, "Delivered", "NoPeering")
    has_events(bonn, "providerinstruction", f"{reserved}-provider", "default", "Accepted")
    text = described(rome, "resourcerequest", "training", "team")
    assert "kubelend-agent" in text
    assert "Requested 1 CPU / 268435456 Memory from the broker" in text
    for agent in (rome, bonn):
        assert agent.logged("Event dropped") == []


def test_end_is_an_event_of_each_object(rome, bonn, reserved):
    rome.cluster.kubectl("delete", "resourcerequest", "training", "--namespace=team")
    has_events(rome, "reservationinstruction", reserved, LENDING, "Finished")
    has_events(bonn, "providerinstruction", f"{reserved}-provider", "default", "Withdrawn")
    events = rome.cluster.kubectl("get", "events", "--namespace=team")
    assert f"Released reservation {reserved}" in events
    rome.apply(TRAINING)


def lend(agent, kube_assets, home, *arguments, kubeconfig=None):
    user = kubectl_lend.user(kube_assets, kubeconfig or agent.cluster.admin_kubeconfig, home)
    done = user.run("kubectl", "lend", *arguments)
    assert (done.code, done.err) == (0, "")
    return [line.split() for line in done.out.splitlines()]


async def test_borrowed_and_lent_show_cluster_use_end_price_and_node(
    rome, bonn, machines, reserved, kube_assets, tmp_path
):
    await machines.pod("there", "a", cpu="200m", memory="32Mi")
    async with kube_objects.opened(rome.cluster) as client:
        await Machines(client).node("virtual", cpu="1", memory="256Mi")
        await Machines(client).pod("here", "virtual", cpu="250m", memory="64Mi")
    bonn.cluster.kubectl(
        *("label", "pod", "there", "liqo.io/managed-by=shadowpod"),
        *("offloading.liqo.io/origin=rome", f"offloading.liqo.io/nodename={reserved}"),
    )
    patch = '{"status": {"nodeName": "virtual"}}'
    rome.cluster.kubectl(
        *("patch", "reservationinstruction", reserved, f"--namespace={LENDING}"),
        *("--subresource=status", "--type=merge", f"--patch={patch}"),
    )
    borrowed = lend(rome, kube_assets, tmp_path, "get", "borrowed", "-n", "team")
    headers = "NAME PHASE FROM CPU MEMORY HELD USED UNTIL PRICE NODE"
    assert borrowed[0] == headers.split()
    [name, phase, provider, cpu, memory, held, *used, until, price, unit, node] = borrowed[1]
    assert (name, phase, provider, cpu, memory) == (
        *("training", "Reserved", "bonn", "1", "268435456"),
    )
    assert held == "NotConfigured"
    assert (used, price, unit, node) == (["250m", "64Mi"], "0.5", "EUR/h", "virtual")
    [header, row] = lend(bonn, kube_assets, tmp_path, "get", "lent", "-n", "default")
    assert header == ["NAME", "PHASE", "TO", "CPU", "MEMORY", "HELD", "USED", "UNTIL", "PRICE"]
    assert row[:6] == [reserved, "Reserved", "rome", "1", "256Mi", "NotConfigured"]
    assert row[6:] == ["200m", "32Mi", until, price, unit]


def test_user_who_sees_requests_only_gets_what_is_in_them(rome, reserved, kube_assets, tmp_path):
    rules = {"resourcerequests.rear.fluidos.eu": "get,list"}
    account = kubectl_lend.service_account(
        rome.cluster.admin_kubeconfig, kube_assets, "developer", rules, "team"
    )
    _, row = lend(rome, kube_assets, tmp_path, "get", "borrowed", kubeconfig=account)
    assert row[:5] == ["training", "Reserved", "bonn", "1", "268435456"]
    assert (row[5:7], row[8:]) == (["NotConfigured", "-"], ["-", "-"]), (
        "neither use, price nor node"
    )


# -- faults


def test_restart_of_the_api_server_in_the_middle_is_survived(rome, bonn, machines):
    rome.apply(REQUEST % "before")
    before = rome.shows(ResourceRequest, "before", has("Reserved"), "team")
    bonn.cluster.kill()
    bonn.wait_for(lambda: "cannot watch nodes" in bonn.get("/readyz")[1])
    assert bonn.get("/healthz") == (200, "ok")
    rome.apply(REQUEST % "meanwhile")
    rome.shows(ResourceRequest, "meanwhile", has("Reserved"), "team")
    bonn.cluster.start()
    bonn.cluster.wait_until_ready()
    meanwhile = rome.shows(ResourceRequest, "meanwhile", has("Reserved"), "team")
    for found in (before, meanwhile):
        name = f"{found.status.reservation_name}-provider"
        bonn.shows(ProviderInstruction, name, has("Held"))
    bonn.wait_until_ready()
    rome.cluster.kubectl("delete", "resourcerequest", "before", "meanwhile", "--namespace=team")


def test_log_has_no_errors(rome, bonn):
    for agent in (rome, bonn):
        assert [line for line in agent.log() if line["level"] == "error"] == []


def test_roles_allow_nothing_else(pair, rome):
    """What an agent can do to a cluster that it lives in, if somebody else takes it over."""
    agent = pair[0].kubeconfig_for("agent")
    for refused in (
        ("delete", "resourcerequest", "any", "--namespace=team"),
        ("get", "secrets", "--all-namespaces"),
        ("delete", "node", "any"),
        ("delete", "pod", "any"),
        ("get", "providerinstructions", "--namespace=team"),
        ("get", "namespaces"),
    ):
        with pytest.raises(UnexpectedResponse, match="forbidden"):
            pair[0].kubectl(*refused, kubeconfig=agent)


def test_missing_definitions_are_reported_and_waited_for(lab, start):
    [empty] = lab.start(f"empty-{secrets.token_hex(4)}")
    try:
        kube_roles.grant(empty, "agent")
        with start("empty", empty) as agent:
            agent.wait_for(lambda: "apply the CRDs" in agent.get("/readyz")[1])
            assert agent.get("/readyz")[0] == 503
            servers.install_crds(empty)
            agent.wait_until_ready()
            agent.shows(Advertisement, "cluster-advertisement", has("Active"))
    finally:
        empty.kill()


def test_agent_without_a_broker_is_named_after_its_cluster(kube, tmp_path):
    kube_roles.grant(kube, "alone")
    kubeconfig = kube.kubeconfig_for("alone")
    with kube_agents.running(kube, kubeconfig, tmp_path / "alone", "--broker-transport=") as agent:
        agent.wait_until_ready()
        shown = agent.shows(Advertisement, "cluster-advertisement", has("Active"))
    system = msgspec.json.decode(kube.call("GET", "/api/v1/namespaces/kube-system"))
    assert shown.spec.cluster_id == system["metadata"]["uid"]
