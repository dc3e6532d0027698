import hashlib
import itertools

import pytest
from msgspec.structs import replace

import make
from described_worlds import SECOND, events, world
from kubelend.agent.ports import NodeDeleted, PodDeleted, Snapshot
from kubelend.core.pod_requests import Node, Pod
from kubelend.core.resources import NOTHING, Resources
from kubelend.sources import simulation_spec
from kubelend.sources.simulation import SimulatedCluster

BUSY = """
seed: 7
nodes: [{count: 3, capacity: {cpu: 4, memory: 8Gi, nvidia.com/gpu: 1}}]
pods: [{share: 30%, requests: {cpu: 250m, memory: 256Mi}}]
work:
  - {rate: 5/s, requests: {cpu: 100m..900m, memory: 64Mi..1Gi}, lifetime: 1s..20s, start: 5}
  - {rate: 20/m, requests: {cpu: 100m, nvidia.com/gpu: 0..1}, lifetime: 10s}
failures:
  - {node: node-2, at: 5s, repair: 10s}
  - {rate: 6/m, repair: 1s..5s}
"""


def some_events(found, count=2000):
    return list(itertools.islice(events(found), count))


def placed(found):
    return {pod.id: pod.node for pod in found.snapshot().pods}


# -- chance


def test_same_seed_gives_the_same_events():
    assert some_events(world(BUSY)) == some_events(world(BUSY))
    assert world(BUSY).snapshot() == world(BUSY).snapshot()


def test_other_seed_gives_other_events():
    assert some_events(world(BUSY), 50) != some_events(
        world(BUSY.replace("seed: 7", "seed: 8")), 50
    )


def test_events_are_the_same_in_every_process_and_version():
    """A digest that was written down once: nobody's dice, hashes or rounding may change it."""
    text = repr([(at, *_plain(change)) for at, change in some_events(world(BUSY), 500)])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "adaeed6ed3b2fe39"


def _plain(change):
    match change:
        case Pod():
            return change.id, change.node, sorted(change.requests.items())
        case Node():
            return change.name, change.is_ready
        case PodDeleted():
            return (change.id,)
    raise AssertionError(change)


def test_change_of_one_part_leaves_the_chance_of_the_others():
    more = BUSY.replace("rate: 6/m", "rate: 60/m")

    def arrivals(found):
        seen: dict[str, tuple[float, Resources]] = {}
        for at, change in found:
            if isinstance(change, Pod) and change.id.startswith("work-1-"):
                seen.setdefault(change.id, (at, change.requests))
        return seen

    one, other = arrivals(some_events(world(BUSY))), arrivals(some_events(world(more)))
    common = one.keys() & other.keys()
    assert len(common) > 100
    assert all(one[name][1] == other[name][1] for name in common)


# -- what happens


def test_steps_keep_the_world_consistent():
    found = world(BUSY)
    nodes = {node.name: node for node in found.snapshot().nodes}
    pods = {pod.id: pod for pod in found.snapshot().pods}
    last = 0
    for _ in range(1500):
        at, changes = found.step()
        assert at >= last
        last = at
        for change in changes:
            take(change, nodes, pods)
        for name, node in nodes.items():
            used = sum((pod.requests for pod in pods.values() if pod.node == name), NOTHING)
            assert used.fits_in(node.allocatable)
    assert last > 60 * SECOND
    assert found.snapshot() == Snapshot(list(nodes.values()), list(pods.values()))


def take(change, nodes, pods):
    """Apply it, if it makes sense."""
    match change:
        case Node():
            assert nodes[change.name].is_ready != change.is_ready
            nodes[change.name] = change
        case Pod():
            assert not change.node or nodes[change.node].is_ready
            assert change.id not in pods or not pods[change.id].node
            pods[change.id] = change
        case PodDeleted():
            del pods[change.id]
        case _:
            raise AssertionError(change)


@pytest.mark.parametrize(
    "group, count",
    [
        pytest.param("{count: 5, requests: {cpu: 100m}}", 5, id="so many"),
        pytest.param("{share: 50%, requests: {cpu: 1, memory: 1Gi}}", 4, id="by cpu"),
        pytest.param("{share: 50%, requests: {cpu: 1m, memory: 3Gi}}", 2, id="by memory"),
        pytest.param("{share: 0%, requests: {cpu: 1}}", 0, id="none"),
        pytest.param("{share: 100%, requests: {cpu: 1, nvidia.com/gpu: 1}}", 0, id="no such thing"),
        pytest.param("{share: 100%, requests: {}}", 0, id="for nothing"),
    ],
)
def test_background_pods_are_so_many_or_a_share(group, count):
    found = world(f"nodes: [{{count: 2, capacity: {{cpu: 4, memory: 8Gi}}}}]\npods: [{group}]")
    assert len(found.snapshot().pods) == count
    assert found.next_at is None


def test_pods_go_to_the_first_node_with_room():
    found = world(
        "nodes: [{count: 3, capacity: {cpu: 2}}]\npods: [{count: 3, requests: {cpu: 1}},"
        " {count: 1, requests: {cpu: 2}}, {count: 1, requests: {cpu: 1}}]"
    )
    assert placed(found) == {
        "pod-1-1": "node-1",
        "pod-1-2": "node-1",
        "pod-1-3": "node-2",
        "pod-2-1": "node-3",
        "pod-3-1": "node-2",
    }


