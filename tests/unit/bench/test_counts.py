"""What benchmarks count: writes of the API server, pod events of an agent, delivered instructions."""

import pytest

import make
from clocks import Seconds
from kubelend.agent import holds
from kubelend.agent.ports import PodDeleted
from kubelend.bench import broker, cli
from kubelend.bench.agents import DeliveryTracker, RecordingObjects, SimulationReplay
from kubelend.core.errors import InvalidSettings, KubelendError
from kubelend.core.inventory import Inventory
from kubelend.core.pod_requests import Node, Pod
from kubelend.envtest import assets
from kubelend.sources import simulation_spec
from kubelend.sources.simulation import SimulatedCluster
from kubelend.wire import conversion, objects
from kubelend.wire.objects import Metadata, ResourceRequest, ResourceRequestSpec

# -- writes


def line(verb="POST", resource="reservations.broker.fluidos.eu", value=1, code=201):
    name, _, group = resource.partition(".")
    name, _, subresource = name.partition("/")
    labels = f'code="{code}",group="{group}",resource="{name}",scope="resource"'
    labels += f',subresource="{subresource}",verb="{verb}",version="v1alpha1"'
    return f"apiserver_request_total{{{labels}}} {value}\n"


OTHER_METRIC = line().replace("request_total", "request_terminations_total")


@pytest.mark.parametrize(
    "text, expected",
    [
        (line(), {"POST reservations": 1}),
        (line("PATCH", "reservations/status.broker.fluidos.eu"), {"PATCH reservations/status": 1}),
        (line("PUT", "ledgerrecords.broker.fluidos.eu"), {"PUT ledgerrecords": 1}),
        (line("DELETE"), {"DELETE reservations": 1}),
        (line(resource="events"), {"POST events": 1}),
        (line(resource="events.events.k8s.io"), {"POST events": 1}),
        (line(resource="providerinstructions.rear.fluidos.eu"), {"POST providerinstructions": 1}),
        (line(value=30) + line(code=409, value="1e+03"), {"POST reservations": 1030}),
        (line("GET"), {}),
        (line("WATCH"), {}),
        (line("PUT", "leases.coordination.k8s.io"), {}),
        (line(resource="flowschemas.flowcontrol.apiserver.k8s.io"), {}),
        (OTHER_METRIC, {}),
        ("# HELP apiserver_request_total Counter of requests.\n", {}),
    ],
    ids=[
        *("created", "status", "commit", "deleted", "event", "newer event", "instruction"),
        *("also rejected", "read", "watch", "lease", "server's own", "other metric", "comment"),
    ],
)
def test_writes_of_a_broker_count_by_verb_and_resource(text, expected):
    assert broker.count_writes(text) == expected


def test_difference_of_two_samples_is_reported_per_reservation_largest_first():
    before = broker.count_writes(line(value=30))
    after = broker.count_writes(line(value=50) + line("PUT", value=3))
    assert list(broker.writes_per_reservation(after - before, 20).items()) == [
        ("POST reservations", 1.0),
        ("PUT reservations", 0.15),
    ]


