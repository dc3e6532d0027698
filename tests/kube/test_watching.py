"""The informer on a real API server: in the end it knows what a fresh list says, whatever ends its watches.

How it goes on after each kind of failure is tested in tests/unit/kube/test_informer.py.
"""

import asyncio
import contextlib
import random
from datetime import timedelta
from urllib.parse import urlsplit

import msgspec
import pytest

import config_maps
import tcp_cuts
from config_maps import CONFIG_MAPS
from kubelend.kits.backoff import Backoff
from kubelend.kube import config, informer
from kubelend.kube.client import Client
from kubelend.kube.informer import Deleted, Listed
from waiting import until

pytestmark = pytest.mark.timeout(180)

QUICK = Backoff(
    retries=informer.UNLIMITED_RETRIES,
    first=timedelta(milliseconds=20),
    longest=timedelta(milliseconds=200),
)


class Follower:
    """The ConfigMaps of a namespace by name, as an informer reports them."""

    def __init__(self):
        self.objects = {}
        self.lists = 0
        self.errors = []

    async def run(self, client, namespace):
        changes = informer.list_and_watch(
            client, CONFIG_MAPS, namespace, report=self.errors.append, backoff=QUICK
        )
        async with contextlib.aclosing(changes):
            async for change in changes:
                self._handle(change)

    async def until(self, condition):
        await until(condition, explain=lambda: self.errors)

    async def agrees(self, client, namespace):
        """Wait until it has what a list has, which nobody changes any more."""
        listing = await client.list(CONFIG_MAPS, namespace)
        expected = {one.metadata.name: one for one in listing.objects}
        await self.until(lambda: self.objects == expected)

    def _handle(self, change):
        if isinstance(change, Listed):
            self.lists += 1
            self.objects = {each.metadata.name: each for each in change.objects}
        elif isinstance(change, Deleted):
            del self.objects[change.found.metadata.name]
        else:
            self.objects[change.metadata.name] = change


@contextlib.asynccontextmanager
async def following(client, namespace):
    """Has listed when this begins."""
    follower = Follower()
    task = asyncio.create_task(follower.run(client, namespace))
    try:
        await follower.until(lambda: follower.lists > 0)
        yield follower
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()


@contextlib.asynccontextmanager
async def following_behind_a_line(cluster, namespace, **options):
    """With a network line between the follower and the API server."""
    found = config.config_from_kubeconfig(cluster.admin_kubeconfig)
    async with tcp_cuts.network(urlsplit(cluster.url).port) as line:
        access = msgspec.structs.replace(
            found, server=f"https://127.0.0.1:{line.port}", origin=None
        )
        async with Client.open(access, **options) as client, following(client, namespace) as one:
            yield line, one


async def create(client, namespace, *names, **data):
    for name in names:
        await client.create(CONFIG_MAPS, config_maps.make(name, namespace, **data))


async def test_changes_are_received_also_of_an_object_of_nearly_a_megabyte(kube_client, namespace):
    await create(kube_client, namespace, "old")
    async with following(kube_client, namespace) as follower:
        assert follower.objects.keys() == {"old"}
        await create(kube_client, namespace, "new", x="é" * 450_000)
        await kube_client.patch(CONFIG_MAPS, "old", namespace, {"data": {"x": "1"}})
        await follower.agrees(kube_client, namespace)
        assert len(follower.objects["new"].data["x"]) == 450_000
        await kube_client.delete(CONFIG_MAPS, "new", namespace)
        await follower.until(lambda: follower.objects.keys() == {"old"})
        assert (follower.lists, follower.errors) == (1, [])


async def test_cut_connection_is_resumed_without_a_list(kube, kube_client, namespace):
    async with following_behind_a_line(kube, namespace) as (line, follower):
        await create(kube_client, namespace, "a", "b")
        await follower.agrees(kube_client, namespace)
        line.cut()
        await create(kube_client, namespace, "c")
        await kube_client.delete(CONFIG_MAPS, "a", namespace)
        line.mend()
        await follower.agrees(kube_client, namespace)
        assert (follower.objects.keys(), follower.lists) == ({"b", "c"}, 1)
        assert follower.errors[0]
        await follower.until(lambda: follower.errors[-1] == "")


async def test_server_that_has_forgotten_the_version_is_listed_again(clusters):
    [cluster] = clusters()

    def restart():
        cluster.kill()
        cluster.start()
        cluster.wait_until_ready()

    found = config.config_from_kubeconfig(cluster.admin_kubeconfig)
    async with (
        Client.open(found) as direct,
        following_behind_a_line(cluster, "default") as (line, follower),
    ):
        await create(direct, "default", "a", "b")
        await follower.agrees(direct, "default")
        line.cut()
        await direct.delete(CONFIG_MAPS, "a", "default")
        await create(direct, "default", "c")
        await asyncio.to_thread(restart)
        line.mend()
        await follower.agrees(direct, "default")
        assert follower.lists == 2


async def churn(client, namespace, seed, rounds):
    """Create, change and delete objects of one's own, at random."""
    dice, names = random.Random(seed), set()
    for turn in range(rounds):
        name = f"{seed}-{dice.randrange(4)}"
        if name not in names:
            await create(client, namespace, name)
            names.add(name)
        elif dice.random() < 0.4:
            await client.delete(CONFIG_MAPS, name, namespace)
            names.discard(name)
        else:
            await client.patch(CONFIG_MAPS, name, namespace, {"data": {"turn": str(turn)}})


async def test_nothing_is_missed_or_invented_under_many_writers(kube, kube_client, namespace):
    short = {"watch_duration": timedelta(seconds=1)}
    async with following_behind_a_line(kube, namespace, **short) as (line, follower):
        writers = asyncio.gather(
            *(churn(kube_client, namespace, seed, rounds=10) for seed in range(80))
        )
        while not writers.done():
            await asyncio.wait([writers], timeout=0.5)
            line.cut()
            line.mend()
        await writers
        await follower.agrees(kube_client, namespace)
        assert follower.objects
