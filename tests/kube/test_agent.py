"""The agent as a person runs it in Kubernetes: with the documented roles and no more, asked by kubectl."""

import secrets

import msgspec
import pytest

import broker_process
import kube_agents
import kube_objects
import kube_roles
from kube_objects import Machines
from kubelend.core.errors import UnexpectedResponse
from kubelend.envtest import servers
from kubelend.wire.objects import (
    Advertisement,
    ProviderInstruction,
    ReservationInstruction,
    ResourceRequest,
)

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
    kube_roles.grant(pair[0], "agent", instructions=LENDING)
    with start("rome", pair[0], f"--instruction-namespace={LENDING}") as agent:
        agent.wait_until_ready()
        yield agent


@pytest.fixture(scope="module")
def bonn(pair, start):
    """It has something to lend."""
    kube_roles.grant(pair[1], "agent")
    with start("bonn", pair[1], "--finished-for=0s") as agent:
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
    bonn.wait_for(lambda: bonn.find_in(ProviderInstruction, held.metadata.name) is None)


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
