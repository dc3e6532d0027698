"""A pod asks for what Kubernetes' scheduler says it asks for, exactly, and never for nearly that."""

import json

import msgspec
import pytest

from kubelend.core import errors, pod_requests
from kubelend.core.pod_requests import KubernetesPod
from kubelend.core.quantities import MAX_AMOUNT

MI = 2**20
FPGA, HUGE = "example.com/fpga", "hugepages-2Mi"


def pod(*containers, init=(), overhead=None, level=None, node="", status=None):
    """A Pod through JSON, as an API server sends it."""
    spec = {
        "containers": list(containers),
        "initContainers": list(init),
        "overhead": amounts(overhead),
        "resources": {"requests": amounts(level), "limits": {"cpu": "99"}},
        "nodeName": node,
        "schedulerName": "default-scheduler",
    }
    metadata = {"uid": "u1", "name": "web", "namespace": "shop"}
    text = json.dumps({"kind": "Pod", "metadata": metadata, "spec": spec, "status": status or {}})
    return msgspec.json.decode(text, type=KubernetesPod)


def amounts(text):
    """`"cpu=1 memory=5"` as Kubernetes' list of resources."""
    return dict(part.split("=") for part in (text or "").split())


def box(text="", name="", **fields):
    found = {"name": name, "image": "x", "resources": {"requests": amounts(text)}}
    return {**found, **fields}


def sidecar(text="", name=""):
    return box(text, name, restartPolicy="Always")


def has(name, actual=None, allocated=None):
    """A container's status; without `actual` its node has not said what it runs with."""
    found = {"name": name, "allocatedResources": amounts(allocated), "ready": True}
    return found if actual is None else {**found, "resources": {"requests": amounts(actual)}}


def asked(found):
    return dict(pod_requests.effective_requests(found).items())


# -- containers, init containers, sidecars, overhead

SHAPES = [
    ("nothing", pod(), {}),
    ("a_container_without_requests", pod(box()), {}),
    ("limits_alone", pod(box(resources={"limits": {"cpu": "9"}})), {}),
    ("one_container", pod(box("cpu=1 memory=5")), {"cpu": 1000, "memory": 5}),
    (
        "containers_add_up",
        pod(box("cpu=1 memory=5"), box("cpu=4 memory=12")),
        {"cpu": 5000, "memory": 17},
    ),
    (
        "containers_ask_for_different_things",
        pod(box("cpu=1"), box(f"memory=3 {FPGA}=2")),
        {"cpu": 1000, "memory": 3, FPGA: 2},
    ),
    ("overhead_alone", pod(overhead="cpu=5 memory=5"), {"cpu": 5000, "memory": 5}),
    (
        "overhead_is_added",
        pod(box("cpu=1 memory=10"), overhead="cpu=5 memory=5"),
        {"cpu": 6000, "memory": 15},
    ),
    (
        "overhead_of_what_no_container_asks_for",
        pod(box("cpu=2"), box("cpu=3"), init=[box("cpu=2")], overhead="cpu=1 memory=1Gi"),
        {"cpu": 6000, "memory": 1024 * MI},
    ),
    ("init_container_is_larger", pod(box("cpu=1"), init=[box("cpu=4")]), {"cpu": 4000}),
    ("containers_are_larger", pod(box("cpu=2"), box("cpu=3"), init=[box("cpu=2")]), {"cpu": 5000}),
    (
        "init_containers_do_not_add_up",
        pod(box("cpu=1"), init=[box("cpu=3"), box("cpu=4"), box("cpu=3")]),
        {"cpu": 4000},
    ),
    (
        "the_larger_is_taken_of_each_resource",
        pod(box("cpu=1 memory=10"), init=[box("cpu=40 memory=2"), box("memory=5")]),
        {"cpu": 40_000, "memory": 10},
    ),
    (
        "overhead_is_added_to_a_large_init_container",
        pod(box("cpu=5"), init=[box("cpu=1"), box("cpu=40")], overhead="cpu=3"),
        {"cpu": 43_000},
    ),
    ("sidecar_runs_beside", pod(box("cpu=1"), init=[sidecar("cpu=1")]), {"cpu": 2000}),
    (
        "sidecars_beside_each_other_against_an_init_container_before",
        pod(
            box("cpu=1"),
            init=[box("cpu=5"), sidecar("cpu=1"), sidecar("cpu=2"), sidecar("cpu=3")],
        ),
        {"cpu": 7000},
    ),
    (
        "init_container_runs_beside_the_sidecars_before_it_only",
        pod(
            box("cpu=1"),
            init=[
                box("cpu=5"),
                sidecar("cpu=1"),
                sidecar("cpu=2"),
                box("cpu=5"),
                sidecar("cpu=3"),
            ],
        ),
        {"cpu": 8000},
    ),
    (
        "sidecar_before_a_large_init_container",
        pod(box("cpu=100"), init=[sidecar("cpu=10"), box("cpu=200")]),
        {"cpu": 210_000},
    ),
    (
        "sidecars_without_containers",
        pod(init=[sidecar("cpu=1"), sidecar("cpu=2")]),
        {"cpu": 3000},
    ),
    (
        "only_always_makes_a_sidecar",
        pod(box("cpu=1"), init=[box("cpu=1", restartPolicy="OnFailure")]),
        {"cpu": 1000},
    ),
]


