"""Simulated clusters: their description, the events that follow from it, and the source that plays them."""

import asyncio
import hashlib
import itertools
from contextlib import aclosing
from datetime import timedelta
from pathlib import Path

import pytest

import make
from kubelend.agent.ports import PodDeleted, Snapshot
from kubelend.core.errors import InvalidInput
from kubelend.core.pod_requests import Pod
from kubelend.core.resources import NOTHING, Resources
from kubelend.sources import simulation_spec
from kubelend.sources.simulation import SimulatedCluster, SimulatedSource
from kubelend.sources.simulation_spec import Range
from virtual_time import in_virtual_time, now

EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "clusters").glob("*.yaml"))
SECOND = 1_000_000
"""In microseconds, as simulations count."""

ONE_NODE = "nodes: [{capacity: {cpu: 4, memory: 8Gi}}]\n"
MIXED = """
seed: 7
nodes: [{count: 3, capacity: {cpu: 4, memory: 8Gi, nvidia.com/gpu: 1}}]
pods: [{share: 30%, requests: {cpu: 250m, memory: 256Mi}}]
work:
  - {rate: 5/s, requests: {cpu: 100m..900m, memory: 64Mi..1Gi}, lifetime: 1s..20s, start: 5}
  - {rate: 20/m, requests: {cpu: 100m, nvidia.com/gpu: 0..1}, lifetime: 10s}
"""
BUSY = """
nodes: [{count: 2, capacity: {cpu: 4}}]
work: [{rate: 50/s, requests: {cpu: 1m..9m}, lifetime: 1s..5s}]
"""


def parse(text):
    return simulation_spec.parse_simulation_spec(text, "x.yaml")


def cluster(text):
    return SimulatedCluster(parse(text))


def source(text, clock=now):
    return SimulatedSource(parse(text), clock)


def events(found, count=2000):
    """The next changes, each with its offset in seconds from the start."""

    def all_events():
        while found.next_at is not None:
            at, changes = found.step()
            for change in changes:
                yield at / SECOND, change

    return list(itertools.islice(all_events(), count))


# -- description


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_valid_and_named_after_its_cluster(path):
    assert simulation_spec.load_simulation_spec(path).cluster_id == path.stem


def test_allocatable_defaults_to_the_capacity():
    found = parse(
        "nodes: [{capacity: {cpu: 4, nvidia.com/gpu: 2}},"
        " {name: x, capacity: {cpu: 4}, allocatable: {cpu: 3500m}}]"
    )
    four = make.resources("cpu=4,gpu=2")
    assert found.nodes[0].amounts() == (four, four)
    assert found.nodes[1].amounts() == (make.resources("cpu=4"), make.resources("cpu=3500m"))


def node(fields):
    return f"nodes: [{{capacity: {{cpu: 1}}, {fields}}}]"


def pods(fields):
    return ONE_NODE + f"pods: [{{requests: {{cpu: 1}}, {fields}}}]"


def work(rate="1/s", requests="", lifetime="1s"):
    fields = f"rate: {rate}, requests: {{{requests}}}, lifetime: {lifetime}"
    return ONE_NODE + f"work: [{{{fields}}}]"


@pytest.mark.parametrize(
    "text, problem",
    [
        ("", "expected object"),
        ("nodes: [", "not valid YAML: line"),
        ("seed: 1", "x.yaml: nodes: is required"),
        ("nodes: []", "nodes: "),
        (ONE_NODE + "sed: 1", "x.yaml: sed: unknown field"),
        (node("cout: 2"), "nodes[0].cout: unknown field"),
        ("nodes: [{count: 2}]", "nodes[0].capacity: is required"),
        ("nodes: [{capacity: {cpu: four}}]", "nodes[0].capacity.cpu: 'four'"),
        ("nodes: [{capacity: {cpu: 1.5}}]", "nodes[0].capacity"),
        (node("allocatable: {memory: -1}"), "nodes[0].allocatable.memory: '-1' is negative"),
        (node("count: 0"), "nodes[0].count"),
        (node("name: A_b"), "nodes[0].name: 'A_b'"),
        ("nodes: [{capacity: {cpu: 1}}, {capacity: {cpu: 1}}]", "duplicate node name"),
        (pods(""), "pods[0]: count, share"),
        (pods("count: 1, share: 1%"), "pods[0]"),
        (pods("share: 110%"), "pods[0].share: '110%'"),
        (work(rate="2"), "work[0].rate"),
        (work(rate="0/s"), "work[0].rate: '0/s' is not a rate"),
        (work(requests="cpu: 2..1"), "work[0].requests.cpu: the end is below the start"),
        (work(lifetime="5"), "work[0].lifetime"),
        (work(lifetime="5x"), "work[0].lifetime: '5x' has the unknown unit"),
        (work(lifetime="-1s"), "work[0].lifetime: '-1s' is negative"),
        (ONE_NODE + "cost: {cpuCost: cheap}", "cost.cpuCost"),
        (ONE_NODE + "cost: {cpuPrice: '1'}", "cost.cpuPrice: unknown field"),
    ],
)
def test_error_names_the_field(text, problem):
    with pytest.raises(InvalidInput) as raised:
        parse(text)
    assert str(raised.value).startswith("x.yaml: ")
    assert problem in str(raised.value)


