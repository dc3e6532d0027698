"""Fixture nodes and pods of the agents' clusters, with the status that kubelets would report.

`agent-cluster-2` is the cluster of the published example: 10 CPU and 8025424Ki, of which pods request 1050m
and 418Mi. `agent-cluster-1` is smaller and has a GPU to lend.
"""

from __future__ import annotations

import msgspec

from kubelend.lab.rights import Manifest


class NodeFixture(msgspec.Struct, frozen=True):
    """A node in condition Ready."""

    name: str
    cpu: str
    memory: str
    gpu: str = ""


class PodFixture(msgspec.Struct, frozen=True):
    """A pod in phase Running."""

    name: str
    cpu: str
    memory: str = "0"
    namespace: str = "kube-system"


class ClusterFixture(msgspec.Struct, frozen=True):
    """Nodes and pods of one cluster. All pods are on the first node."""

    nodes: tuple[NodeFixture, ...]
    pods: tuple[PodFixture, ...]


_SYSTEM_PODS = (
    PodFixture("coredns-1", "100m", "70Mi"),
    PodFixture("coredns-2", "100m", "70Mi"),
    PodFixture("etcd", "100m", "100Mi"),
    PodFixture("kindnet", "100m", "50Mi"),
    PodFixture("kube-apiserver", "250m"),
    PodFixture("kube-controller-manager", "200m"),
    PodFixture("kube-scheduler", "100m"),
)
"""The system pods of an idle cluster."""

CLUSTER_FIXTURES = {
    "agent-cluster-1": ClusterFixture(
        (
            NodeFixture("agent-cluster-1-control-plane", "4", "4Gi"),
            NodeFixture("agent-cluster-1-gpu", "2", "4Gi", gpu="1"),
        ),
        _SYSTEM_PODS,
    ),
    "agent-cluster-2": ClusterFixture(
        (NodeFixture("agent-cluster-2-control-plane", "10", "8025424Ki"),),
        (*_SYSTEM_PODS, PodFixture("web", "100m", "128Mi", "default")),
    ),
}


def node_manifests(population: ClusterFixture) -> list[Manifest]:
    return [_node_manifest(node) for node in population.nodes]


def pod_manifests(population: ClusterFixture) -> list[Manifest]:
    return [_pod_manifest(pod, population.nodes[0].name) for pod in population.pods]


_READY_CONDITION = {"type": "Ready", "status": "True"}

RUNNING_STATUS = {
    "status": {
        "phase": "Running",
        "conditions": [_READY_CONDITION],
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


def _node_manifest(node: NodeFixture) -> Manifest:
    amounts = {"cpu": node.cpu, "memory": node.memory, "pods": "110"}
    if node.gpu:
        amounts["nvidia.com/gpu"] = node.gpu
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": node.name, "labels": {"kubernetes.io/hostname": node.name}},
        "status": {"capacity": amounts, "allocatable": amounts, "conditions": [_READY_CONDITION]},
    }


def _pod_manifest(pod: PodFixture, node: str) -> Manifest:
    requests = {"cpu": pod.cpu, "memory": pod.memory}
    container = {"name": "main", "image": "none", "resources": {"requests": requests}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": pod.name, "namespace": pod.namespace},
        "spec": {"nodeName": node, "containers": [container]},
    }
