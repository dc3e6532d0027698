"""Totals of the local cluster: exact for any order of changes, and cheap for any number of pods."""

import json
import sys
import tracemalloc
from collections import defaultdict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubelend.core import pod_requests
from kubelend.core.inventory import Hold, Inventory
from kubelend.core.pod_requests import BY_RESERVATION, Node, OffloadedFrom, Pod, PodScheduling
from kubelend.core.resources import NOTHING, Resources

FPGA = "example.com/fpga"
VIRTUAL = {"liqo.io/type": "virtual-node"}


def cpu(cores, **others):
    return Resources(cpu=cores, **others)


def node(name="n1", cores=10, **fields):
    return Node(name, cpu(cores + 1), cpu(cores), **fields)


def pod(id, cores=1, on="n1", of=None, **fields):
    """`of` is "origin/virtual node" of an offloaded pod."""
    source = OffloadedFrom(*of.split("/")) if of else None
    return Pod(id, on, cpu(cores), offloaded_from=source, **fields)


def inventory(*things):
    made = Inventory()
    for thing in things:
        made.put_node(thing) if isinstance(thing, Node) else made.put_pod(thing)
    return made


def shared(pods, holds):
    """100 cores with pods as "3@rome/res1", or "3" for an own one, and holds as "res1=rome:4"."""
    parts = [text.partition("@") for text in pods.split()]
    made = inventory(
        node("n1", 100), *(pod(str(i), int(n), of=of) for i, (n, _, of) in enumerate(parts))
    )
    for text in holds.split():
        reservation, _, hold = text.partition("=")
        requester, _, cores = hold.partition(":")
        made.put_hold(reservation, Hold(requester, cpu(int(cores))))
    return made


@pytest.mark.parametrize(
    "pods, holds, left",
    [
        pytest.param("9", "res1=rome:4", 91, id="own use stays"),
        pytest.param("", "res1=rome:4 res2=rome:5", 95, id="holds of the same cluster stay"),
        pytest.param("", "res1=rome:4 res2=oslo:5", 95, id="holds of others stay"),
        pytest.param("3@rome/res1", "res1=rome:4", 100, id="its own pods do not count"),
        pytest.param("7@rome/res1", "res1=rome:4 res2=rome:5", 95, id="nor those beyond it"),
        pytest.param("3@rome/v", "res1=rome:4 res2=rome:5", 95, id="nor those that may be its own"),
        pytest.param("20@rome/v", "res1=rome:4 res2=rome:5", 84, id="up to its size"),
        pytest.param("", "res2=rome:5", 95, id="one that is not held"),
    ],
)
def test_free_without_a_reservation_counts_its_share_as_free(pods, holds, left):
    assert shared(pods, holds).free(without="res1").cpu == left


# -- placeholders: the hold is counted, and they are not


def placeholder(cores, on="n1"):
    return pod("p", cores, on, placeholder_for="res1", scheduling=PodScheduling("lending", "p"))


@pytest.fixture
def holding():
    """3 of 8 cores are held, on the one node that takes pods."""
    made = inventory(node(cores=8), node("n2", 4, is_tainted=True))
    made.put_hold("res1", Hold("rome", cpu(3)))
    return made


@pytest.mark.parametrize("used, left", [(2, 5), (5, 3)])
def test_the_larger_of_reserved_and_used_counts_with_placeholders_too(holding, used, left):
    before = holding.totals()
    holding.put_pod(placeholder(1))
    after = holding.totals()
    assert (after.allocated, after.free) == (before.allocated, before.free) == (NOTHING, cpu(5))
    assert after.largest == cpu(7)
    holding.put_pod(pod("w", used, of="rome/res1"))
    assert holding.free() == cpu(left)
    holding.put_pod(placeholder(3, on=""))
    assert holding.totals().pending == NOTHING, "a pending one is no demand"


