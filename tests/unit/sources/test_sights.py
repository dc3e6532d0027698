"""Nodes and pods as they are decoded: reduced to a projection, and rejected if that is impossible."""

import msgspec
import pytest

from kubelend.core.pod_requests import Node, NodeSpec, NodeStatus, Pod, PodSpec, PodStatus
from kubelend.core.resources import Resources
from kubelend.sources.kubernetes import NodeProjection, PodProjection


def pod(cpu):
    container = {"name": "main", "resources": {"requests": {"cpu": cpu}}}
    metadata = {"name": "p", "namespace": "team", "uid": "u-1", "labels": {"app": "x"}}
    return {"metadata": metadata, "spec": {"nodeName": "n", "containers": [container]}}


def node(cpu):
    status = {"capacity": {"cpu": cpu}, "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {"name": "n", "uid": "u-2", "labels": {"zone": "a"}}, "status": status}


def decoded(found, kind):
    return msgspec.json.decode(msgspec.json.encode(found), type=kind)


def test_pod_is_reduced_to_its_projection():
    found = decoded(pod("2"), PodProjection)
    assert found.projected == Pod("u-1", "n", Resources(cpu=2000))
    assert found.key == "u-1"
    assert (found.spec, found.status, found.metadata.labels) == (PodSpec(), PodStatus(), {})


def test_node_is_reduced_to_its_projection():
    found = decoded(node("4"), NodeProjection)
    assert found.projected == Node("n", capacity=Resources(cpu=4000))
    assert found.key == "n"
    assert (found.spec, found.status, found.metadata.labels) == (NodeSpec(), NodeStatus(), {})


@pytest.mark.parametrize(
    "found, kind, problem",
    [
        (pod("odd"), PodProjection, "pod team/p: cpu: 'odd' is not a quantity"),
        (node("odd"), NodeProjection, "node n: status.capacity"),
    ],
    ids=["pod", "node"],
)
def test_quantity_that_cannot_be_parsed_is_a_decode_error(found, kind, problem):
    with pytest.raises(msgspec.ValidationError, match=problem):
        decoded(found, kind)
