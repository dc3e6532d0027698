"""Which pod leads, told by a label on a real API server."""

import asyncio
import socket

import pytest
from structlog.testing import capture_logs

import make
from kubelend.broker.ports import SingleReplica
from kubelend.controllers.leader_label import PODS, LeaderLabel, OwnPod
from kubelend.kube import config
from kubelend.kube.client import Client
from kubelend.kube.config import KubeConfig
from waiting import until


class Vote(SingleReplica):
    is_leader = False


@pytest.fixture
async def pod(kube_client, namespace):
    container = {"name": "broker", "image": "kubelend"}
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "broker-0", "labels": {"app": "kubelend"}},
        "spec": {"containers": [container], "automountServiceAccountToken": False},
    }
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
    await kube_client.raw("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts", account)
    await kube_client.raw("POST", f"/api/v1/namespaces/{namespace}/pods", body)
    return OwnPod("broker-0", namespace)


async def labels(client, pod):
    return (await client.find(PODS, *pod)).metadata.labels


async def test_the_label_follows_who_leads_and_leaves_others_alone(kube_client, pod):
    vote = Vote()
    badge = LeaderLabel(kube_client, pod, vote)
    for leads, role in ((False, "follower"), (True, "leader"), (False, "follower")):
        vote.is_leader = leads
        await badge.apply()
        assert await labels(kube_client, pod) == {"app": "kubelend", "kubelend.io/role": role}


async def test_nothing_is_written_while_nothing_changes(kube_client, pod):
    badge = LeaderLabel(kube_client, pod, Vote())
    await badge.apply()
    written = (await kube_client.find(PODS, *pod)).metadata.resource_version
    await badge.apply()
    await badge.apply(reread=True)
    assert (await kube_client.find(PODS, *pod)).metadata.resource_version == written


async def test_a_label_that_somebody_took_off_is_put_on_again(kube_client, pod):
    badge = LeaderLabel(kube_client, pod, Vote())
    await badge.apply()
    await kube_client.patch(PODS, *pod, {"metadata": {"labels": {"kubelend.io/role": None}}})
    await badge.apply(reread=True)
    assert (await labels(kube_client, pod))["kubelend.io/role"] == "follower"


async def test_without_the_right_it_goes_on_and_tries_again(kube, kube_client, pod):
    async with Client.open(config.config_from_kubeconfig(kube.kubeconfig_for("nobody"))) as client:
        badge = LeaderLabel(client, pod, Vote())
        await badge.apply()
        assert "kubelend.io/role" not in await labels(kube_client, pod)
        rule = ["--verb=patch", "--resource=pods", f"--namespace={pod.namespace}"]
        kube.kubectl("create", "role", "badge", *rule)
        binding = ["--role=badge", "--user=nobody", f"--namespace={pod.namespace}"]
        kube.kubectl("create", "rolebinding", "badge", *binding)
        for _ in range(100):
            await badge.apply()
            if "kubelend.io/role" in await labels(kube_client, pod):
                return
        pytest.fail("not labelled")


async def test_broker_that_stops_takes_its_label_off(kube_client, pod):
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


async def test_label_that_cannot_be_taken_off_keeps_nobody_from_stopping(kube, pod):
    async with Client.open(
        config.config_from_kubeconfig(kube.kubeconfig_for("nobody-else"))
    ) as client:
        badge = LeaderLabel(client, pod, Vote())
        with capture_logs() as logs:
            await badge.remove()
        assert [one["event"] for one in logs] == ["Failed to remove leader label from pod"]
        assert "forbidden" in logs[0]["error"]


async def test_server_that_does_not_answer_is_not_waited_for(pod):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        access = KubeConfig(server=f"https://127.0.0.1:{port}")
        async with Client.open(access, timeout=make.HOUR) as client:
            with capture_logs() as logs:
                await LeaderLabel(client, pod, Vote()).remove()
    assert [one["error"] for one in logs] == ["the API server did not answer in time"]
