"""Nodes, projected to the fields needed for lending."""

from __future__ import annotations

from typing import Final

import msgspec

from kubelend.core import resources
from kubelend.core.excerpts import Excerpt
from kubelend.core.resources import NOTHING, Resources


class Node(msgspec.Struct, frozen=True, gc=False):
    """The projection of a Node."""

    name: str
    capacity: Resources = NOTHING
    allocatable: Resources = NOTHING
    labels: dict[str, str] = {}
    is_ready: bool = True
    is_schedulable: bool = True


class NodeMetadata(Excerpt, frozen=True, gc=False):
    name: str
    labels: dict[str, str] = {}


class NodeSpec(Excerpt, frozen=True, gc=False):
    unschedulable: bool = False


class NodeCondition(Excerpt, frozen=True, gc=False):
    type: str = ""
    status: str = ""


class NodeStatus(Excerpt, frozen=True, gc=False):
    conditions: tuple[NodeCondition, ...] = ()
    capacity: dict[str, str] = {}
    allocatable: dict[str, str] = {}


class KubernetesNode(Excerpt, frozen=True, gc=False):
    """The fields of a Kubernetes Node that are decoded."""

    metadata: NodeMetadata
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()


def node_of(found: KubernetesNode) -> Node:
    """Projects a Node; raises `InvalidInput` that names the node and the invalid quantity."""
    where = f"node {found.metadata.name}: status"
    labels = found.metadata.labels
    return Node(
        name=found.metadata.name,
        capacity=_offered(found.status.capacity, f"{where}.capacity"),
        allocatable=_offered(found.status.allocatable, f"{where}.allocatable"),
        labels={name: labels[name] for name in _MARKS if name in labels},
        is_ready=any(
            one.type == "Ready" and one.status == "True" for one in found.status.conditions
        ),
        is_schedulable=not found.spec.unschedulable,
    )


def is_own(node: Node) -> bool:
    """Whether the node counts as capacity: ready, schedulable and not virtual."""
    return node.is_ready and node.is_schedulable and not is_virtual(node)


def is_virtual(node: Node) -> bool:
    """Whether it represents another cluster: borrowed capacity must not be lent again."""
    return (
        _LIQO in node.labels
        or _VIRTUAL_KUBELET in node.labels
        or node.labels.get(_TYPE) == "virtual-kubelet"
    )


_LIQO: Final = "liqo.io/type"
_TYPE: Final = "type"
_VIRTUAL_KUBELET: Final = "virtual-kubelet.io/provider"
_MARKS: Final = (_LIQO, _TYPE, _VIRTUAL_KUBELET)


def _offered(texts: dict[str, str], where: str) -> Resources:
    ours = {_renamed(name): text for name, text in texts.items() if not _is_counter(name)}
    return resources.offered(ours, where)


def _renamed(name: str) -> str:
    return "storage" if name == "ephemeral-storage" else name


def _is_counter(name: str) -> bool:
    """Pods consume these without requests, so the free amount is unknown and cannot be lent."""
    return name == "pods" or name.startswith("attachable-volumes-")
