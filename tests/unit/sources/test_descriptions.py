from pathlib import Path

import pytest

import make
from kubelend.core.errors import InvalidInput
from kubelend.sources import simulation_spec
from kubelend.sources.simulation_spec import Range

EXAMPLES = sorted((Path(__file__).parents[3] / "examples" / "clusters").glob("*.yaml"))

NODES = "nodes: [{capacity: {cpu: 4, memory: 8Gi}}]\n"


def parse(text):
    return simulation_spec.parse_simulation_spec(text, "x.yaml")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_right_and_named_after_their_clusters(path):
    assert simulation_spec.load_simulation_spec(path).cluster_id == path.stem


def test_there_are_examples_of_each_sort():
    found = [simulation_spec.load_simulation_spec(path) for path in EXAMPLES]
    assert any("nvidia.com/gpu" in group.capacity for one in found for group in one.nodes)
    assert any(one.agent.dies_after for one in found)
    assert len({one.cost.cpu_cost for one in found if one.cost}) == len(found) >= 4


def test_shortest_description_has_one_node_and_nothing_else():
    found = parse(NODES)
    assert found.node_names() == ["node-1"]
    assert (found.cluster_id, found.seed, found.pods, found.work) == ("", 0, [], [])
    assert found.agent == simulation_spec.AgentFaults("0s", "0s", "")


def test_allocatable_is_the_capacity_unless_said_otherwise():
    found = parse(
        "nodes: [{capacity: {cpu: 4, nvidia.com/gpu: 2}},"
        " {name: x, capacity: {cpu: 4}, allocatable: {cpu: 3500m}}]"
    )
    four = make.resources("cpu=4,gpu=2")
    assert found.nodes[0].amounts() == (four, four)
    assert found.nodes[1].amounts() == (make.resources("cpu=4"), make.resources("cpu=3500m"))


@pytest.mark.parametrize(
    "text, problem",
    [
        pytest.param("", "expected object", id="empty"),
        pytest.param("nodes: [", "not valid YAML: line", id="no YAML"),
        pytest.param("seed: 1", "x.yaml: nodes: is required", id="no nodes"),
        pytest.param("nodes: []", "nodes: ", id="empty nodes"),
        pytest.param(NODES + "sed: 1", "x.yaml: sed: unknown field", id="unknown field"),
        pytest.param(
            "nodes: [{capacity: {cpu: 1}, cout: 2}]", "nodes[0].cout: unknown field", id="deep"
        ),
        pytest.param("nodes: [{count: 2}]", "nodes[0].capacity: is required", id="no capacity"),
        pytest.param(
            "nodes: [{capacity: {cpu: four}}]", "nodes[0].capacity.cpu: 'four'", id="quantity"
        ),
        pytest.param("nodes: [{capacity: {cpu: 1.5}}]", "nodes[0].capacity", id="a float"),
        pytest.param(
            "nodes: [{capacity: {cpu: 1}, allocatable: {memory: -1}}]",
            "nodes[0].allocatable.memory: '-1' is negative",
            id="negative",
        ),
        pytest.param("nodes: [{capacity: {cpu: 1}, count: 0}]", "nodes[0].count", id="no count"),
        pytest.param(
            "nodes: [{capacity: {cpu: 1}, name: A_b}]", "nodes[0].name: 'A_b'", id="node name"
        ),
        pytest.param(
            "nodes: [{capacity: {cpu: 1}}, {capacity: {cpu: 1}}]", "duplicate node name", id="twice"
        ),
        pytest.param(
            NODES + "pods: [{requests: {cpu: 1}}]", "pods[0]: count, share", id="how many"
        ),
        pytest.param(
            NODES + "pods: [{requests: {cpu: 1}, count: 1, share: 1%}]", "pods[0]", id="both"
        ),
        pytest.param(
            NODES + "pods: [{requests: {cpu: 1}, share: 110%}]", "pods[0].share: '110%'", id="share"
        ),
        pytest.param(
            NODES + "work: [{rate: 2, requests: {}, lifetime: 1s}]", "work[0].rate", id="number"
        ),
        pytest.param(
            NODES + "work: [{rate: 0/s, requests: {}, lifetime: 1s}]",
            "work[0].rate: '0/s' is not a rate",
            id="no rate",
        ),
        pytest.param(
            NODES + "work: [{rate: 1/s, requests: {cpu: 2..1}, lifetime: 1s}]",
            "work[0].requests.cpu: the end is below the start",
            id="range",
        ),
        pytest.param(
            NODES + "work: [{rate: 1/s, requests: {}, lifetime: 5}]",
            "work[0].lifetime",
            id="lifetime",
        ),
        pytest.param(
            NODES + "work: [{rate: 1/s, requests: {}, lifetime: 5x}]",
            "work[0].lifetime: '5x' has the unknown unit",
            id="unit",
        ),
        pytest.param(
            NODES + "failures: [{node: node-7, at: 1s}]",
            "failures[0].node: node-7 not found",
            id="failure of nothing",
        ),
        pytest.param(NODES + "failures: [{node: node-1}]", "failures[0]: set either", id="when"),
        pytest.param(
            NODES + "failures: [{node: node-1, at: 1s, rate: 1/h}]", "failures[0]", id="both ways"
        ),
        pytest.param(
            NODES + "failures: [{rate: 1/h, repair: -1s}]",
            "failures[0].repair: '-1s' is negative",
            id="repair",
        ),
        pytest.param(
            NODES + "agent: {clockSkew: much}",
            "agent.clockSkew: 'much' is not a duration",
            id="skew",
        ),
        pytest.param(
            NODES + "agent: {networkDelay: -1s}",
            "agent.networkDelay: '-1s' is negative",
            id="delay",
        ),
        pytest.param(NODES + "agent: {diesAfter: never}", "agent.diesAfter", id="death"),
        pytest.param(NODES + "cost: {cpuCost: cheap}", "cost.cpuCost", id="price"),
        pytest.param(
            NODES + "cost: {cpuPrice: '1'}", "cost.cpuPrice: unknown field", id="cost field"
        ),
    ],
)
def test_mistake_is_named_with_its_place(text, problem):
    with pytest.raises(InvalidInput) as raised:
        parse(text)
    assert str(raised.value).startswith("x.yaml: ")
    assert problem in str(raised.value)


def test_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InvalidInput, match=r"nowhere\.yaml cannot be read"):
        simulation_spec.load_simulation_spec(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    "rate, microseconds",
    [
        ("1/s", 10**6),
        ("50/s", 20_000),
        ("0.5/s", 2 * 10**6),
        ("30/m", 2 * 10**6),
        ("1/h", 3600 * 10**6),
    ],
)
def test_rate_is_the_inverse_of_an_interval(rate, microseconds):
    assert simulation_spec.rate_interval(rate) == microseconds


def test_period_is_one_duration_or_two():
    assert simulation_spec.parse_period("1m", "x") == Range(60_000_000, 60_000_000)
    assert simulation_spec.parse_period("1ms..1s", "x") == Range(1000, 1_000_000)
