"""A follower of ConfigMaps that keeps what it hears of, as a controller would, and can be compared.

async with followers.following(client, namespace) as follower:
    await follower.until(lambda: "a" in follower.names)
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from datetime import timedelta

from config_maps import CONFIG_MAPS, ConfigMap
from kubelend.kits.backoff import Backoff
from kubelend.kube import informer
from kubelend.kube.client import Client
from kubelend.kube.codec import UndecodableObject
from kubelend.kube.informer import Deleted, Listed
from waiting import until

QUICK = Backoff(
    retries=informer.UNLIMITED_RETRIES,
    first=timedelta(milliseconds=20),
    longest=timedelta(milliseconds=200),
)


class Follower:
    """What is there, by name, and how it came to know."""

    def __init__(self) -> None:
        self.objects: dict[str, ConfigMap] = {}
        self.lists = 0
        self.problems: list[str] = []

    @property
    def names(self) -> set[str]:
        return set(self.objects)

    def report(self, problem: str) -> None:
        self.problems.append(problem)

    async def run(self, client: Client, namespace: str) -> None:
        changes = informer.list_and_watch(
            client, CONFIG_MAPS, namespace, report=self.report, backoff=QUICK
        )
        async with contextlib.aclosing(changes):
            async for change in changes:
                self._take(change)

    async def until(self, condition: Callable[[], bool]) -> None:
        await until(condition, explain=lambda: self.problems)

    def _take(
        self, change: Listed[ConfigMap] | Deleted[ConfigMap] | UndecodableObject | ConfigMap
    ) -> None:
        assert not isinstance(change, UndecodableObject)
        if isinstance(change, Listed):
            self.lists += 1
            self.objects = {each.metadata.name: each for each in change.objects}
        elif isinstance(change, Deleted):
            del self.objects[change.found.metadata.name]
        else:
            self.objects[change.metadata.name] = change


@contextlib.asynccontextmanager
async def following(client: Client, namespace: str) -> AsyncIterator[Follower]:
    """Has listed when this begins, and is over when this ends."""
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
