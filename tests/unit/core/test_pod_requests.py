"""Projections of nodes and pods, and effective requests by the rules of kube-scheduler."""

import json
import subprocess
import sys
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kubelend.core import errors, pod_requests, resources
from kubelend.core.pod_requests import (
    BY_RESERVATION,
    KubernetesNode,
    KubernetesPod,
    Node,
    OffloadedFrom,
    Pod,
    PodScheduling,
)
from kubelend.core.quantities import MAX_AMOUNT
from kubelend.core.resources import NOTHING, Resources

MI = 2**20
FPGA, HUGE = "example.com/fpga", "hugepages-2Mi"
READY = {"type": "Ready", "status": "True"}


def amounts(text):
    """`"cpu=1 memory=5"` as Kubernetes' list of resources."""
    return dict(part.split("=") for part in (text or "").split())


def node(labels=None, conditions=(READY,), status=None, **spec):
    """A Node through JSON, as an API server sends it."""
    metadata = {"name": "n1", "uid": "u", "labels": labels or {}}
    status = {"conditions": list(conditions), "nodeInfo": {"os": "linux"}, **(status or {})}
    text = json.dumps({"kind": "Node", "metadata": metadata, "spec": spec, "status": status})
    return pod_requests.project_node(msgspec.json.decode(text, type=KubernetesNode))


def taint(state):
    return {"key": f"node.kubernetes.io/{state}", "effect": "NoSchedule"}


NODES = {
    "plain": (True, node()),
    "labelled": (True, node({"type": "large", "liqo.io/other": "x"})),
    "uncordoned": (True, node(unschedulable=False)),
    "cordoned": (False, node(unschedulable=True)),
    "not ready": (False, node(conditions=[{**READY, "status": "False"}])),
    "unknown": (False, node(conditions=[{**READY, "status": "Unknown"}])),
    "no conditions": (False, node(conditions=[])),
    "another condition": (False, node(conditions=[{**READY, "type": "Other"}])),
    "ready among others": (True, node(conditions=[{"type": "Other"}, READY])),
    "preference": (True, node(taints=[{"effect": "PreferNoSchedule"}])),
    "taint NoSchedule": (False, node(taints=[{"effect": "NoSchedule"}])),
    "taint NoExecute": (False, node(taints=[{"effect": "NoExecute"}])),
    "ready before its taint is gone": (True, node(taints=[taint("not-ready")])),
    "disk pressure": (False, node(taints=[taint("disk-pressure")])),
    "liqo": (False, node({"liqo.io/type": "virtual-node"})),
    "liqo of any kind": (False, node({"liqo.io/type": ""})),
    "virtual kubelet": (False, node({"type": "virtual-kubelet"})),
    "admiralty": (False, node({"virtual-kubelet.io/provider": "x"})),
}


@pytest.mark.parametrize("is_own, found", NODES.values(), ids=NODES)
def test_node_counts(is_own, found):
    assert pod_requests.counts_as_capacity(found) is is_own


def test_node_offers_what_it_has_rounded_down():
    """But not what pods take without asking; and only the labels that matter are kept."""
    capacity = amounts(
        "cpu=8 memory=16384256Ki ephemeral-storage=100Gi nvidia.com/gpu=2 example.com/fpga=1"
        " hugepages-2Mi=4Mi hugepages-1Gi=0 pods=110 attachable-volumes-aws-ebs=39"
    )
    allocatable = amounts("cpu=7910999u memory=1500m ephemeral-storage=0.5 pods=110")
    labels = {"liqo.io/type": "a", "type": "b", "virtual-kubelet.io/provider": "c"}
    status = {"capacity": capacity, "allocatable": allocatable}
    found = node({**labels, "kubernetes.io/hostname": "n1", "zone": "x"}, status=status)
    extended = {"example.com/fpga": 1, "hugepages-2Mi": 4 * MI}
    offered = Resources(8000, 16384256 * 1024, 2, 100 * 1024 * MI, extended)
    assert found == Node("n1", offered, Resources(cpu=7910, memory=1), labels)


@pytest.mark.parametrize("part", ["capacity", "allocatable"])
@pytest.mark.parametrize("name, shown", [("cpu", "cpu"), ("ephemeral-storage", "storage")])
def test_unreadable_quantity_names_node_and_resource(part, name, shown):
    with pytest.raises(errors.InvalidInput) as raised:
        node(status={part: {name: "lots"}})
    assert raised.value.message == f"node n1: status.{part}.{shown}: 'lots' is not a quantity"


