"""Held means held: the agent as it is shipped, under its own roles, against the real scheduler.

The provider's cluster has an API server, a controller manager, a scheduler and a stand-in for kubelets. The
requester's pods are made as Liqo makes its copies: in a namespace of that cluster, with the same labels.
"""

import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest

import audited_cluster
import broker_process
import charts
import kube_agents
import kube_objects
import shipped
from callers import Caller, request_body
from kubelend.core import resources
from kubelend.core.errors import InvalidSettings, UnexpectedResponse
from kubelend.envtest import assets, servers
from kubelend.wire.objects import ProviderInstruction
from shipped import HOME
from waiting import PATIENCE, wait_until


def missing():
    """Why there is neither a scheduler nor a controller manager; empty if there are."""
    try:
        assets.find_liqo_assets()
    except InvalidSettings as error:
        return str(error)
    return ""


if missing() and os.environ.get("KUBELEND_KUBE_TESTS") != "required":
    pytest.skip(missing(), allow_module_level=True)

pytestmark = [pytest.mark.timeout(300), pytest.mark.kube]

BORROWED = "team-rome"
"""The namespace of rome's pods."""

ACCOUNT = f"{HOME}/kubelend-agent"
ADVERTISEMENTS = f"/apis/rear.fluidos.eu/v1alpha1/namespaces/{HOME}/advertisements"


@pytest.fixture(scope="module")
def controllers():
    """Scheduler and controller manager, which `make liqo-assets` builds."""
    return assets.find_liqo_assets()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("holds")


@pytest.fixture(scope="module")
def cluster(lab, controllers, root):
    """Three nodes of 8 CPU and 32Gi, and what we ship for an agent, all but the Deployment."""
    name = f"lender-{secrets.token_hex(4)}"
    directory = lab.directory / name
    directory.mkdir(mode=0o700)
    cluster = audited_cluster.Audited(name, lab.assets, lab.etcd, directory, controllers)
    try:
        for process in (cluster, *cluster.controllers):
            process.start()
            process.wait_until_ready()
        for name, labels in ((HOME, {}), (BORROWED, {"liqo.io/remote-cluster-id": "rome"})):
            kube_objects.create_namespace(cluster, name, **labels)
        servers.install_crds(cluster)
        shipped.install(cluster, "agent")
        shipped.apply(cluster, charts.rendered("agent", "components/hold-gate"))
        with kubelet(cluster, controllers, root):
            asyncio.run(add_nodes(cluster))
            yield cluster
    finally:
        cluster.stop_all()


@contextlib.contextmanager
def kubelet(cluster, controllers, root):
    program = [sys.executable, "-m", "kubelend.envtest.kubelet", cluster.admin_kubeconfig]
    with (root / "kubelet.log").open("wb") as log:
        process = subprocess.Popen([*program, controllers.directory, root], stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE)


async def add_nodes(cluster):
    async with kube_objects.opened(cluster) as client:
        for name in ("n1", "n2", "n3"):
            await kube_objects.Machines(client).node(name, cpu="8", memory="32Gi")
    wait_until(
        lambda: (
            not any(
                one["spec"].get("taints") for one in kube_objects.listed(cluster, "/api/v1/nodes")
            )
        )
    )


@pytest.fixture(scope="module")
def broker(certificates, root):
    with broker_process.running(certificates.server(), root) as broker:
        yield broker


@pytest.fixture(scope="module")
def start(cluster, broker, certificates, root):
    """Starts the agent as the Deployment does, with its account."""

    def start():
        return kube_agents.running(
            cluster,
            cluster.kubeconfig_of_account("kubelend-agent", HOME),
            root / "bonn",
            *shipped.flags("agent", "--broker-cert-path"),
            f"--broker-url={broker.url}",
            f"--broker-cert-path={certificates.cluster('bonn')}",
            "--advertisement-damping=0s",
            "--finished-for=0s",
        )

    return start


