"""Projections of nodes and pods: on decoding each object is reduced to the few fields that count.

An object with an invalid quantity is reported as undecodable.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec
from msgspec.structs import force_setattr

from kubelend.core import nodes, requests
from kubelend.core.errors import InvalidInput
from kubelend.core.nodes import KubernetesNode, Node, NodeMetadata, NodeSpec, NodeStatus
from kubelend.core.pods import Pod
from kubelend.core.requests import KubernetesPod, PodMetadata, PodSpec, PodStatus
from kubelend.kube.resources import Resource


class ObjectMetadata(NodeMetadata, frozen=True, gc=False):
    """Nodes have no namespace, but the client reads it of every kind."""

    uid: str = ""
    namespace: str = ""


class NodeProjection(msgspec.Struct, frozen=True, gc=False):
    """A node, of which only `projected` is left after decoding."""

    metadata: ObjectMetadata
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()
    projected: Node = Node("")

    def __post_init__(self) -> None:
        with _as_decode_error():
            kept = nodes.project_node(KubernetesNode(self.metadata, self.spec, self.status))
        _replace_fields(
            self,
            metadata=_EMPTY_NODE_METADATA,
            spec=_EMPTY_NODE_SPEC,
            status=_EMPTY_NODE_STATUS,
            kept=kept,
        )

    @property
    def key(self) -> str:
        return self.projected.name


class PodProjection(msgspec.Struct, frozen=True, gc=False):
    """A pod, of which only `projected` is left after decoding."""

    metadata: PodMetadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()
    projected: Pod = Pod("")

    def __post_init__(self) -> None:
        with _as_decode_error():
            kept = requests.project_pod(KubernetesPod(self.metadata, self.spec, self.status))
        _replace_fields(
            self,
            metadata=_EMPTY_POD_METADATA,
            spec=_EMPTY_POD_SPEC,
            status=_EMPTY_POD_STATUS,
            kept=kept,
        )

    @property
    def key(self) -> str:
        return self.projected.id


class Namespace(msgspec.Struct, frozen=True, gc=False):
    """The fields that identify a cluster."""

    metadata: ObjectMetadata


NODES: Final = Resource("", "v1", "nodes", "Node", NodeProjection, namespaced=False, page_size=50)
PODS: Final = Resource("", "v1", "pods", "Pod", PodProjection, page_size=50)
"""Pods have ten kilobytes each, of which a hundred bytes are kept: the page size bounds the agent's
memory."""
NAMESPACES: Final = Resource("", "v1", "namespaces", "Namespace", Namespace, namespaced=False)

_EMPTY_NODE_METADATA, _EMPTY_NODE_SPEC, _EMPTY_NODE_STATUS = (
    ObjectMetadata(""),
    NodeSpec(),
    NodeStatus(),
)
_EMPTY_POD_METADATA, _EMPTY_POD_SPEC, _EMPTY_POD_STATUS = (
    PodMetadata("", ""),
    PodSpec(),
    PodStatus(),
)


@contextmanager
def _as_decode_error() -> Iterator[None]:
    """msgspec reports this class as a decode error of the object."""
    try:
        yield
    except InvalidInput as problem:
        raise ValueError(str(problem)) from problem


def _replace_fields(seen: msgspec.Struct, **parts: object) -> None:
    for name, value in parts.items():
        force_setattr(seen, name, value)