LIQO = {
    "liqo.io/managed-by": "shadowpod",
    "offloading.liqo.io/origin": "rome",
    "offloading.liqo.io/nodename": "res-1",
    "app": "web",
}

NODE, CREATOR = "offloading.liqo.io/nodename", "liqo.io/creator-user"
RESERVED = LIQO | {NODE: "rsv-1"}


def projected(cpu="1", node="n1", labels=None, phase="Running"):
    """The projection of a Pod that comes as JSON, as an API server sends it."""
    found = {
        "metadata": {"uid": "u1", "name": "web", "labels": labels or {}},
        "spec": {"nodeName": node, "containers": [{"resources": {"requests": {"cpu": cpu}}}]},
        "status": {"phase": phase, "podIP": "10.0.0.1"},
    }
    return pod_requests.project_pod(msgspec.json.decode(json.dumps(found), type=KubernetesPod))


def test_little_of_a_pod_is_kept():
    assert projected(labels=LIQO) == Pod(
        "u1",
        "n1",
        Resources(cpu=1000),
        offloaded_from=OffloadedFrom("rome", "res-1"),
        scheduling=PodScheduling("", "web"),
    )


def test_pod_is_finished_in_two_phases_asks_for_nothing_then_and_cannot_be_wrong():
    for phase in ("Succeeded", "Failed"):
        found = projected(cpu="lots", phase=phase)
        assert (found.is_finished, found.requests) == (True, NOTHING)
    assert not any(
        projected(phase=one).is_finished for one in ("Pending", "Running", "Unknown", "")
    )


def without(part):
    return {name: value for name, value in LIQO.items() if part not in name}


OFFLOADED = {
    "offloaded": (LIQO, OffloadedFrom("rome", "res-1")),
    "managed otherwise": ({**LIQO, "liqo.io/managed-by": "else"}, None),
    "unmanaged": (without("managed-by"), None),
    "no origin": (without("origin"), None),
    "no virtual node": (without("nodename"), OffloadedFrom("rome", "")),
    "own abroad": ({"liqo.io/shadowPod": "true"}, None),
    "authenticated": ({**RESERVED, CREATOR: "rsv-1-0a1b"}, OffloadedFrom(BY_RESERVATION, "rsv-1")),
    "authenticated after a move": (
        {**RESERVED, NODE: "rsv-1.2", CREATOR: "rsv-1.2-0a"},
        OffloadedFrom("*", "rsv-1"),
    ),
    "of another slice": ({**RESERVED, CREATOR: "rsv-2-0a1b"}, OffloadedFrom("rome", "rsv-1")),
    "of another peering": ({**LIQO, CREATOR: "res-1-0a1b"}, OffloadedFrom("rome", "res-1")),
}


@pytest.mark.parametrize("labels, source", OFFLOADED.values(), ids=OFFLOADED)
def test_offloaded_pod_is_known_by_its_labels(labels, source):
    assert projected(labels=labels).offloaded_from == source


def test_smallest_node_and_pod_are_read_and_one_that_is_being_deleted_still_counts():
    node = msgspec.json.decode(b'{"metadata":{"name":"n"}}', type=KubernetesNode)
    assert pod_requests.project_node(node) == Node("n", NOTHING, NOTHING, is_ready=False)
    text = b'{"metadata":{"uid":"u","name":"n","deletionTimestamp":"2026-01-01T00:00:00Z"}}'
    pod = msgspec.json.decode(text, type=KubernetesPod)
    assert pod_requests.project_pod(pod) == Pod("u")


def test_equal_pods_share_what_they_have_in_common():
    one, other = (projected(cpu="7", node="".join(["n", "7"]), labels=LIQO) for _ in range(2))
    assert one.requests is other.requests
    assert one.node is other.node
    assert one.offloaded_from is other.offloaded_from


def test_measuring_needs_no_numpy():
    modules = "kubelend.core.pod_requests, kubelend.core.inventory"
    check = f"import sys, {modules}; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


# -- placeholders


