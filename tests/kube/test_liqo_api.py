"""Access to objects that the agent shares with Liqo and with users, on a real API server."""

import pytest

from kubelend.peerings import liqo_objects
from kubelend.peerings.liqo_api import LiqoApi
from kubelend.peerings.liqo_objects import MANAGED_LABEL, NAMESPACES, PODS
from kubelend.peerings.liqo_removal import Delete, Evict, Patch

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def api(kube_client):
    return LiqoApi(kube_client)


@pytest.mark.parametrize("is_ours", [True, False])
async def test_namespace_of_others_does_not_become_ours(api, kube_client, namespace, is_ours):
    remote = namespace.removesuffix("-")
    name = liqo_objects.tenant_namespace(remote)
    labels = {MANAGED_LABEL: "kubelend-agent" if is_ours else "somebody"}
    manifest = {"metadata": {"name": name, "labels": labels}}
    await kube_client.raw("POST", "/api/v1/namespaces", {"kind": "Namespace", **manifest})
    for _ in range(2):
        found = await api.apply(
            NAMESPACES, liqo_objects.namespace_manifest(remote, provider="berlin")
        )
        assert found.is_managed == is_ours
        assert found.metadata.labels[MANAGED_LABEL] == labels[MANAGED_LABEL]
        assert liqo_objects.kubelend_cluster(found) == "berlin"
        assert found.metadata.labels[liqo_objects.REMOTE_LABEL] == remote


async def add_pod(client, namespace, name):
    containers = [{"name": "main", "image": "none"}]
    manifest = {
        "metadata": {
            "name": name,
            "labels": {"app": name},
            "ownerReferences": [
                {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "u"}
            ],
        },
        "spec": {"nodeName": "some", "containers": containers},
    }
    path = f"/api/v1/namespaces/{namespace}/pods"
    await client.raw("POST", path, {"kind": "Pod", "apiVersion": "v1", **manifest})
    ready = {"conditions": [{"type": "Ready", "status": "True"}], "phase": "Running"}
    await client.patch(PODS, name, namespace, {"status": ready}, subresource="status")


async def test_pod_is_deleted_unless_a_budget_forbids_it(api, kube_client, namespace):
    """Nobody has counted the pods of this budget yet, so that it allows no eviction."""
    for name in ("free", "kept"):
        await add_pod(kube_client, namespace, name)
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "kept"},
        "spec": {"maxUnavailable": 0, "selector": {"matchLabels": {"app": "kept"}}},
    }
    path = f"/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets"
    await kube_client.raw("POST", path, budget)
    for pod in await api.list(PODS, namespace):
        assert pod.is_of_daemon_set
        await api.perform(Evict(pod))
    pods = {pod.metadata.name: pod for pod in await api.list(PODS, namespace)}
    assert not pods["kept"].is_being_deleted
    assert "free" not in pods or pods["free"].is_being_deleted
    for _ in range(2):  # the second finds nothing
        for pod in pods.values():
            await api.perform(Delete(PODS, pod, grace_seconds=0))
    assert await api.list(PODS, namespace) == []
    for action in (Evict(pods["kept"]), Patch(PODS, pods["kept"], {"metadata": {"labels": {}}})):
        await api.perform(action)


async def test_recreated_pod_of_the_same_name_stays(api, kube_client, namespace):
    await add_pod(kube_client, namespace, "web")
    [old] = await api.list(PODS, namespace)
    await api.perform(Delete(PODS, old, grace_seconds=0))
    await add_pod(kube_client, namespace, "web")
    for action in (Delete(PODS, old, grace_seconds=0), Evict(old)):
        await api.perform(action)
    [new] = await api.list(PODS, namespace)
    assert (new.metadata.uid != old.metadata.uid, new.is_being_deleted) == (True, False)
