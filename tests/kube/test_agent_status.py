"""What kubectl shows of a request and its instructions, written by agents under the documented roles."""

import secrets

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
from kubelend.wire.objects import ProviderInstruction, ReservationInstruction, ResourceRequest
from waiting import wait_until

pytestmark = pytest.mark.timeout(180)

REQUEST = """
apiVersion: rear.fluidos.eu/v1alpha1
kind: ResourceRequest
metadata: {name: training, namespace: team}
spec: {requestedCPU: 1, requestedMemory: 268435456, duration: 1h, wait: 1m}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("status")


@pytest.fixture(scope="module")
def broker(certificates, root):
    with broker_process.running(certificates.server(), root) as broker:
        yield broker


@pytest.fixture(scope="module")
def cluster(lab):
    """One for both agents, which share no namespace."""
    [found] = lab.start(f"status-{secrets.token_hex(4)}")
    servers.install_crds(found)
    for namespace in ("team", "rome", "bonn"):
        kube_objects.create_namespace(found, namespace)
    yield found
    found.kill()


@pytest.fixture(scope="module")
def start(cluster, broker, certificates, root):
    def start(name, requests, *flags):
        kube_roles.grant(cluster, name, instructions=name, advertisement=name)
        return kube_agents.running(
            cluster,
            cluster.kubeconfig_for(name),
            root / name,
            f"--broker-url={broker.url}",
            f"--broker-cert-path={certificates.cluster(name)}",
            f"--request-namespace={requests}",
            f"--instruction-namespace={name}",
            f"--advertisement-namespace={name}",
            *flags,
        )

    return start


@pytest.fixture(scope="module")
def rome(start):
    with start("rome", "team") as agent:
        agent.wait_until_ready()
        yield agent


@pytest.fixture(scope="module")
def bonn(start):
    """It lends, at a price."""
    with start("bonn", "bonn", "--cpu-cost=0.5", "--memory-cost=0", "--currency=EUR") as agent:
        agent.wait_until_ready()
        yield agent


@pytest.fixture
async def reserved(rome, bonn):
    """A reserved request; gives the reservation's ID."""
    async with kube_objects.opened(bonn.cluster) as client:
        machines = Machines(client)
        await machines.clear()
        await machines.node("a", cpu="8", memory="8Gi")
        rome.apply(REQUEST)
        wait_ready(rome, "Reserved")
        found = rome.shows(
            ResourceRequest, "training", lambda one: reason(one) == "NoPeering", "team"
        )
        name = found.status.reservation_name
        bonn.shows(ProviderInstruction, f"{name}-provider", lambda one: one.status.phase, "bonn")
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
    use = rome.shows(ReservationInstruction, reserved, namespace="rome")
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
    has_events(rome, "reservationinstruction", reserved, "rome", "Delivered", "NoPeering")
    has_events(bonn, "providerinstruction", f"{reserved}-provider", "bonn", "Accepted")
    text = described(rome, "resourcerequest", "training", "team")
    assert "kubelend-agent" in text
    assert "Requested 1 CPU / 268435456 Memory from the broker" in text
    for agent in (rome, bonn):
        assert agent.logged("Event dropped") == []


def test_end_is_an_event_of_each_object(rome, bonn, reserved):
    rome.cluster.kubectl("delete", "resourcerequest", "training", "--namespace=team")
    has_events(rome, "reservationinstruction", reserved, "rome", "Finished")
    has_events(bonn, "providerinstruction", f"{reserved}-provider", "bonn", "Withdrawn")
    events = rome.cluster.kubectl("get", "events", "--namespace=team")
    assert f"Released reservation {reserved}" in events
    rome.apply(REQUEST)


def lend(agent, kube_assets, home, *arguments, kubeconfig=None):
    user = kubectl_lend.user(kube_assets, kubeconfig or agent.cluster.admin_kubeconfig, home)
    done = user.run("kubectl", "lend", *arguments)
    assert (done.code, done.err) == (0, "")
    return [line.split() for line in done.out.splitlines()]


async def test_borrowed_and_lent_show_cluster_use_end_price_and_node(
    rome, bonn, reserved, kube_assets, tmp_path
):
    async with kube_objects.opened(bonn.cluster) as client:
        machines = Machines(client)
        await machines.node("virtual", cpu="1", memory="256Mi")
        await machines.pod("here", "virtual", cpu="250m", memory="64Mi")
        await machines.pod("there", "a", cpu="200m", memory="32Mi")
    bonn.cluster.kubectl(
        *("label", "pod", "there", "liqo.io/managed-by=shadowpod"),
        *("offloading.liqo.io/origin=rome", f"offloading.liqo.io/nodename={reserved}"),
    )
    patch = '{"status": {"nodeName": "virtual"}}'
    rome.cluster.kubectl(
        *("patch", "reservationinstruction", reserved, "--namespace=rome"),
        *("--subresource=status", "--type=merge", f"--patch={patch}"),
    )
    borrowed = lend(rome, kube_assets, tmp_path, "get", "borrowed", "-n", "team")
    assert borrowed[0] == [
        "NAME",
        "PHASE",
        "FROM",
        "CPU",
        "MEMORY",
        "HELD",
        "USED",
        "UNTIL",
        "PRICE",
        "NODE",
    ]
    [name, phase, provider, cpu, memory, held, *used, until, price, unit, node] = borrowed[1]
    assert (name, phase, provider, cpu, memory) == (
        *("training", "Reserved", "bonn", "1", "268435456"),
    )
    assert held == "NotConfigured"
    assert (used, price, unit, node) == (["250m", "64Mi"], "0.5", "EUR/h", "virtual")
    [header, row] = lend(bonn, kube_assets, tmp_path, "get", "lent", "-n", "bonn")
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