def project_placeholder(labels, priority_class="kubelend-hold", **more):
    found = {
        "metadata": {"uid": "u", "name": "p", "namespace": "lending", "labels": labels},
        "spec": {"priorityClassName": priority_class, "containers": []},
        "status": {},
    }
    for place, fields in more.items():
        found[place] |= fields
    return pod_requests.project_pod(msgspec.json.decode(json.dumps(found), type=KubernetesPod))


LABELS = {"kubelend.io/reservation": "rsv-1"}


def test_a_placeholder_is_known_by_its_label_and_its_class():
    assert project_placeholder(LABELS).placeholder_for == "rsv-1"
    assert project_placeholder(LABELS, "kubelend-hold-100").placeholder_for == "rsv-1"
    assert project_placeholder(LABELS, "").placeholder_for == ""
    assert project_placeholder(LABELS, "").scheduling is None
    assert project_placeholder({}).placeholder_for == ""
    gates = [{"name": "kubelend.io/held"}, {"name": "other"}]  # is not ours to schedule
    assert not project_placeholder(LABELS, spec={"schedulingGates": gates}).scheduling.is_gated


def test_what_the_scheduler_knows_of_a_placeholder_is_read():
    field = {"key": "metadata.name", "operator": "In", "values": ["n1"]}
    required = {"nodeSelectorTerms": [{"matchFields": [field]}]}
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    found = project_placeholder(
        LABELS,
        metadata={"deletionTimestamp": "2026-01-01T12:00:00Z"},
        spec={
            "schedulingGates": [{"name": "kubelend.io/held"}],
            "affinity": {
                "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}
            },
        },
        status={"nominatedNodeName": "n1", "conditions": [unschedulable]},
    )
    assert found.scheduling == PodScheduling("lending", "p", True, True, True, "n1", "n1")


# -- what a pod asks for


def pod(text="", status=None):
    """A Pod through JSON, with containers a, b... and initContainers 0, 1...

    "cpu=1 | init: cpu=2 | sidecar: cpu=3 | overhead: cpu=4 | pod: cpu=5" has one of each.
    """
    containers: list[dict[str, object]] = []
    inits: list[dict[str, object]] = []
    whole: dict[str, dict[str, str]] = {}
    for part in filter(None, text.split("|")):
        kind, _, wanted = part.strip().rpartition(":")
        if kind in {"overhead", "pod"}:
            whole[kind] = amounts(wanted)
            continue
        siblings, names = (inits, "0123456789") if kind else (containers, "abcdefghijk")
        container = {"image": "x", "resources": {"requests": amounts(wanted)}}
        if kind:
            container["restartPolicy"] = "Always" if kind == "sidecar" else "OnFailure"
        siblings.append({**container, "name": names[len(siblings)]})
    spec = {
        "containers": containers,
        "initContainers": inits,
        "overhead": whole.get("overhead", {}),
        "resources": {"requests": whole.get("pod", {}), "limits": {"cpu": "99"}},
        "nodeName": "n",
    }
    metadata = {"uid": "u1", "name": "web", "namespace": "shop"}
    found = json.dumps({"kind": "Pod", "metadata": metadata, "spec": spec, "status": status or {}})
    return msgspec.json.decode(found, type=KubernetesPod)


def has(name, actual=None, allocated=None):
    """A container's status; without `actual` its node has not reported what it runs with."""
    found = {"name": name, "allocatedResources": amounts(allocated), "ready": True}
    return found if actual is None else {**found, "resources": {"requests": amounts(actual)}}


def resized(desired, actual, allocated, **status):
    return pod(desired, status={"containerStatuses": [has("a", actual, allocated)], **status})


def condition(type, reason):
    return {"conditions": [{"type": type, "status": "True", "reason": reason}]}


INFEASIBLE = condition("PodResizePending", "Infeasible")
DEFERRED = condition("PodResizePending", "Deferred")
UNRELATED = condition("Ready", "Infeasible")
LIMITED = {"containers": [{"resources": {"limits": {"cpu": "9"}}}]}
LIMITS = {"metadata": {"uid": "u", "name": "n"}, "spec": LIMITED}