@pytest.mark.parametrize("state", ["ready: false", "schedulable: false"])
def test_closed_nodes_get_no_pods(state):
    found = world(
        f"nodes: [{{name: a, capacity: {{cpu: 8}}, {state}}}, {{name: b, capacity: {{cpu: 1}}}}]\n"
        "pods: [{count: 2, requests: {cpu: 1}}]"
    )
    assert placed(found) == {"pod-1-1": "b-1", "pod-1-2": ""}


def test_pod_waits_for_room_and_gets_it():
    found = world(
        "nodes: [{capacity: {cpu: 1}}]\nwork: [{rate: 1/s, requests: {cpu: 1}, lifetime: 10s}]"
    )
    first, second = "work-1-1", "work-1-2"
    seen = some_events(found, 40)
    waiting = next(i for i, (_, change) in enumerate(seen) if change == Pod(second, "", R1))
    gone = seen.index((seen[0][0] + 10, PodDeleted(first)))
    assert waiting < gone
    assert seen[gone + 1] == (seen[gone][0], Pod(second, "node-1", R1))


R1 = make.resources("cpu=1")


def test_node_fails_for_as_long_as_its_repair_takes_and_then_gets_what_waits():
    found = world(
        "nodes: [{capacity: {cpu: 4}}]\nfailures: [{node: node-1, at: 5s, repair: 10s}]\n"
        "work: [{rate: 1/s, requests: {cpu: 1m}, lifetime: 1h}]"
    )
    seen = list(itertools.takewhile(lambda event: event[0] < 20, events(found)))
    turns = [(at, change.is_ready) for at, change in seen if isinstance(change, Node)]
    assert turns == [(5.0, False), (15.0, True)]
    meanwhile = [change for at, change in seen if 5 <= at < 15 and isinstance(change, Pod)]
    assert meanwhile
    assert all(not pod.node for pod in meanwhile)
    caught_up = [change for at, change in seen if at == 15.0 and isinstance(change, Pod)]
    assert [pod.id for pod in caught_up] == [pod.id for pod in meanwhile]
    assert all(pod.node == "node-1" for pod in caught_up)


def test_node_is_ready_only_when_all_its_failures_are_repaired():
    found = world(
        "nodes: [{capacity: {cpu: 4}}]\nfailures: [{node: node-1, at: 1s, repair: 9s},"
        " {node: node-1, at: 2s, repair: 1s}]"
    )
    assert [(at, change.is_ready) for at, change in events(found)] == [(1, False), (10, True)]


def test_failure_without_repair_is_for_ever():
    found = world("nodes: [{capacity: {cpu: 4}}]\nfailures: [{node: node-1, at: 1s}]")
    assert [(at, change.is_ready) for at, change in events(found)] == [(1, False)]


# -- how much


def test_overload_does_not_pile_up():
    found = world(
        "nodes: [{capacity: {cpu: 1}}]\nwork: [{rate: 100/s, requests: {cpu: 1}, lifetime: 2s}]"
    )
    most = 0
    for _ in range(5000):
        found.step()
        most = max(most, len(found.snapshot().pods))
    assert 150 < most < 300


def test_steady_world_stays_as_large_and_as_busy():
    found = SimulatedCluster(
        simulation_spec.steady_simulation_spec(nodes=20, pods=600, events_per_second=50)
    )
    assert len(found.snapshot().pods) == 600
    assert len(found.snapshot().nodes) == 20
    seen = list(itertools.takewhile(lambda event: event[0] < 200, events(found)))
    assert 9_000 < len(seen) < 11_000
    assert 500 < len(found.snapshot().pods) < 700
    assert all(pod.node for pod in found.snapshot().pods)


def test_node_that_is_gone_takes_its_pods_along_and_another_joins():
    found = world("""
nodes: [{count: 2, capacity: {cpu: 2}}]
pods: [{count: 5, requests: {cpu: 1}}]
failures:
  - {node: node-1, at: 1s, repair: 9s, gone: true}
  - {node: node-1, at: 2s, repair: 1s}
""")
    node = found.snapshot().nodes[0]
    assert list(events(found)) == [
        (1.0, PodDeleted("pod-1-1")),
        (1.0, PodDeleted("pod-1-2")),
        (1.0, NodeDeleted("node-1")),
        (10.0, replace(node, name="node-1.1")),
        (10.0, Pod("pod-1-5", "node-1.1", make.resources("cpu=1"))),
    ]
    assert [one.name for one in found.snapshot().nodes] == ["node-2", "node-1.1"]


def test_end_of_a_pod_that_went_with_its_node_is_no_event():
    found = world("""
nodes: [{capacity: {cpu: 2}}]
work: [{rate: 1/h, requests: {cpu: 1}, lifetime: 5s, start: 1}]
failures: [{node: node-1, at: 1us, gone: true}, {node: node-1, at: 1s, repair: 2s}]
""")
    seen = [change for _, change in itertools.islice(events(found), 3)]
    assert seen[:2] == [PodDeleted("work-1-1"), NodeDeleted("node-1")]
    assert isinstance(seen[2], Pod)


def test_nodes_that_are_replaced_again_and_again_have_short_new_names():
    found = world("nodes: [{capacity: {cpu: 2}}]\nfailures: [{rate: 1/s, repair: 1s, gone: true}]")
    seen = [change for _, change in itertools.islice(events(found), 6)]
    assert [one.name for one in seen] == ["node-1", *(f"node-1.{n}" for n in (1, 1, 2, 2, 3))]
