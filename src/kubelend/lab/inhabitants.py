"""Fixture nodes and pods of the agents' clusters, with the status that kubelets would report.

`agent-cluster-2` is the cluster of the published example: 10 CPU and 8025424Ki, of which pods request 1050m
and 418Mi. `agent-cluster-1` is smaller and has a GPU to lend.
"""

from __future__ import annotations

import msgspec

from kubelend.lab.rights import Document


class Node(msgspec.Struct, frozen=True):
    """A node in condition Ready."""

    name: str
    cpu: str
    memory: str
    gpu: str = ""


class Pod(msgspec.Struct, frozen=True):
    """A pod in phase Running."""

    name: str
    cpu: str
    memory: str = "0"
    namespace: str = "kube-system"


class Population(msgspec.Struct, frozen=True):
    """Nodes and pods of one cluster. All pods are on the first node."""

    nodes: tuple[Node, ...]
    pods: tuple[Pod, ...]


_SYSTEM = (
    Pod("coredns-1", "100m", "70Mi"),
    Pod("coredns-2", "100m", "70Mi"),
    Pod("etcd", "100m", "100Mi"),
    Pod("kindnet", "100m", "50Mi"),
    Pod("kube-apiserver", "250m"),
    Pod("kube-controller-manager", "200m"),
    Pod("kube-scheduler", "100m"),
)
"""The system pods of an idle cluster."""

EVERYONE = {
    "agent-cluster-1": Population(
        (
            Node("agent-cluster-1-control-plane", "4", "4Gi"),
            Node("agent-cluster-1-gpu", "2", "4Gi", gpu="1"),
        ),
        _SYSTEM,
    ),
    "agent-cluster-2": Population(
        (Node("agent-cluster-2-control-plane", "10", "8025424Ki"),),
        (*_SYSTEM, Pod("web", "100m", "128Mi", "default")),
    ),
}


def nodes(population: Population) -> list[Document]:
    return [_node(node) for node in population.nodes]


def pods(population: Population) -> list[Document]:
    return [_pod(pod, population.nodes[0].name) for pod in population.pods]


_READY = {"type": "Ready", "status": "True"}

RUNNING = {
    "status": {
        "phase": "Running",
        "conditions": [_READY],
        "containerStatuses": [
            {
                "name": "main",
                "image": "none",
                "imageID": "",
                "ready": True,
                "restartCount": 0,
                "state": {"running": {}},
            }
        ],
    }
}
"""The status that a kubelet reports for a running pod."""


def _node(node: Node) -> Document:
    amounts = {"cpu": node.cpu, "memory": node.memory, "pods": "110"}
    if node.gpu:
        amounts["nvidia.com/gpu"] = node.gpu
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node.name, "labels": {"kubernetes.io/hostname": node.name}},
        "status": {"capacity": amounts, "allocatable": amounts, "conditions": [_READY]},
    }


def _pod(pod: Pod, node: str) -> Document:
    requests = {"cpu": pod.cpu, "memory": pod.memory}
    container = {"name": "main", "image": "none", "resources": {"requests": requests}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": pod.name, "namespace": pod.namespace},
        "spec": {"nodeName": node, "containers": [container]},
    }