class Lender:
    """The provider's cluster, its agent, and the requester rome."""

    def __init__(self, cluster, agent, broker, certificates):
        self.cluster = cluster
        self.agent = agent
        self._port = int(broker.url.rpartition(":")[2])
        self._certificate = certificates.cluster("rome")

    # -- rome's reservations

    def reserve(self, cpu, memory="6Gi", **more):
        """Once the cluster has advertised that it has as much."""
        body = request_body(cpu, memory, duration="1h", **more)
        answers = []

        def is_placed():
            answers.append(self._call(lambda rome: rome.post("reservations", body)))
            return answers[-1].status == 201

        wait_until(is_placed, poll=0.2, explain=lambda: answers[-1])
        return answers[-1].json["id"]

    def release(self, reservation):
        self._call(lambda rome: rome.delete("reservations", reservation))
        wait_until(lambda: self.placeholders() == [], explain=self.placeholders)

    def _call(self, work):
        async def call():
            rome = Caller(self._port, self._certificate, "rome")
            try:
                return await work(rome)
            finally:
                await rome.hang_up()

        return asyncio.run(call())

    def condition(self, reservation):
        """Status, reason and message of the condition Held."""
        found = self.agent.find_in(ProviderInstruction, f"{reservation}-provider", HOME)
        held = [one for one in found.status.conditions if one.type == "Held"] if found else []
        return (held[0].status, held[0].reason, held[0].message) if held else ("", "", "")

    def becomes(self, reservation, status, reason):
        def shows():
            return self.condition(reservation)[:2] == (status, reason)

        wait_until(
            shows,
            explain=lambda: (self.condition(reservation), self.placeholders(), self.agent.text),
        )
        return self.condition(reservation)[2]

    def events(self, reservation):
        found = kube_objects.listed(self.cluster, f"/api/v1/namespaces/{HOME}/events")
        about = f"{reservation}-provider"
        return [one["reason"] for one in found if one["involvedObject"]["name"] == about]

    def age_lease(self, minutes):
        """As if the agent had been away for so long."""
        renewed = datetime.now(UTC) - timedelta(minutes=minutes)
        change = json.dumps({"spec": {"renewTime": f"{renewed:%Y-%m-%dT%H:%M:%S.%fZ}"}})
        place = ("--namespace", HOME, "--type=merge", f"--patch={change}")
        self.cluster.kubectl("patch", "lease", "kubelend-agent-holds", *place)

    # -- pods

    def placeholders(self):
        """Node and CPU of each."""
        found = kube_objects.listed(self.cluster, f"/api/v1/namespaces/{HOME}/pods")
        return sorted(
            (one["spec"].get("nodeName", ""), cpu_of(one))
            for one in found
            if one["spec"].get("priorityClassName") == "kubelend-hold"
        )

    def local(self, name, cpu, **spec):
        """A pod of the provider's own users."""
        self._make("default", name, cpu, {}, spec)

    def offloaded(self, name, reservation, cpu):
        """A copy of a pod of rome, as Liqo makes it."""
        labels = {
            "liqo.io/managed-by": "shadowpod",
            "offloading.liqo.io/origin": "rome",
            "offloading.liqo.io/nodename": reservation,
        }
        self._make(BORROWED, name, cpu, labels, {})

    def _make(self, namespace, name, cpu, labels, spec):
        requests = {"cpu": cpu, "memory": "1Gi"}
        container = {"name": "main", "image": "none", "resources": {"requests": requests}}
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": labels},
            "spec": {"containers": [container], **spec},
        }
        path = f"/api/v1/namespaces/{namespace}/pods"
        self.cluster.call("POST", path, json.dumps(body).encode())

    def pod(self, name, namespace=BORROWED):
        answer = self.cluster.request("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")
        return json.loads(answer.body) if answer.status == 200 else None

    def node(self, name, namespace=BORROWED):
        found = self.pod(name, namespace)
        return found["spec"].get("nodeName", "") if found else None

    def gets_a_node(self, name, namespace=BORROWED):
        wait_until(
            lambda: self.node(name, namespace),
            explain=lambda: (self.pod(name, namespace), self.placeholders(), self.agent.text),
        )
        return self.node(name, namespace)

    def is_unschedulable(self, name, namespace="default"):
        def is_told():
            conditions = self.pod(name, namespace)["status"].get("conditions", [])
            return any(one.get("reason") == "Unschedulable" for one in conditions)

        wait_until(is_told, explain=lambda: (self.pod(name, namespace), self.placeholders()))

    def delete(self, name, namespace=BORROWED):
        self.cluster.call("DELETE", f"/api/v1/namespaces/{namespace}/pods/{name}")
        wait_until(lambda: self.pod(name, namespace) is None)

    def stop_and_delete(self, name):
        """As a pod whose containers take a while to stop: the stand-in for kubelets takes no time."""
        path = f"/api/v1/namespaces/{BORROWED}/pods/{name}"
        patch = ("patch", "pod", name, f"--namespace={BORROWED}", "--type=merge")
        self.cluster.kubectl(*patch, '--patch={"metadata":{"finalizers":["test.io/stopping"]}}')
        self.cluster.call("DELETE", path)
        self.cluster.kubectl(*patch, '--patch={"metadata":{"finalizers":null}}')
        wait_until(lambda: self.pod(name) is None)

    def clear(self):
        for namespace in ("default", BORROWED):
            for pod in kube_objects.listed(self.cluster, f"/api/v1/namespaces/{namespace}/pods"):
                self.delete(pod["metadata"]["name"], namespace)


