"""Objects of a real API server, followed through everything that ends a watch.

A follower may hear of things late, but in the end it knows what a fresh list says: nothing missed, nothing
invented.
"""

import asyncio
import random
from datetime import timedelta
from urllib.parse import urlsplit

import msgspec
import pytest

import config_maps
import followers
import tcp_cuts
from config_maps import CONFIG_MAPS
from kubelend.core.errors import Gone
from kubelend.kube import config
from kubelend.kube.client import Client

pytestmark = pytest.mark.timeout(180)


def own(cluster, port=0):
    """The administrator's access; over another port if one is given."""
    found = config.config_from_kubeconfig(cluster.admin_kubeconfig)
    if not port:
        return found
    return msgspec.structs.replace(found, server=f"https://127.0.0.1:{port}", origin=None)


def port_of(cluster):
    return urlsplit(cluster.url).port


def cut_power(cluster):
    """A server that ends so remembers as little as one that is asked to end, and is back sooner."""
    cluster.kill()
    cluster.start()
    cluster.wait_until_ready()


async def make(client, namespace, *names):
    for name in names:
        await client.create(CONFIG_MAPS, config_maps.make(name, namespace))


async def agree(follower, client, namespace):
    """Wait until the follower knows what a list says, which nobody changes any more."""
    listing = await client.list(CONFIG_MAPS, namespace)
    truth = {one.metadata.name: one for one in listing.objects}
    await follower.until(lambda: follower.objects == truth)


async def test_changes_are_heard_of(kube_client, namespace):
    await make(kube_client, namespace, "old")
    async with followers.following(kube_client, namespace) as follower:
        assert follower.names == {"old"}
        await make(kube_client, namespace, "new")
        await kube_client.patch(CONFIG_MAPS, "old", namespace, {"data": {"x": "1"}})
        await follower.until(lambda: "new" in follower.names and follower.objects["old"].data != {})
        await kube_client.delete(CONFIG_MAPS, "new", namespace)
        await follower.until(lambda: follower.names == {"old"})
        assert (follower.lists, follower.problems) == (1, [])


async def test_object_of_nearly_a_megabyte_is_heard_of(kube_client, namespace):
    async with followers.following(kube_client, namespace) as follower:
        await kube_client.create(CONFIG_MAPS, config_maps.make("big", namespace, x="é" * 450_000))
        await follower.until(lambda: "big" in follower.names)
        assert len(follower.objects["big"].data["x"]) == 450_000


async def test_watch_that_the_server_ends_is_gone_on_with(kube, kube_client, namespace):
    ended = 0
    async with (
        Client.open(own(kube), watch_duration=timedelta(seconds=1)) as client,
        followers.following(client, namespace) as follower,
    ):
        while ended < 3:
            listing = await kube_client.list(CONFIG_MAPS, namespace)
            async for _ in client.watch(CONFIG_MAPS, namespace, since=listing.resource_version):
                pass
            ended += 1
            await make(kube_client, namespace, f"after-{ended}")
        await agree(follower, kube_client, namespace)
        assert follower.lists == 1
        assert follower.problems == []


async def test_bookmarks_move_the_version_on(kube, kube_client, namespace):
    """A quiet namespace of a busy cluster must not fall behind what the server remembers."""
    since = (await kube_client.list(CONFIG_MAPS, namespace)).resource_version
    versions = []
    # The server sends one two seconds before the end of a watch, if there is something to tell by then.
    async with Client.open(own(kube), watch_duration=timedelta(seconds=8)) as client:
        async for event in client.watch(CONFIG_MAPS, namespace, since=since):
            assert event.type == "BOOKMARK"
            versions.append(int(event.resource_version))
            if len(versions) == 1:
                await make(kube_client, "default", f"elsewhere-{namespace}")
    assert versions[0] == int(since)
    assert versions[-1] > int(since)


async def test_cut_connection_is_gone_on_with(kube, kube_client, namespace):
    async with (
        tcp_cuts.network(port_of(kube)) as line,
        Client.open(own(kube, line.port)) as client,
        followers.following(client, namespace) as follower,
    ):
        await make(kube_client, namespace, "a", "b")
        await agree(follower, kube_client, namespace)
        line.cut()
        await make(kube_client, namespace, "c")
        await kube_client.delete(CONFIG_MAPS, "a", namespace)
        line.mend()
        await agree(follower, kube_client, namespace)
        assert follower.names == {"b", "c"}
        assert follower.lists == 1
        assert follower.problems[0]
        await follower.until(lambda: follower.problems[-1] == "")