def test_error_names_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(InvalidInput, match=r"nowhere\.yaml cannot be read"):
        simulation_spec.load_simulation_spec(tmp_path / "nowhere.yaml")


def test_rate_is_the_inverse_of_an_interval_and_a_period_is_one_duration_or_two():
    rates = {"1/s": SECOND, "50/s": 20_000, "0.5/s": 2 * SECOND, "30/m": 2 * SECOND}
    for rate, microseconds in (rates | {"1/h": 3600 * SECOND}).items():
        assert simulation_spec.rate_interval(rate) == microseconds
    assert simulation_spec.parse_period("1m", "x") == Range(60 * SECOND, 60 * SECOND)
    assert simulation_spec.parse_period("1ms..1s", "x") == Range(1000, SECOND)


# -- events


def test_another_seed_gives_other_events():
    other = cluster(MIXED.replace("seed: 7", "seed: 8"))
    assert events(cluster(MIXED), 50) != events(other, 50)


def test_events_are_the_same_in_every_process_and_version():
    """A recorded digest: no random generator, hash seed or rounding may change it."""
    text = repr([(at, *_plain(change)) for at, change in events(cluster(MIXED), 500)])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "8ff73ae56faa9540"


def _plain(change):
    if isinstance(change, Pod):
        return change.id, change.node, sorted(change.requests.items())
    assert isinstance(change, PodDeleted)
    return (change.id,)


def test_change_of_one_workload_leaves_the_others_as_they_are():
    def arrivals(text):
        seen: dict[str, tuple[float, Resources]] = {}
        for at, change in events(cluster(text)):
            if isinstance(change, Pod) and change.id.startswith("work-1-"):
                seen.setdefault(change.id, (at, change.requests))
        return seen

    one, other = arrivals(MIXED), arrivals(MIXED.replace("rate: 20/m", "rate: 60/m"))
    common = one.keys() & other.keys()
    assert len(common) > 100
    assert all(one[name] == other[name] for name in common)


def test_steps_keep_the_cluster_consistent():
    found = cluster(MIXED)
    nodes = {node.name: node for node in found.snapshot().nodes}
    pods = {pod.id: pod for pod in found.snapshot().pods}
    last = 0
    for _ in range(1500):
        at, changes = found.step()
        assert at >= last
        last = at
        for change in changes:
            if isinstance(change, PodDeleted):
                del pods[change.id]
            else:
                assert isinstance(change, Pod)
                assert change.id not in pods or not pods[change.id].node
                pods[change.id] = change
        for name, node in nodes.items():
            used = sum((pod.requests for pod in pods.values() if pod.node == name), NOTHING)
            assert used.fits_in(node.allocatable)
    assert last > 60 * SECOND
    assert found.snapshot() == Snapshot(list(nodes.values()), list(pods.values()))


@pytest.mark.parametrize(
    "group, count",
    [
        pytest.param("{count: 5, requests: {cpu: 100m}}", 5, id="count"),
        pytest.param("{share: 50%, requests: {cpu: 1, memory: 1Gi}}", 4, id="by cpu"),
        pytest.param("{share: 50%, requests: {cpu: 1m, memory: 3Gi}}", 2, id="by memory"),
        pytest.param("{share: 0%, requests: {cpu: 1}}", 0, id="none"),
        pytest.param("{share: 100%, requests: {cpu: 1, nvidia.com/gpu: 1}}", 0, id="no such thing"),
        pytest.param("{share: 100%, requests: {}}", 0, id="for nothing"),
    ],
)
def test_permanent_pods_are_a_count_or_a_share(group, count):
    found = cluster(f"nodes: [{{count: 2, capacity: {{cpu: 4, memory: 8Gi}}}}]\npods: [{group}]")
    assert len(found.snapshot().pods) == count
    assert found.next_at is None


