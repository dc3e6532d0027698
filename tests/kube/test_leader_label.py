"""The label of the pod that leads, on a real API server."""

import asyncio
import json
import re
import socket
from typing import Any

import pytest
from structlog.testing import capture_logs

import charts
import make
from kubelend.broker.ports import SingleReplica
from kubelend.controllers.leader_label import PODS, LeaderLabel, OwnPod
from kubelend.core.errors import Forbidden
from kubelend.envtest import credentials
from kubelend.kube import config
from kubelend.kube.client import Client
from kubelend.kube.config import KubeConfig
from waiting import until


class Vote(SingleReplica):
    is_leader = False


def make_pod(name, account="default"):
    container = {"name": "broker", "image": "kubelend"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "kubelend"}},
        "spec": {
            "containers": [container],
            "automountServiceAccountToken": False,
            "serviceAccountName": account,
        },
    }


@pytest.fixture
async def pod(kube_client, namespace):
    body = make_pod("broker-0")
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
    await kube_client.raw("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", account)
    await kube_client.raw("POST", f"/api/v1/namespaces/{namespace}/pods", body)
    return OwnPod("broker-0", namespace)


async def labels(client, pod):
    return (await client.find(PODS, *pod)).metadata.labels


async def test_label_follows_the_leadership_and_other_labels_stay(kube_client, pod):
    vote = Vote()
    leader_label = LeaderLabel(kube_client, pod, vote)
    for leads, role in ((False, "follower"), (True, "leader"), (False, "follower")):
        vote.is_leader = leads
        await leader_label.apply()
        assert await labels(kube_client, pod) == {"app": "kubelend", "kubelend.io/role": role}


async def test_label_is_written_again_only_if_it_was_removed(kube_client, pod):
    leader_label = LeaderLabel(kube_client, pod, Vote())
    await leader_label.apply()
    written = (await kube_client.find(PODS, *pod)).metadata.resource_version
    await leader_label.apply()
    await leader_label.apply(reread=True)
    assert (await kube_client.find(PODS, *pod)).metadata.resource_version == written
    await kube_client.patch(PODS, *pod, {"metadata": {"labels": {"kubelend.io/role": None}}})
    await leader_label.apply(reread=True)
    assert (await labels(kube_client, pod))["kubelend.io/role"] == "follower"


async def test_missing_permission_is_retried(kube, kube_client, pod):
    async with Client.open(config.config_from_kubeconfig(kube.kubeconfig_for("nobody"))) as client:
        leader_label = LeaderLabel(client, pod, Vote())
        await leader_label.apply()
        assert "kubelend.io/role" not in await labels(kube_client, pod)
        rule = ["--verb=patch", "--resource=pods", f"--namespace={pod.namespace}"]
        kube.kubectl("create", "role", "leader_label", *rule)
        binding = ["--role=leader_label", "--user=nobody", f"--namespace={pod.namespace}"]
        kube.kubectl("create", "rolebinding", "leader_label", *binding)

        async def is_labelled():
            await leader_label.apply()
            return "kubelend.io/role" in await labels(kube_client, pod)

        await until(is_labelled)


async def test_stopping_broker_removes_its_label(kube_client, pod):
    vote = Vote()
    vote.is_leader = True
    task = asyncio.create_task(LeaderLabel(kube_client, pod, vote).run())

    async def is_worn():
        return (await labels(kube_client, pod)).get("kubelend.io/role") == "leader"

    await until(is_worn)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert await labels(kube_client, pod) == {"app": "kubelend"}


async def test_failed_removal_does_not_block_the_stop(kube, pod):
    async with Client.open(
        config.config_from_kubeconfig(kube.kubeconfig_for("nobody-else"))
    ) as client:
        leader_label = LeaderLabel(client, pod, Vote())
        with capture_logs() as logs:
            await leader_label.remove()
        assert [one["event"] for one in logs] == ["Failed to remove leader label from pod"]
        assert "forbidden" in logs[0]["error"]


async def test_removal_times_out(pod):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        access = KubeConfig(server=f"https://127.0.0.1:{port}")
        async with Client.open(access, timeout=make.HOUR) as client:
            with capture_logs() as logs:
                await LeaderLabel(client, pod, Vote()).remove()
    assert [one["error"] for one in logs] == ["the API server did not respond in time"]


ACCOUNT, OURS = "kubelend-broker", ("kubelend-broker-0", "kubelend-broker-1")


@pytest.fixture
async def as_the_pod(kube, kube_client, namespace):
    """A kubeconfig with the token that the kubelet gives to this pod, and the rights that we ship."""
    policies = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    kinds = ("ServiceAccount", "Role", "RoleBinding", *policies)
    found = charts.of_kind(charts.rendered("broker", "overlays/replicated"), *kinds)
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": found})
    path = kube.directory / f"{namespace}.json"
    path.write_text(re.sub(r'"namespace": "[^"]*"', f'"namespace": "{namespace}"', text))
    kube.kubectl("apply", "--server-side", f"--filename={path}")
    for name in OURS:
        body = make_pod(name, ACCOUNT)
        await kube_client.raw("POST", f"/api/v1/namespaces/{namespace}/pods", body)
    bound = ("--bound-object-kind=Pod", f"--bound-object-name={OURS[0]}")
    token = kube.kubectl("create", "token", ACCOUNT, f"--namespace={namespace}", *bound)
    path = kube.directory / f"{namespace}.kubeconfig"
    yield credentials.write_token_kubeconfig(kube.admin_kubeconfig, path, ACCOUNT, token.strip())
    kube.kubectl("delete", *(f"{kind}/{ACCOUNT}-leader-label" for kind in policies))


async def test_broker_may_change_the_label_of_its_own_pod_and_nothing_else(
    kube_client, namespace, as_the_pod
):
    own = OwnPod(OURS[0], namespace)
    leading = {"metadata": {"labels": {"kubelend.io/role": "leader"}}}
    changes: list[Any] = [
        {"metadata": {"labels": labels}} for labels in ({"app": "x"}, {"app": None}, {"a": ""})
    ]
    changes.append({"spec": {"activeDeadlineSeconds": 1}})
    async with Client.open(config.config_from_kubeconfig(as_the_pod)) as client:

        async def is_refused(name, change, why):
            try:
                await client.patch(PODS, name, namespace, change)
            except Forbidden as error:
                return why in str(error)
            return False

        # A policy counts shortly after it was made.
        await until(lambda: is_refused(OURS[1], leading, "may only change its own pod"))
        for change in changes:
            assert await is_refused(OURS[0], change, "may only change the label kubelend.io/role")
        await LeaderLabel(client, own, Vote()).apply()
    assert await labels(kube_client, own) == {"app": "kubelend", "kubelend.io/role": "follower"}