def test_pods_that_liqo_has_authenticated_count_once_whatever_its_id_of_the_requester_is(holding):
    holding.put_pod(pod("w", 2, of=f"{BY_RESERVATION}/res1"))
    assert holding.free() == cpu(5)
    holding.put_pod(pod("x", 2, of="liqo-id/res1"))
    assert holding.free() == cpu(3), "of a cluster that may be another one"


def test_room_is_what_the_scheduler_has_left(holding):
    holding.put_pod(placeholder(3))
    holding.put_pod(pod("local", 1))
    assert (holding.free_by_node(), list(holding.scheduled)) == ({"n1": cpu(4)}, ["p"])
    holding.delete_pod("p")
    assert (holding.free_by_node(), list(holding.scheduled)) == ({"n1": cpu(7)}, [])


# -- any order of changes

NAMES = ("cpu", "memory", "gpu", "storage", FPGA)
NODES = ("n1", "n2", "n3")
IDS = ("p1", "p2", "p3", "p4", "p5")
ORIGINS = ("rome", "oslo")
RESERVATIONS = ("res1", "res2", "res3")

some = st.integers(0, 9)
amounts = st.just(NOTHING) | st.builds(
    Resources, some, some, some, some, st.dictionaries(st.just(FPGA), some)
)
labels = st.sampled_from([{}, {}, {}, {"liqo.io/type": "virtual-node"}])
mostly = st.sampled_from([True, True, True, False])
nodes = st.builds(Node, st.sampled_from(NODES), amounts, amounts, labels, mostly, mostly)
offloaded_pods = st.builds(
    OffloadedFrom, st.sampled_from(ORIGINS), st.sampled_from([*RESERVATIONS, "", "other"])
)
pods = st.builds(
    Pod,
    st.sampled_from(IDS),
    st.sampled_from([*NODES, ""]),
    amounts,
    mostly.map(lambda usual: not usual),
    st.none() | offloaded_pods,
)
holds = st.builds(Hold, st.sampled_from(ORIGINS), amounts)


def calls(name, *arguments):
    return st.tuples(st.just(name), *arguments)


steps = st.lists(
    calls("put_node", nodes)
    | calls("delete_node", st.sampled_from(NODES))
    | calls("put_pod", pods)
    | calls("put_pod", pods)
    | calls("delete_pod", st.sampled_from(IDS))
    | calls("put_hold", st.sampled_from(RESERVATIONS), holds)
    | calls("delete_hold", st.sampled_from(RESERVATIONS))
    | calls("reset", st.lists(nodes, max_size=4), st.lists(pods, max_size=6)),
    max_size=25,
)