def placed(found):
    return {pod.id: pod.node for pod in found.snapshot().pods}


def test_pods_are_bound_to_the_first_node_with_capacity():
    found = cluster(
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
def test_no_pod_is_bound_to_an_unready_or_unschedulable_node(state):
    found = cluster(
        f"nodes: [{{name: a, capacity: {{cpu: 8}}, {state}}}, {{name: b, capacity: {{cpu: 1}}}}]\n"
        "pods: [{count: 2, requests: {cpu: 1}}]"
    )
    assert placed(found) == {"pod-1-1": "b-1", "pod-1-2": ""}


def test_pending_pod_is_bound_when_another_ends():
    found = cluster(
        "nodes: [{capacity: {cpu: 1}}]\nwork: [{rate: 1/s, requests: {cpu: 1}, lifetime: 10s}]"
    )
    first, second, core = "work-1-1", "work-1-2", make.resources("cpu=1")
    seen = events(found, 40)
    waiting = next(i for i, (_, change) in enumerate(seen) if change == Pod(second, "", core))
    gone = seen.index((seen[0][0] + 10, PodDeleted(first)))
    assert waiting < gone
    assert seen[gone + 1] == (seen[gone][0], Pod(second, "node-1", core))


def test_overload_does_not_pile_up():
    found = cluster(
        "nodes: [{capacity: {cpu: 1}}]\nwork: [{rate: 100/s, requests: {cpu: 1}, lifetime: 2s}]"
    )
    most = 0
    for _ in range(5000):
        found.step()
        most = max(most, len(found.snapshot().pods))
    assert 150 < most < 300


def test_steady_cluster_keeps_its_size_and_rate():
    found = SimulatedCluster(
        simulation_spec.steady_simulation_spec(nodes=20, pods=600, events_per_second=50)
    )
    assert len(found.snapshot().pods) == 600
    assert len(found.snapshot().nodes) == 20
    seen = itertools.takewhile(lambda event: event[0] < 200, events(found, 12_000))
    assert 9_000 < len(list(seen)) < 11_000
    assert 500 < len(found.snapshot().pods) < 700
    assert all(pod.node for pod in found.snapshot().pods)


# -- source


@in_virtual_time
async def test_each_change_comes_at_its_time():
    expected = events(cluster(BUSY), 50)
    async with aclosing(source(BUSY).changes()) as changes:
        assert await anext(changes) == cluster(BUSY).snapshot()
        assert now() == make.T0
        for at, change in expected:
            assert await anext(changes) == change
            assert now() - make.T0 == timedelta(seconds=at)


@in_virtual_time
async def test_late_consumer_gets_all_changes_in_order():
    async with aclosing(source(BUSY).changes()) as changes:
        await anext(changes)
        await asyncio.sleep(60)
        seen = [await anext(changes) for _ in range(3000)]
    assert seen == [change for _, change in events(cluster(BUSY), 3000)]


@in_virtual_time
async def test_catching_up_gives_other_tasks_a_turn():
    found = source(BUSY)
    await asyncio.sleep(600)
    turns = 0

    async def count():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(count())
    async with aclosing(found.changes()) as changes:
        assert isinstance(await anext(changes), Snapshot)
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
    assert turns > 50


@in_virtual_time
async def test_source_without_events_sleeps():
    wakes = 0

    def clock():
        nonlocal wakes
        wakes += 1
        return now()

    async with aclosing(source(ONE_NODE, clock).changes()) as changes:
        await anext(changes)
        silent = asyncio.ensure_future(anext(changes))
        await asyncio.sleep(600)
        assert not silent.done()
        silent.cancel()
        await asyncio.gather(silent, return_exceptions=True)
    assert wakes < 300


@in_virtual_time
async def test_identity_is_the_configured_id_or_derived_from_the_description():
    assert await source("clusterID: x\n" + ONE_NODE).identity() == "x"
    derived = await source(ONE_NODE).identity()
    assert derived
    assert await source(ONE_NODE).identity() == derived
    assert await source("seed: 1\n" + ONE_NODE).identity() != derived