REQUESTS = {
    "nothing": "=> ",
    "a container without requests": "cpu=0 => ",
    "different things": f"cpu=1 | memory=3 {FPGA}=2 => cpu=1 memory=3 {FPGA}=2",
    "the larger of each resource": "cpu=1 memory=10 | init: cpu=40 memory=2 => cpu=40 memory=10",
    "init container beside the sidecars before it only": (
        "cpu=1 | init: cpu=5 | sidecar: cpu=1 | sidecar: cpu=2 | init: cpu=5 | sidecar: cpu=3"
        " => cpu=8"
    ),
    "pod with overhead": "cpu=1 | pod: cpu=2 | overhead: cpu=100m memory=1 => cpu=2100m memory=1",
    "huge pages of the pod": (
        f"{HUGE}=6Mi hugepages-1Gi=1Gi | pod: cpu=1 {HUGE}=10Mi"
        f" => cpu=1 {HUGE}=10Mi hugepages-1Gi=1Gi"
    ),
    "the rest is not for pods": (
        f"ephemeral-storage=3Mi | pod: ephemeral-storage=2Mi {FPGA}=1 nvidia.com/gpu=1"
        " => storage=3Mi"
    ),
    # units: rounded up once
    "nanocores": " | ".join(["cpu=100000n"] * 10) + " => cpu=1m",
    "nanocores just over": " | ".join(["cpu=100001n"] * 10) + " => cpu=2m",
    "one nanocore is not none": "cpu=1n => cpu=1m",
    "finer than nano counts as one": "cpu=999999.5n | cpu=0.5n => cpu=2m",
    "decimals": "cpu=0.5 | cpu=0.5 | cpu=0.5 => cpu=1500m",
    "exponents": "cpu=1e-3 | cpu=1e-3 | cpu=1e-3 => cpu=3m",
    "parts of a byte": "memory=500m | memory=500m | memory=500m => memory=2",
    "parts of a device": f"{FPGA}=500m | {FPGA}=500m => {FPGA}=1",
    "our names": (
        "ephemeral-storage=1Ki nvidia.com/gpu=2 amd.com/gpu=1 => storage=1Ki gpu=2 amd.com/gpu=1"
    ),
    "zero is nothing": f"cpu=0 {FPGA}=0 | overhead: memory=0 => ",
    "the largest": f"memory={MAX_AMOUNT} => memory={MAX_AMOUNT}",
}
B9 = {"containerStatuses": [has("b", "cpu=9", "cpu=9")]}
RESIZED = {
    "limits alone": (msgspec.convert(LIMITS, KubernetesPod), ""),
    "growing": (resized("cpu=4", "cpu=2", "cpu=2"), "cpu=4"),
    "shrinking": (resized("cpu=1", "cpu=3", "cpu=1"), "cpu=3"),
    "infeasible": (resized("cpu=4", "cpu=2", "", **INFEASIBLE), "cpu=2"),
    "infeasible before 1.33": (resized("cpu=4", "cpu=2", "", resize="Infeasible"), "cpu=2"),
    "deferred": (resized("cpu=4", "cpu=2", "cpu=2", resize="Infeasible", **DEFERRED), "cpu=4"),
    "another condition": (resized("cpu=4", "cpu=2", "cpu=2", **UNRELATED), "cpu=4"),
    "allocated before it is reported": (resized("cpu=1", None, "cpu=2"), "cpu=2"),
    "the status of another container": (pod("cpu=1", B9), "cpu=1"),
}


@pytest.mark.parametrize("row", REQUESTS.values(), ids=REQUESTS)
def test_pod_requests(row):
    text, _, wanted = row.partition("=> ")
    expected = resources.parse_offered(amounts(wanted))
    assert pod_requests.effective_requests(pod(text.strip())) == expected


@pytest.mark.parametrize("found, wanted", RESIZED.values(), ids=RESIZED)
def test_requests_of_a_pod_that_is_resized_in_place(found, wanted):
    assert pod_requests.effective_requests(found) == resources.parse_offered(amounts(wanted))


LISTS = st.dictionaries(st.sampled_from(["cpu", "memory", "ephemeral-storage"]), st.integers(0, 9))
REPORTED = st.none() | LISTS


class Part(NamedTuple):
    """A container, or the pod as a whole: what its spec requests, and its status."""

    wanted: dict[str, int]
    actual: dict[str, int] | None
    allocated: dict[str, int]

    def effective(self, is_infeasible):
        if self.actual is None:
            return most(self.wanted, self.allocated)
        return most(() if is_infeasible else self.wanted, self.actual, self.allocated)

    @property
    def status(self):
        found = {"allocatedResources": texts(self.allocated)}
        return found if self.actual is None else found | {"resources": requests(self.actual)}