# -- what a pod asks for as a whole

LEVELS = [
    ("pod_alone", pod(level="memory=2Mi"), {"memory": 2 * MI}),
    (
        "pod_says_one_and_containers_another",
        pod(box("cpu=2m"), level="memory=2Mi"),
        {"cpu": 2, "memory": 2 * MI},
    ),
    (
        "pod_stands_in_for_its_containers",
        pod(box("cpu=2m memory=3Mi"), level="cpu=8m memory=6Mi"),
        {"cpu": 8, "memory": 6 * MI},
    ),
    (
        "pod_stands_in_for_init_containers_and_sidecars",
        pod(
            box("cpu=2m memory=3Mi"),
            init=[sidecar("cpu=4m memory=5Mi"), box("cpu=8m memory=6Mi")],
            level="cpu=11m memory=10Mi",
        ),
        {"cpu": 11, "memory": 10 * MI},
    ),
    (
        "overhead_is_added_to_what_the_pod_says",
        pod(box("cpu=1"), level="cpu=2", overhead="cpu=100m memory=1"),
        {"cpu": 2100, "memory": 1},
    ),
    (
        "huge_pages_of_the_pod",
        pod(box(f"{HUGE}=6Mi hugepages-1Gi=1Gi"), level=f"cpu=1 {HUGE}=10Mi"),
        {"cpu": 1000, HUGE: 10 * MI, "hugepages-1Gi": 1024 * MI},
    ),
    (
        "a_pod_cannot_say_the_rest",
        pod(box("ephemeral-storage=3Mi"), level=f"ephemeral-storage=2Mi {FPGA}=1 nvidia.com/gpu=1"),
        {"storage": 3 * MI},
    ),
]


# -- a resize in place


def resized(desired, actual, allocated, **status):
    statuses = {"containerStatuses": [has("a", actual, allocated)], **status}
    return pod(box(desired, "a"), status=statuses)


INFEASIBLE = {
    "conditions": [{"type": "PodResizePending", "status": "True", "reason": "Infeasible"}]
}
DEFERRED = {"conditions": [{"type": "PodResizePending", "status": "True", "reason": "Deferred"}]}
OTHER = {"conditions": [{"type": "Ready", "reason": "Infeasible"}]}
TWO = {
    "containerStatuses": [has("a", "cpu=2"), has("b", "cpu=1")],
}

