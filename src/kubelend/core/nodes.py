"""Nodes, projected to the fields needed for lending."""

from __future__ import annotations

from typing import Final

import msgspec

from kubelend.core import resources
from kubelend.core.excerpts import PartialObject
from kubelend.core.resources import NOTHING, Resources


class Node(msgspec.Struct, frozen=True, gc=False):
    """The projection of a Node."""

    name: str
    capacity: Resources = NOTHING
    allocatable: Resources = NOTHING
    labels: dict[str, str] = {}
    is_ready: bool = True
    is_schedulable: bool = True


class NodeMetadata(PartialObject, frozen=True, gc=False):
    name: str
    labels: dict[str, str] = {}


class NodeSpec(PartialObject, frozen=True, gc=False):
    unschedulable: bool = False


class NodeCondition(PartialObject, frozen=True, gc=False):
    type: str = ""
    status: str = ""


class NodeStatus(PartialObject, frozen=True, gc=False):
    conditions: tuple[NodeCondition, ...] = ()
    capacity: dict[str, str] = {}
    allocatable: dict[str, str] = {}


class KubernetesNode(PartialObject, frozen=True, gc=False):
    """The fields of a Kubernetes Node that are decoded."""

    metadata: NodeMetadata
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


def project_node(found: KubernetesNode) -> Node:
    """Projects a Node; raises `InvalidInput` that names the node and the invalid quantity."""
    where = f"node {found.metadata.name}: status"
    labels = found.metadata.labels
    return Node(
        name=found.metadata.name,
        capacity=_node_amounts(found.status.capacity, f"{where}.capacity"),
        allocatable=_node_amounts(found.status.allocatable, f"{where}.allocatable"),
        labels={name: labels[name] for name in _VIRTUAL_NODE_LABELS if name in labels},
        is_ready=any(
            one.type == "Ready" and one.status == "True" for one in found.status.conditions
        ),
        is_schedulable=not found.spec.unschedulable,
    )


def counts_as_capacity(node: Node) -> bool:
    """Whether the node counts as capacity: ready, schedulable and not virtual."""
    return node.is_ready and node.is_schedulable and not is_virtual_node(node)


def is_virtual_node(node: Node) -> bool:
    """Whether it represents another cluster: borrowed capacity must not be lent again."""
    return (
        _LIQO_TYPE_LABEL in node.labels
        or _VIRTUAL_KUBELET_LABEL in node.labels
        or node.labels.get(_TYPE_LABEL) == "virtual-kubelet"
    )


_LIQO_TYPE_LABEL: Final = "liqo.io/type"
_TYPE_LABEL: Final = "type"
_VIRTUAL_KUBELET_LABEL: Final = "virtual-kubelet.io/provider"
_VIRTUAL_NODE_LABELS: Final = (_LIQO_TYPE_LABEL, _TYPE_LABEL, _VIRTUAL_KUBELET_LABEL)


def _node_amounts(texts: dict[str, str], where: str) -> Resources:
    ours = {
        _resource_name(name): text for name, text in texts.items() if not _is_unrequestable(name)
    }
    return resources.parse_offered(ours, where)


def _resource_name(name: str) -> str:
    return "storage" if name == "ephemeral-storage" else name


def _is_unrequestable(name: str) -> bool:
    """Pods consume these without requests, so the free amount is unknown and cannot be lent."""
    return name == "pods" or name.startswith("attachable-volumes-")