async def test_server_that_keeps_silent_is_left_after_a_while(kube, kube_client, namespace):
    second = timedelta(seconds=1)
    async with (
        tcp_cuts.network(port_of(kube)) as line,
        Client.open(
            own(kube, line.port), timeout=second, watch_duration=second, grace=second / 5
        ) as client,
        followers.following(client, namespace) as follower,
    ):
        line.cut(up=False)
        await make(kube_client, namespace, "a")
        await follower.until(lambda: bool(follower.problems))
        assert "did not answer within" in follower.problems[0]
        line.mend()
        await agree(follower, kube_client, namespace)


async def test_version_that_the_server_has_forgotten_is_gone(clusters):
    [cluster] = clusters()
    async with Client.open(own(cluster)) as client:
        since = (await client.list(CONFIG_MAPS)).resource_version
        await make(client, "default", "a", "b")
        await asyncio.to_thread(cut_power, cluster)
        with pytest.raises(Gone):
            async for _ in client.watch(CONFIG_MAPS, since=since):
                pass


async def test_follower_of_a_server_that_forgot_lists_again(clusters):
    [cluster] = clusters()
    async with (
        tcp_cuts.network(port_of(cluster)) as line,
        Client.open(own(cluster, line.port)) as client,
        Client.open(own(cluster)) as direct,
        followers.following(client, "default") as follower,
    ):
        await make(direct, "default", "a", "b")
        await agree(follower, direct, "default")
        line.cut()
        await direct.delete(CONFIG_MAPS, "a", "default")
        await make(direct, "default", "c")
        await asyncio.to_thread(cut_power, cluster)
        line.mend()
        await agree(follower, direct, "default")
        assert follower.lists == 2


async def test_restarted_server_is_waited_for(clusters):
    [cluster] = clusters()
    async with (
        Client.open(own(cluster)) as client,
        followers.following(client, "default") as follower,
    ):
        await make(client, "default", "before")
        await asyncio.to_thread(cluster.kill)
        await follower.until(lambda: bool(follower.problems))
        assert cluster.url in follower.problems[-1]
        await asyncio.to_thread(cluster.start)
        await asyncio.to_thread(cluster.wait_until_ready)
        await make(client, "default", "after")
        await agree(follower, client, "default")
        await follower.until(lambda: follower.problems[-1] == "")


def let_read(cluster, user, namespace):
    where = f"--namespace={namespace}"
    rights = ("--verb=list,watch", "--resource=configmaps")
    cluster.kubectl("create", "role", "readers", *rights, where)
    cluster.kubectl("create", "rolebinding", "late", "--role=readers", f"--user={user}", where)


async def test_rights_that_come_later_are_waited_for(kube, kube_client, namespace):
    await make(kube_client, namespace, "a")
    user = f"late-{namespace}"
    late = config.config_from_kubeconfig(kube.kubeconfig_for(user))
    async with Client.open(late) as client:
        follower = followers.Follower()
        task = asyncio.create_task(follower.run(client, namespace))
        await follower.until(lambda: bool(follower.problems))
        assert "cannot list resource" in follower.problems[0]
        await asyncio.to_thread(let_read, kube, user, namespace)
        await follower.until(lambda: follower.names == {"a"})
        await follower.until(lambda: follower.problems[-1] == "")
        task.cancel()
        await asyncio.wait([task])


async def churn(client, namespace, seed, rounds):
    """Make, change and delete objects of one's own, at random."""
    dice, names = random.Random(seed), set()
    for turn in range(rounds):
        name = f"{seed}-{dice.randrange(4)}"
        if name not in names:
            await client.create(CONFIG_MAPS, config_maps.make(name, namespace))
            names.add(name)
        elif dice.random() < 0.4:
            await client.delete(CONFIG_MAPS, name, namespace)
            names.discard(name)
        else:
            await client.patch(CONFIG_MAPS, name, namespace, {"data": {"turn": str(turn)}})


async def test_nothing_is_missed_or_invented_under_many_writers(kube, kube_client, namespace):
    async with (
        tcp_cuts.network(port_of(kube)) as line,
        Client.open(own(kube, line.port), watch_duration=timedelta(seconds=1)) as client,
        followers.following(client, namespace) as follower,
    ):
        writers = asyncio.gather(
            *(churn(kube_client, namespace, seed, rounds=10) for seed in range(200))
        )
        while not writers.done():
            await asyncio.wait([writers], timeout=0.5)
            line.cut()
            line.mend()
        await writers
        await agree(follower, kube_client, namespace)
        assert follower.names