RESIZES = [
    ("growing", resized("cpu=4", "cpu=2", "cpu=2"), {"cpu": 4000}),
    ("shrinking", resized("cpu=1", "cpu=3", "cpu=1"), {"cpu": 3000}),
    ("allocated_and_not_yet_real", resized("cpu=1", "cpu=1", "cpu=2"), {"cpu": 2000}),
    (
        "the_largest_of_each_resource",
        resized(
            "cpu=30m memory=20M ephemeral-storage=10G",
            "cpu=10m memory=30M ephemeral-storage=20G",
            "cpu=20m memory=10M ephemeral-storage=30G",
        ),
        {"cpu": 30, "memory": 30 * 10**6, "storage": 30 * 10**9},
    ),
    ("infeasible", resized("cpu=4", "cpu=2", "", **INFEASIBLE), {"cpu": 2000}),
    ("infeasible_but_allocated", resized("cpu=4", "cpu=2", "cpu=3", **INFEASIBLE), {"cpu": 3000}),
    ("infeasible_before_1_33", resized("cpu=4", "cpu=2", "", resize="Infeasible"), {"cpu": 2000}),
    ("deferred", resized("cpu=4", "cpu=2", "cpu=2", **DEFERRED), {"cpu": 4000}),
    (
        "the_condition_outweighs_the_old_field",
        resized("cpu=4", "cpu=2", "cpu=2", resize="Infeasible", **DEFERRED),
        {"cpu": 4000},
    ),
    ("another_condition", resized("cpu=4", "cpu=2", "cpu=2", **OTHER), {"cpu": 4000}),
    ("infeasible_and_nothing_reported", resized("cpu=4", None, "", **INFEASIBLE), {"cpu": 4000}),
    ("allocated_before_it_is_reported", resized("cpu=1", None, "cpu=2"), {"cpu": 2000}),
    ("each_container_at_its_largest", pod(box("cpu=1", "a"), box("cpu=2", "b"), status=TWO), 4000),
    (
        "a_status_is_of_the_container_of_its_name",
        pod(box("cpu=1", "a"), status={"containerStatuses": [has("b", "cpu=9", "cpu=9")]}),
        {"cpu": 1000},
    ),
    (
        "sidecar_shrinking",
        pod(
            box("cpu=1"),
            init=[sidecar("cpu=1", "s")],
            status={"initContainerStatuses": [has("s", "cpu=3")]},
        ),
        {"cpu": 4000},
    ),
    (
        "sidecar_infeasible",
        pod(
            init=[sidecar("cpu=4", "s")],
            status={"initContainerStatuses": [has("s", "cpu=2")], **INFEASIBLE},
        ),
        {"cpu": 2000},
    ),
    (
        "sidecar_being_resized_beside_an_init_container",
        pod(
            init=[sidecar("cpu=1", "s"), box("cpu=5", "i")],
            status={"initContainerStatuses": [has("s", "cpu=3"), has("i", "cpu=9", "cpu=9")]},
        ),
        {"cpu": 8000},
    ),
    (
        "pod_as_a_whole_shrinking",
        pod(
            level="cpu=1 memory=5",
            overhead="cpu=100m",
            status={"resources": {"requests": amounts("cpu=2100m")}},
        ),
        {"cpu": 2100, "memory": 5},
    ),
    (
        "pod_as_a_whole_growing",
        pod(
            level="cpu=3",
            overhead="cpu=100m",
            status={"allocatedResources": amounts("cpu=1100m memory=9")},
        ),
        {"cpu": 3100},
    ),
    (
        "pod_as_a_whole_allocated",
        pod(level="cpu=1", status={"allocatedResources": amounts("cpu=2")}),
        {"cpu": 2000},
    ),
    (
        "pod_as_a_whole_infeasible",
        pod(level="cpu=8", status={"resources": {"requests": {"cpu": "2"}}, **INFEASIBLE}),
        {"cpu": 2000},
    ),
    (
        "pod_as_a_whole_infeasible_and_nothing_reported",
        pod(level="cpu=8", status=INFEASIBLE),
        {"cpu": 8000},
    ),
    (
        "pod_as_a_whole_with_less_than_its_overhead",
        pod(
            level="cpu=8",
            overhead="cpu=1",
            status={"resources": {"requests": {"cpu": "500m"}}, **INFEASIBLE},
        ),
        {"cpu": 1000},
    ),
]


# -- units


def each(count, text):
    return pod(*(box(text) for _ in range(count)))


UNITS = [
    ("nanocores_are_rounded_up_once", each(10, "cpu=100000n"), {"cpu": 1}),
    ("nanocores_just_over", each(10, "cpu=100001n"), {"cpu": 2}),
    ("one_nanocore_is_not_none", each(1, "cpu=1n"), {"cpu": 1}),
    ("finer_than_nano_counts_as_one", pod(box("cpu=999999.5n"), box("cpu=0.5n")), {"cpu": 2}),
    ("decimals", each(3, "cpu=0.5"), {"cpu": 1500}),
    ("exponents", each(3, "cpu=1e-3"), {"cpu": 3}),
    ("parts_of_a_byte", each(3, "memory=500m"), {"memory": 2}),
    ("parts_of_a_device", each(2, f"{FPGA}=500m"), {FPGA: 1}),
    (
        "names_of_ours",
        pod(box("ephemeral-storage=1Ki nvidia.com/gpu=2 amd.com/gpu=1")),
        {"storage": 1024, "gpu": 2, "amd.com/gpu": 1},
    ),
    ("zero_is_nothing", pod(box(f"cpu=0 {FPGA}=0"), overhead="memory=0"), {}),
    ("pods_are_not_counted_as_a_resource", pod(box("cpu=1"), node="n"), {"cpu": 1000}),
    ("the_largest", pod(box(f"memory={MAX_AMOUNT}")), {"memory": MAX_AMOUNT}),
]

CASES = [*SHAPES, *LEVELS, *RESIZES, *UNITS]


@pytest.mark.parametrize("found, wanted", [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_pod_asks_for(found, wanted):
    assert asked(found) == ({"cpu": wanted} if isinstance(wanted, int) else wanted)


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
        "container": pod(box(text), box(more)),
        "init": pod(init=[sidecar(more), box(text)]),
        "overhead": pod(box(more), overhead=text),
        "level": pod(level=text, overhead=more),
        "actual": pod(box(name="a"), box(more), status={"containerStatuses": [has("a", text)]}),
    }[place]
    with pytest.raises(errors.InvalidInput) as raised:
        pod_requests.project_pod(found)
    assert raised.value.message.startswith(sentence)
