"""A lab's clusters hold what the documents say: nodes and pods, roles, and kubeconfigs that work."""

import stat
from typing import Any

import msgspec
import pytest
import yaml

from kubelend.core import pod_requests
from kubelend.core.resources import Resources
from kubelend.envtest import credentials
from kubelend.kube import config
from kubelend.lab import setup

KI, MI, GI = 2**10, 2**20, 2**30


@pytest.mark.parametrize(
    "name, allocatable, requested",
    [
        ("agent-cluster-1", Resources(6_000, 8 * GI, 1), Resources(950, 290 * MI)),
        # The contract's example, of which 8950m and 7597392Ki are left.
        ("agent-cluster-2", Resources(10_000, 8_025_424 * KI), Resources(1_050, 418 * MI)),
    ],
)
def test_agent_counts_the_resources_of_the_examples(name, allocatable, requested):
    manifests: dict[str, list[dict[str, Any]]] = {"Node": [], "Pod": []}
    for one in setup.CLUSTER_FIXTURES[name]:
        stored = {**one, "metadata": {**one["metadata"], "uid": "set by the API server"}}
        manifests[one["kind"]].append(stored)
    nodes = msgspec.convert(manifests["Node"], list[pod_requests.KubernetesNode])
    pods = msgspec.convert(manifests["Pod"], list[pod_requests.KubernetesPod])
    found = (pod_requests.project_node(one).allocatable for one in nodes)
    assert sum(found, Resources()) == allocatable
    assert sum((pod_requests.project_pod(one).requests for one in pods), Resources()) == requested


@pytest.mark.parametrize("part", ["broker", "agent", "liqo"])
def test_what_is_shipped_is_installed_in_the_namespace_of_the_objects(part):
    found = {"broker": setup.broker_manifests, "agent": setup.agent_manifests}.get(
        part, setup.liqo_manifests
    )()
    account = setup.BROKER_ACCOUNT if part == "broker" else setup.AGENT_ACCOUNT
    roles = {one["metadata"]["name"]: one for one in found if one["kind"].endswith("Role")}
    bindings = [one for one in found if one["kind"].endswith("RoleBinding")]
    assert bindings
    for binding in bindings:
        role = roles[binding["roleRef"]["name"]]
        assert binding["roleRef"]["kind"] == role["kind"]
        assert binding["subjects"][0]["name"] == account
        namespace = "liqo" if "liqo" in role["metadata"]["name"] else setup.OBJECT_NAMESPACE
        if role["kind"] == "Role":
            assert binding["metadata"]["namespace"] == role["metadata"]["namespace"] == namespace
    for one in found:
        assert setup.collection_path(one)


@pytest.fixture
def kubeconfigs(tmp_path):
    """As Kind writes them: contexts of its own names."""
    found = {}
    for port, name in enumerate(("a", "b"), 1):
        content = {
            "clusters": [
                {"name": f"kind-{name}", "cluster": {"server": f"https://127.0.0.1:{port}"}}
            ],
            "users": [{"name": f"kind-{name}", "user": {"token": f"secret of {name}"}}],
            "contexts": [{"name": f"kind-{name}", "context": {}}],
        }
        found[name] = tmp_path / name
        found[name].write_text(yaml.safe_dump(content))
    return found


def test_account_reaches_the_same_cluster_with_its_token(kubeconfigs, tmp_path):
    path = tmp_path / "made"
    made = credentials.write_token_kubeconfig(kubeconfigs["a"], path, "robot", "other")
    found = config.config_from_kubeconfig(made)
    assert (found.server, found.token.data) == ("https://127.0.0.1:1", b"other")
    assert stat.S_IMODE(made.stat().st_mode) == 0o600


def test_merged_kubeconfig_has_a_context_for_each_cluster(kubeconfigs, tmp_path):
    made = credentials.merge_kubeconfigs(kubeconfigs, tmp_path / "made")
    for port, name in enumerate(kubeconfigs, 1):
        found = config.config_from_kubeconfig(made, name)
        assert found.server == f"https://127.0.0.1:{port}"
        assert found.token.data == f"secret of {name}".encode()
    assert config.config_from_kubeconfig(made).server == "https://127.0.0.1:1"