def cpu_of(pod):
    [container] = pod["spec"]["containers"]
    return resources.parse_requested(container["resources"]["requests"]).cpu


@pytest.fixture(scope="module")
def running(start, cluster, broker, certificates):
    with start() as agent:
        agent.wait_until_ready()
        yield Lender(cluster, agent, broker, certificates)


@pytest.fixture
def lender(running):
    running.clear()
    yield running
    running.clear()


@pytest.fixture
def held(lender):
    """20 of 24 CPU: 8 on two nodes, and 4 of the third."""
    reservation = lender.reserve("20")
    lender.becomes(reservation, "True", "Held")
    yield reservation
    lender.release(reservation)


def test_a_reservation_is_held_on_as_few_nodes_as_possible(lender, held):
    placed = lender.placeholders()
    assert sorted(cpu for _, cpu in placed) == [4000, 8000, 8000]
    assert len({node for node, _ in placed}) == 3
    message = lender.condition(held)[2]
    assert message.startswith(
        "20 CPU / 6Gi Memory held; capacity for further pods on 3 nodes, for one"
    )
    assert "8 CPU /" in message
    # One that the reservation is accepted, and one that placeholders hold it; on a busy machine
    # the scheduler may need so long that it is held in part before.
    # Events are written a second later.
    wait_until(lambda: {"Accepted", "Held"} <= {*lender.events(held)})
    events = [one for one in lender.events(held) if one != "PartiallyHeld"]
    assert sorted(events) == ["Accepted", "Held"]


def test_placeholders_are_not_advertised_as_usage(lender, held):
    wait_until(lambda: available(lender) == "4", explain=lambda: available(lender))
    [advertised] = kube_objects.listed(lender.cluster, ADVERTISEMENTS)
    assert advertised["spec"]["resources"]["allocated"]["cpu"] == "0"


def available(lender):
    [advertised] = kube_objects.listed(lender.cluster, ADVERTISEMENTS)
    return advertised["spec"]["resources"]["available"]["cpu"]


def test_local_pods_stay_pending_and_the_requesters_pod_gets_the_room(lender, held):
    for number in range(3):
        lender.local(f"thief-{number}", "6")
        lender.is_unschedulable(f"thief-{number}")
    lender.offloaded("web", held, "6")
    lender.gets_a_node("web")
    lender.becomes(held, "True", "Held")
    assert [lender.node(f"thief-{number}", "default") for number in range(3)] == ["", "", ""]
    wait_until(lambda: sum(cpu for node, cpu in lender.placeholders() if node) == 14_000)
    using = "the requester's pods use 6 CPU / 1Gi Memory"
    wait_until(lambda: using in lender.condition(held)[2], explain=lambda: lender.condition(held))
    lender.becomes(held, "True", "Held")


def test_room_is_taken_back_when_the_requesters_pod_is_deleted(lender, held):
    lender.offloaded("web", held, "8")
    lender.gets_a_node("web")
    lender.local("thief", "6")
    lender.is_unschedulable("thief")
    lender.stop_and_delete("web")

    def is_back():
        placed = lender.placeholders()
        return sum(cpu for _, cpu in placed) == 20_000 and all(node for node, _ in placed)

    wait_until(is_back, explain=lambda: (lender.placeholders(), lender.agent.text))
    assert lender.node("thief", "default") == ""
    lender.becomes(held, "True", "Held")


def test_a_pod_is_replaced_again_and_again_without_losing_its_room(lender, held):
    lender.local("thief", "6")
    lender.is_unschedulable("thief")
    for number in range(5):
        lender.offloaded(f"web-{number}", held, "8")
        lender.gets_a_node(f"web-{number}")
        lender.stop_and_delete(f"web-{number}")
    assert lender.node("thief", "default") == ""


def test_a_pod_that_does_not_fit_is_left_to_the_scheduler(lender, held):
    lender.offloaded("big", held, "9")
    lender.is_unschedulable("big", BORROWED)
    [condition] = [
        one
        for one in lender.pod("big")["status"]["conditions"]
        if one["type"] == "kubelend.io/Held"
    ]
    assert (condition["status"], condition["reason"]) == ("False", "DoesNotFitHold")
    wait_until(lambda: "DoesNotFitHold" in lender.events(held))
    lender.becomes(held, "True", "Held")


def test_system_pods_take_held_room_and_the_condition_says_so(lender, held):
    lender.local("critical", "8", priorityClassName="system-node-critical")
    lender.gets_a_node("critical", "default")
    lender.becomes(held, "False", "PartiallyHeld")
    wait_until(lambda: lender.condition(held)[2].startswith("16 CPU / "))
    assert " of 20 CPU / 6Gi Memory held" in lender.condition(held)[2]
    wait_until(lambda: "PartiallyHeld" in lender.events(held))
    lender.delete("critical", "default")
    lender.becomes(held, "True", "Held")