PARTS = st.builds(Part, LISTS, REPORTED, LISTS)


def texts(found):
    return {name: str(number) for name, number in found.items()}


def requests(found):
    return {"requests": texts(found)}


def most(*lists):
    return {name: max(dict(one).get(name, 0) for one in lists) for name in set().union(*lists)}


def plus(*lists):
    return {name: sum(one.get(name, 0) for one in lists) for name in set().union(*lists)}


def scheduler_requests(containers, inits, whole, overhead, is_infeasible):
    """As component-helpers' resource.PodRequests of Kubernetes 1.36, with the status.

    It leaves out what is allocated where the node has not reported yet; we count that.
    """
    largest: dict[str, int] = {}
    sidecars: dict[str, int] = {}
    for is_sidecar, one in inits:
        if is_sidecar:
            sidecars = plus(sidecars, one.effective(is_infeasible))
        beside = {} if is_sidecar else one.wanted
        largest = most(largest, plus(sidecars, beside))
    total = most(largest, plus(sidecars, *(one.effective(is_infeasible) for one in containers)))
    effective = whole.effective(is_infeasible)
    level = {name: effective.get(name, 0) for name in whole.wanted if name in {"cpu", "memory"}}
    return plus(total | level, overhead)


@given(
    st.lists(PARTS, max_size=3),
    st.lists(st.tuples(st.booleans(), PARTS), max_size=3),
    PARTS,
    LISTS,
    st.booleans(),
)
def test_every_pod_counts_as_for_the_scheduler(containers, inits, whole, overhead, infeasible):
    spec = {
        "containers": [
            {"name": f"c{number}", "resources": requests(one.wanted)}
            for number, one in enumerate(containers)
        ],
        "initContainers": [
            {"name": f"i{number}", "resources": requests(one.wanted)}
            | ({"restartPolicy": "Always"} if is_sidecar else {})
            for number, (is_sidecar, one) in enumerate(inits)
        ],
        "resources": requests(whole.wanted),
        "overhead": texts(overhead),
    }
    status = whole.status | {
        "containerStatuses": [
            {"name": f"c{number}", **one.status} for number, one in enumerate(containers)
        ],
        "initContainerStatuses": [
            {"name": f"i{number}", **one.status} for number, (_, one) in enumerate(inits)
        ],
        **(INFEASIBLE if infeasible else {}),
    }
    found = {"metadata": {"uid": "u", "name": "p"}, "spec": spec, "status": status}
    counted = pod_requests.effective_requests(msgspec.convert(found, KubernetesPod))
    expected = texts(scheduler_requests(containers, inits, whole, overhead, infeasible))
    if "ephemeral-storage" in expected:
        expected["storage"] = expected.pop("ephemeral-storage")
    assert counted == resources.parse_offered(expected)


UNREADABLE = [
    ("no_number", "cpu=lots", "pod shop/web: cpu: 'lots' is not a quantity"),
    ("negative", "memory=-1", "pod shop/web: memory: '-1' is negative"),
    ("too_large", f"memory={MAX_AMOUNT + 1}", "pod shop/web: memory: '92"),
    ("too_large_in_our_unit", f"cpu={MAX_AMOUNT}", "pod shop/web: cpu: is out of range"),
    ("too_large_together", f"memory={MAX_AMOUNT}", "pod shop/web: memory: is out of range"),
]


@pytest.mark.parametrize("case", UNREADABLE, ids=lambda case: case[0])
@pytest.mark.parametrize("place", ["container", "init", "overhead", "level", "actual"])
def test_unreadable_quantity_names_pod_and_resource(case, place):
    name, text, sentence = case
    more = "memory=1" if name == "too_large_together" else ""
    found = {
        "container": pod(f"{text} | {more}"),
        "init": pod(f"sidecar: {more} | init: {text}"),
        "overhead": pod(f"{more} | overhead: {text}"),
        "level": pod(f"pod: {text} | overhead: {more}"),
        "actual": pod(f"cpu=0 | {more}", {"containerStatuses": [has("a", text)]}),
    }[place]
    with pytest.raises(errors.InvalidInput) as raised:
        pod_requests.project_pod(found)
    assert raised.value.message.startswith(sentence)
