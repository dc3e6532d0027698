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


class NodeHead(NodeMetadata, frozen=True, gc=False):
    """Nodes have no namespace, but the client reads it of every kind."""

    uid: str = ""
    namespace: str = ""


class SeenNode(msgspec.Struct, frozen=True, gc=False):
    """A node, of which only `projected` is left after decoding."""

    metadata: NodeHead
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()
    kept: Node = Node("")

    def __post_init__(self) -> None:
        with _told_to_the_decoder():
            kept = nodes.node_of(KubernetesNode(self.metadata, self.spec, self.status))
        _reduce(self, metadata=_NODE_HEAD, spec=_NODE_SPEC, status=_NODE_STATUS, kept=kept)

    @property
    def key(self) -> str:
        return self.kept.name


class SeenPod(msgspec.Struct, frozen=True, gc=False):
    """A pod, of which only `projected` is left after decoding."""

    metadata: PodMetadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()
    kept: Pod = Pod("")

    def __post_init__(self) -> None:
        with _told_to_the_decoder():
            kept = requests.pod_of(KubernetesPod(self.metadata, self.spec, self.status))
        _reduce(self, metadata=_POD_HEAD, spec=_POD_SPEC, status=_POD_STATUS, kept=kept)

    @property
    def key(self) -> str:
        return self.kept.id


class Namespace(msgspec.Struct, frozen=True, gc=False):
    """The fields that identify a cluster."""

    metadata: NodeHead


NODES: Final = Resource("", "v1", "nodes", "Node", SeenNode, namespaced=False, page=50)
PODS: Final = Resource("", "v1", "pods", "Pod", SeenPod, page=50)
"""Pods have ten kilobytes each, of which a hundred bytes are kept: the page size bounds the agent's
memory."""
NAMESPACES: Final = Resource("", "v1", "namespaces", "Namespace", Namespace, namespaced=False)

_NODE_HEAD, _NODE_SPEC, _NODE_STATUS = NodeHead(""), NodeSpec(), NodeStatus()
_POD_HEAD, _POD_SPEC, _POD_STATUS = PodMetadata("", ""), PodSpec(), PodStatus()


@contextmanager
def _told_to_the_decoder() -> Iterator[None]:
    """msgspec reports this class as a decode error of the object."""
    try:
        yield
    except InvalidInput as problem:
        raise ValueError(str(problem)) from problem


def _reduce(seen: msgspec.Struct, **parts: object) -> None:
    for name, value in parts.items():
        force_setattr(seen, name, value)