class Plain:
    """What is there, and sums that are made of it anew each time, by loops that hide nothing."""

    def __init__(self):
        self.nodes, self.pods, self.holds = {}, {}, {}

    def apply(self, name, *arguments):
        if name == "reset":
            self.nodes = {node.name: node for node in arguments[0]}
            self.pods = {pod.id: pod for pod in arguments[1]}
            return
        kept = {"node": self.nodes, "pod": self.pods, "hold": self.holds}[name.split("_")[1]]
        if name.startswith("delete"):
            kept.pop(arguments[0], None)
        elif name == "put_hold":
            kept[arguments[0]] = arguments[1]
        else:
            found = arguments[0]
            kept[found.name if name == "put_node" else found.id] = found

    def own_nodes(self):
        good = (node for node in self.nodes.values() if node.is_ready and node.is_schedulable)
        return [node for node in good if not node.labels]

    def running(self):
        names = {node.name for node in self.own_nodes()}
        return [p for p in self.pods.values() if not p.is_finished and p.node in names]

    def sums(self, of):
        """Each sum of `Totals`, of one resource."""
        own = self.own_nodes()
        left = {node.name: node.allocatable.amount(of) for node in own}
        for pod in self.running():
            left[pod.node] -= pod.requests.amount(of)
        unscheduled = (p for p in self.pods.values() if not p.is_finished and not p.node)
        beyond, committed = self.offloaded_pods(of)
        local = sum(pod.requests.amount(of) for pod in self.running() if pod.offloaded_from is None)
        allocatable = sum(node.allocatable.amount(of) for node in own)
        return {
            "capacity": sum(node.capacity.amount(of) for node in own),
            "allocatable": allocatable,
            "allocated": local + beyond,
            "pending": sum(pod.requests.amount(of) for pod in unscheduled),
            "largest": max([0, *left.values()]),
            "free": allocatable - local - committed,
        }

    def offloaded_pods(self, of):
        """What they use beyond what is held, and the sum of the larger of both."""
        used: dict[OffloadedFrom, int] = defaultdict(int)
        for pod in self.running():
            if pod.offloaded_from is not None:
                used[pod.offloaded_from] += pod.requests.amount(of)
        rest = {origin: [0, 0] for origin in ORIGINS}
        pairs = []
        for reservation, hold in self.holds.items():
            held = hold.resources.amount(of)
            its_own = OffloadedFrom(hold.requester, reservation)
            if its_own in used:
                pairs.append((held, used.pop(its_own)))
            else:
                rest[hold.requester][0] += held
        for source, amount in used.items():
            rest[source.origin][1] += amount
        pairs += [(held, amount) for held, amount in rest.values()]
        beyond = sum(max(0, amount - held) for held, amount in pairs)
        return beyond, sum(max(held, amount) for held, amount in pairs)


@given(steps)
def test_any_way_to_the_same_cluster_gives_the_same_sums(steps):
    inventory, plain = Inventory(), Plain()
    for name, *arguments in steps:
        getattr(inventory, name)(*arguments)
        plain.apply(name, *arguments)
        totals = inventory.totals()
        for of in NAMES:
            sums = plain.sums(of)
            assert {part: getattr(totals, part).amount(of) for part in sums} == sums
        assert (totals.nodes, totals.pods) == (len(plain.own_nodes()), len(plain.running()))
        assert inventory.free() == totals.free
        assert inventory.holds == plain.holds


@given(steps)
def test_room_for_a_reservation_is_what_is_free_once_it_and_its_pods_are_gone(steps):
    inventory, plain = Inventory(), Plain()
    for name, *arguments in steps:
        getattr(inventory, name)(*arguments)
        plain.apply(name, *arguments)
    offloaded = {
        pod.id: pod.offloaded_from for pod in plain.running() if pod.offloaded_from is not None
    }
    for name, source in offloaded.items():
        hold = plain.holds.get(source.virtual_node)
        if hold is None or hold.requester != source.origin:
            inventory.delete_pod(name)  # it bears no hold's name: one cannot know whose it is
    room = inventory.free("res1")
    for name, source in offloaded.items():
        if source.virtual_node == "res1":
            inventory.delete_pod(name)
    inventory.delete_hold("res1")
    assert inventory.free() == room


def crowd(count, nodes=10):
    """A cluster of so many pods, a third of them offloaded."""
    found = Inventory()
    for i in range(nodes):
        found.put_node(Node(f"n{i}", allocatable=Resources(cpu=10**6)))
    for i in range(count):
        source = OffloadedFrom("rome", "res1") if i % 3 == 0 else None
        found.put_pod(Pod(f"p{i}", f"n{i % nodes}", SOME, offloaded_from=source))
    found.put_hold("res1", Hold("rome", Resources(cpu=5)))
    return found


def cost(action):
    """Every instruction that it executes, and every function in C that it calls."""
    instructions, functions = 0, []

    def trace(frame, event, argument):
        nonlocal instructions
        frame.f_trace_opcodes = True
        instructions += event == "opcode"
        return trace

    def profile(frame, event, argument):
        if event == "c_call":
            functions.append(argument.__qualname__)

    before = sys.gettrace(), sys.getprofile()
    sys.setprofile(profile)
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before[0])
        sys.setprofile(before[1])
    return instructions, [name for name in functions if name not in ("settrace", "setprofile")]


