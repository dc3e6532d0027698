"""The population of the agents' clusters, counted as an agent counts it."""

import msgspec
import pytest

from kubelend.core import pod_requests
from kubelend.core.resources import Resources
from kubelend.lab import setup

KI, MI, GI = 2**10, 2**20, 2**30

SUMS = {
    "agent-cluster-1": (Resources(6_000, 8 * GI, 1), Resources(950, 290 * MI)),
    # The contract's example, of which 8950m and 7597392Ki are left.
    "agent-cluster-2": (Resources(10_000, 8_025_424 * KI), Resources(1_050, 418 * MI)),
}


@pytest.mark.parametrize("name", SUMS)
def test_cluster_is_as_large_as_the_examples_say(name):
    population = setup.CLUSTER_FIXTURES[name]
    read = [
        msgspec.convert(one, pod_requests.KubernetesNode)
        for one in setup.node_manifests(population)
    ]
    allocatable = [pod_requests.project_node(one).allocatable for one in read]
    asked = [_requests(one) for one in setup.pod_manifests(population)]
    assert (sum(allocatable, Resources()), sum(asked, Resources())) == SUMS[name]


def _requests(pod):
    pod["metadata"]["uid"] = "given by the API server"
    return pod_requests.project_pod(msgspec.convert(pod, pod_requests.KubernetesPod)).requests