def test_a_placeholder_that_a_kubelet_has_rejected_is_replaced(lender, cluster):
    reservation = lender.reserve("6")
    lender.becomes(reservation, "True", "Held")
    [pod] = kube_objects.listed(cluster, f"/api/v1/namespaces/{HOME}/pods")
    name = pod["metadata"]["name"]
    patch = ("patch", "pod", name, f"--namespace={HOME}", "--subresource=status", "--type=merge")
    cluster.kubectl(*patch, '--patch={"status":{"phase":"Failed","reason":"OutOfcpu"}}')
    wait_until(lambda: lender.pod(name, HOME) is None)
    lender.becomes(reservation, "True", "Held")
    lender.release(reservation)


def test_a_drained_node_gives_its_placeholder_to_another_one(lender):
    reservation = lender.reserve("6")
    lender.becomes(reservation, "True", "Held")
    [(node, _)] = lender.placeholders()
    lender.cluster.kubectl("drain", node, "--timeout=20s")
    try:
        wait_until(lambda: [at for at, _ in lender.placeholders() if at not in ("", node)])
        lender.becomes(reservation, "True", "Held")
    finally:
        lender.cluster.kubectl("uncordon", node)
        lender.release(reservation)


def test_nothing_is_refused_and_nothing_is_granted_in_vain(lender, held, cluster):
    assert cluster.refused(ACCOUNT) == []
    roles = [one for one in shipped.roles("agent") if "placeholders" in one["metadata"]["name"]]
    granted = audited_cluster.granted(roles)

    def unused():
        used = cluster.rights_used(ACCOUNT)
        return {str(one) for one in granted if not audited_cluster.covers(one, used)}

    wait_until(lambda: unused() == set(), poll=0.5, explain=unused)  # the lease is renewed


def test_nobody_else_may_use_the_class(lender, cluster):
    cluster.kubectl("create", "clusterrolebinding", "dev", "--clusterrole=edit", "--user=dev")
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "sly", "namespace": HOME},
        "spec": {
            "priorityClassName": "kubelend-hold",
            "containers": [{"name": "main", "image": "none"}],
        },
    }
    path = cluster.directory / "sly.json"
    path.write_text(json.dumps(body))
    with pytest.raises(UnexpectedResponse, match="only the agent of Kubelend may use this"):
        cluster.kubectl(
            "create",
            f"--filename={path}",
            "--validate=false",
            kubeconfig=cluster.kubeconfig_for("dev"),
        )


@pytest.mark.parametrize(
    "pod, change, refusal",
    [
        ("mine", '{"metadata":{"labels":{"a":"b"}}}', "may only change placeholders"),
        ("web", '{"spec":{"containers":[{"name":"main","image":"bad"}]}}', "may only change the"),
    ],
)
def test_the_agent_may_not_change_anything_else_of_pods(
    lender, held, cluster, pod, change, refusal
):
    lender.local("mine", "100m")
    lender.offloaded("web", held, "1")
    lender.gets_a_node("web")
    namespace = "default" if pod == "mine" else BORROWED
    with pytest.raises(UnexpectedResponse, match=refusal):
        cluster.kubectl(
            *("patch", "pod", pod, f"--namespace={namespace}", f"--patch={change}"),
            kubeconfig=cluster.kubeconfig_of_account("kubelend-agent", HOME),
        )


def test_a_restarted_agent_goes_on_and_owned_placeholders_end_with_their_instruction(
    lender, start, running
):
    reservation = lender.reserve("20")
    lender.becomes(reservation, "True", "Held")
    before = lender.placeholders()
    running.agent.process.kill()
    running.agent.process.wait(PATIENCE)
    lender.offloaded("web", reservation, "6")
    wait_until(lambda: lender.pod("web")["spec"].get("schedulingGates"))
    assert lender.placeholders() == before
    lender.age_lease(minutes=3)
    with pytest.raises(UnexpectedResponse, match="hands held resources over, was last there at 20"):
        lender.offloaded("late", reservation, "1")
    lender.local("own", "1")
    with start() as agent:
        running.agent = agent
        assert lender.gets_a_node("web")
        lender.offloaded("late", reservation, "1")
        assert lender.gets_a_node("late")
        lender.becomes(reservation, "True", "Held")
        agent.process.kill()
        agent.process.wait(PATIENCE)
        path = f"/apis/rear.fluidos.eu/v1alpha1/namespaces/{HOME}/providerinstructions"
        lender.cluster.call("DELETE", f"{path}/{reservation}-provider")
        wait_until(lambda: lender.placeholders() == [], explain=lender.placeholders)