SOME = Resources(1, 2, extended={FPGA: 1})
CHANGES = {
    "new": lambda f: f.put_pod(
        Pod("new", "n1", SOME, offloaded_from=OffloadedFrom("rome", "res1"))
    ),
    "changed": lambda f: f.put_pod(Pod("p1", "n2", Resources(3, extended={FPGA: 2}))),
    "unchanged": lambda f: f.put_pod(Pod("p1", "n1", SOME)),
    "finished": lambda f: f.put_pod(Pod("p3", "n3", is_finished=True)),
    "gone": lambda f: f.delete_pod("p3"),
    "node changed": lambda f: f.put_node(Node("n1", allocatable=Resources(cpu=7))),
    "node lost": lambda f: f.put_node(Node("n1", is_ready=False)),
    "summed": lambda f: (f.totals(), f.free("res1")),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_change_costs_the_same_among_few_pods_and_many(change):
    few, many = crowd(100), crowd(10_000)
    assert cost(lambda: change(few)) == cost(lambda: change(many))


@pytest.mark.parametrize("name", ["new", "changed", "finished", "gone"])
def test_change_costs_the_same_among_few_nodes_and_many(name):
    few, many = crowd(3000), crowd(3000, nodes=500)
    assert cost(lambda: CHANGES[name](few)) == cost(lambda: CHANGES[name](many))


def test_change_of_a_pod_calls_nothing_that_could_hide_a_loop():
    """But the copy of a sum's extended resources, of which there are as many as kinds."""
    found = crowd(50)
    _, functions = cost(
        lambda: [CHANGES[name](found) for name in ("new", "changed", "gone", "finished")]
    )
    methods = {"get", "pop", "setdefault", "items", "values", "copy"}
    assert set(functions) <= {"tuple.__new__", *(f"dict.{name}" for name in methods)}


def test_costs_are_counted():
    numbers = list(range(100))
    less, more = (cost(lambda n=n: [i + 1 for i in numbers[:n]]) for n in (10, 100))
    assert more[0] > less[0] > 0
    assert "dict.get" in cost(lambda: {1: 2}.get(1))[1]


def test_pods_that_are_gone_leave_nothing_behind():
    found = crowd(30)
    for i in range(30):
        found.delete_pod(f"p{i}")
    for i in range(10):
        found.delete_node(f"n{i}")
    found.delete_hold("res1")
    assert sizes(found) == sizes(Inventory())


def sizes(found):
    """How much each part of it keeps, at any depth."""
    slots = [name for kind in type(found).__mro__ for name in getattr(kind, "__slots__", ())]
    parts = {**getattr(found, "__dict__", {}), **{name: getattr(found, name) for name in slots}}
    kept = {name: len(part) for name, part in parts.items() if isinstance(part, dict)}
    deeper = {name: sizes(part) for name, part in parts.items() if hasattr(part, "__slots__")}
    return {**kept, **{name: part for name, part in deeper.items() if name not in kept}}


def test_thousands_of_pods_are_small():
    """Under 0.2 kB each, half of it the ID: what pods have in common is kept once."""
    tracemalloc.start()
    try:
        found = Inventory()
        for i in range(2000):
            found.put_pod(pod_requests.project_pod(read(f"{i:012}", f"node-{i % 100}")))
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert sizes(found)["_pods"] == 2000
    assert used < 500_000


def read(id, node):
    wanted = {"requests": {"cpu": "250m", "memory": "64Mi"}}
    found = {
        "metadata": {"uid": f"0f0e7c1e-5a59-4c1c-a70d-{id}", "name": "web", "labels": {"a": "b"}},
        "spec": {"nodeName": node, "containers": [{"name": "web", "resources": wanted}]},
    }
    return msgspec.json.decode(json.dumps(found), type=pod_requests.KubernetesPod)