def test_missing_api_server_is_one_line_with_the_remedy(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(assets.ASSETS_VARIABLE, str(tmp_path))
    assert not cli.has_programs("kube", assets.locate_assets)
    (text,) = capsys.readouterr().err.splitlines()
    assert "kube-apiserver" in text
    assert "make kube-assets" in text
    with pytest.raises(InvalidSettings, match="make kube-assets"):
        broker.measure_kube(broker.KubeSize())
    for program in assets.PROGRAMS:
        (tmp_path / program).touch(mode=0o755)
    assert cli.has_programs("kube", assets.locate_assets)


# -- pod events

MOST = 10_000


class Follower:
    """The state of an agent that has processed every event."""

    def __init__(self, description):
        self._cluster = SimulatedCluster(description)
        self._inventory = Inventory()
        self._inventory.reset(*self._cluster.snapshot())
        self._events = 0
        self.reached_at = {self.memory: 0}
        """The event after which so much memory was allocated for the first time."""

    @property
    def memory(self):
        return self._inventory.totals().allocated.memory

    def process(self, events):
        until = self._events + events
        while self._events < until:
            for change in self._cluster.step().changes:
                match change:
                    case Pod():
                        self._inventory.put_pod(change)
                    case PodDeleted(id):
                        self._inventory.delete_pod(id)
                    case Node():
                        self._inventory.put_node(change)
                self._events += isinstance(change, Pod | PodDeleted)
            self.reached_at.setdefault(self.memory, self._events)


def steady():
    return simulation_spec.steady_simulation_spec(nodes=4, pods=40, events_per_second=50)


@pytest.mark.parametrize("events", [0, 1, 7, 200])
def test_replay_counts_the_events_that_an_agent_has_processed(events):
    follower, replay = Follower(steady()), SimulationReplay(steady())
    follower.process(events)
    assert replay.events_until(follower.memory, MOST) == events
    follower.process(45)
    assert replay.events_until(follower.memory, MOST) == 45


def test_pending_pods_are_not_allocated():
    group = simulation_spec.NodeGroup({"cpu": "1", "memory": "1Gi"})
    pods: dict[str, str | int] = {"cpu": "10m", "memory": "300Mi..700Mi"}
    work = simulation_spec.PodWorkload("10/s", pods, lifetime="1s..9s")
    full = simulation_spec.SimulationSpec([group], work=[work])
    follower = Follower(full)
    follower.process(40)
    # Pods that have been pending since then have changed no sum.
    counted = SimulationReplay(full).events_until(follower.memory, MOST)
    assert counted == follower.reached_at[follower.memory] < 40


def test_state_that_is_not_reached_is_an_error():
    text = "12345 allocated bytes, which the simulation never reached"
    with pytest.raises(KubelendError, match=text):
        SimulationReplay(steady()).events_until(12345, 100)
    follower = Follower(steady())
    follower.process(50)
    with pytest.raises(KubelendError):
        SimulationReplay(steady()).events_until(follower.memory, 20)
    idle = simulation_spec.parse_simulation_spec("nodes: [{capacity: {cpu: 1, memory: 1Gi}}]", "x")
    assert SimulationReplay(idle).events_until(0, MOST) == 0
    with pytest.raises(KubelendError):
        SimulationReplay(idle).events_until(1, MOST)


# -- deliveries


@pytest.fixture
def timer():
    return Seconds()


@pytest.fixture
def deliveries(timer):
    return DeliveryTracker(timer)


def reserved(name="rsv-1"):
    return conversion.from_reservation(make.reservation(name, target="berlin"))


def instruction(name="rsv-1"):
    return holds.provider_instruction(reserved(name), "default")


def held():
    return objects.with_status(instruction(), holds.held_status(is_enforced=True), make.T0)


def withdrawn():
    status = holds.finished_status(holds.WITHDRAWN, "", make.T0)
    return objects.with_status(instruction(), status, make.T0)


def test_latency_is_from_the_response_to_the_first_object(deliveries, timer):
    deliveries.on_reserved(reserved())
    timer.now += 0.25
    deliveries.on_instruction("berlin", instruction())
    timer.now += 5
    deliveries.on_instruction("berlin", withdrawn())
    assert deliveries.latencies == [0.25]
    assert (deliveries.count, deliveries.missed) == (1, 0)


def test_object_before_the_response_has_no_latency(deliveries, timer):
    deliveries.on_instruction("berlin", instruction())
    timer.now += 1
    deliveries.on_reserved(reserved())
    assert deliveries.latencies == [0.0]
    assert deliveries.missed == 0


def test_reservation_without_an_object_in_its_cluster_is_missed(deliveries):
    deliveries.on_reserved(reserved("rsv-1"))
    deliveries.on_reserved(reserved("rsv-2"))
    deliveries.on_instruction("paris", instruction("rsv-1"))
    deliveries.on_instruction("berlin", instruction("rsv-2"))
    assert (deliveries.count, deliveries.missed) == (2, 1)
    assert len(deliveries.latencies) == 1


@pytest.mark.parametrize(
    "cluster, found, missed",
    [
        ("berlin", withdrawn(), 0),
        ("berlin", instruction(), 1),
        ("berlin", held(), 1),
        ("paris", withdrawn(), 1),
    ],
    ids=["withdrawn", "only written", "still held", "withdrawn by another"],
)
def test_release_has_to_reach_the_provider(deliveries, cluster, found, missed):
    deliveries.on_reserved(reserved())
    deliveries.on_instruction("berlin", instruction())
    assert deliveries.missed == 0
    deliveries.on_released("rsv-1")
    deliveries.on_instruction(cluster, found)
    assert deliveries.missed == missed


async def test_stored_instructions_are_recorded_and_other_objects_are_not(deliveries):
    stored = RecordingObjects("berlin", deliveries, lambda: make.T0)
    deliveries.on_reserved(reserved())
    assert await stored.set_status(withdrawn()) is None
    assert deliveries.missed == 1
    await stored.apply(instruction())
    assert deliveries.missed == 0
    deliveries.on_released("rsv-1")
    assert deliveries.missed == 1
    await stored.set_status(withdrawn())
    assert deliveries.missed == 0
    await stored.apply(ResourceRequest(Metadata("w"), ResourceRequestSpec("1", "1Gi")))
    assert [found.key for found in await stored.list(ResourceRequest)] == ["default/w"]
    assert deliveries.count == 1
