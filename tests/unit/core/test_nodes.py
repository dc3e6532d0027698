"""Only machines of this cluster that can take pods count, and for no more than they have."""

import json

import msgspec
import pytest

from kubelend.core import errors, pod_requests
from kubelend.core.pod_requests import KubernetesNode, Node
from kubelend.core.resources import NOTHING, Resources

READY = {"type": "Ready", "status": "True"}


def node(labels=None, conditions=(READY,), status=None, **spec):
    """A Node through JSON, as an API server sends it."""
    metadata = {"name": "n1", "uid": "u", "labels": labels or {}}
    status = {
        "conditions": list(conditions),
        "nodeInfo": {"architecture": "arm64"},
        **(status or {}),
    }
    text = json.dumps({"kind": "Node", "metadata": metadata, "spec": spec, "status": status})
    return pod_requests.project_node(msgspec.json.decode(text, type=KubernetesNode))


OWN = [
    ("plain", node(), True),
    (
        "labelled",
        node({"kubernetes.io/role": "agent", "type": "large", "liqo.io/other": "x"}),
        True,
    ),
    ("uncordoned", node(unschedulable=False), True),
    ("cordoned", node(unschedulable=True), False),
    ("not_ready", node(conditions=[{"type": "Ready", "status": "False"}]), False),
    ("unknown", node(conditions=[{"type": "Ready", "status": "Unknown"}]), False),
    ("no_conditions", node(conditions=[]), False),
    ("another_condition", node(conditions=[{"type": "DiskPressure", "status": "True"}]), False),
    (
        "ready_among_others",
        node(conditions=[{"type": "PIDPressure", "status": "False"}, READY]),
        True,
    ),
    ("liqo", node({"liqo.io/type": "virtual-node"}), False),
    ("liqo_of_any_kind", node({"liqo.io/type": ""}), False),
    ("virtual_kubelet", node({"type": "virtual-kubelet"}), False),
    ("admiralty", node({"virtual-kubelet.io/provider": "admiralty"}), False),
]


@pytest.mark.parametrize("found, is_own", [case[1:] for case in OWN], ids=[case[0] for case in OWN])
def test_node_counts(found, is_own):
    assert pod_requests.counts_as_capacity(found) is is_own


def test_node_offers_what_it_has_rounded_down():
    found = node(
        status={
            "capacity": {
                "cpu": "8",
                "memory": "16384256Ki",
                "ephemeral-storage": "100Gi",
                "nvidia.com/gpu": "2",
                "example.com/fpga": "1",
                "hugepages-2Mi": "4Mi",
                "hugepages-1Gi": "0",
            },
            "allocatable": {"cpu": "7910999u", "memory": "1500m", "ephemeral-storage": "0.5"},
        }
    )
    assert found == Node(
        "n1",
        Resources(
            8000,
            16384256 * 1024,
            2,
            100 * 2**30,
            {"example.com/fpga": 1, "hugepages-2Mi": 4 * 2**20},
        ),
        Resources(cpu=7910, memory=1),
    )


def test_what_pods_take_without_asking_is_not_offered():
    amounts = {"pods": "110", "attachable-volumes-aws-ebs": "39", "cpu": "1"}
    found = node(status={"capacity": amounts, "allocatable": amounts})
    assert found.capacity == found.allocatable == Resources(cpu=1000)


def test_only_the_labels_that_matter_are_kept():
    labels = {"liqo.io/type": "a", "type": "b", "virtual-kubelet.io/provider": "c"}
    assert node({**labels, "kubernetes.io/hostname": "n1", "zone": "x"}).labels == labels


@pytest.mark.parametrize("part", ["capacity", "allocatable"])
@pytest.mark.parametrize("name, shown", [("cpu", "cpu"), ("ephemeral-storage", "storage")])
def test_unreadable_quantity_names_node_and_resource(part, name, shown):
    with pytest.raises(errors.InvalidInput) as raised:
        node(status={part: {name: "lots"}})
    assert raised.value.message == f"node n1: status.{part}.{shown}: 'lots' is not a quantity"


def test_smallest_node_is_read_and_does_not_count():
    found = pod_requests.project_node(
        msgspec.json.decode(b'{"metadata":{"name":"n"}}', type=KubernetesNode)
    )
    assert found == Node("n", NOTHING, NOTHING, is_ready=False)
    assert not pod_requests.counts_as_capacity(found)
