"""How the source of a real cluster begins. All else is tested on a real API server, in tests/kube."""

import asyncio
from typing import cast

import pytest

from kubelend.agent.ports import Snapshot
from kubelend.kube.client import Client, Listing
from kubelend.sources.kubernetes import KubernetesSource


class StillClient:
    """Of a server on which nothing is, and nothing happens; both lists come at once."""

    async def list(self, *_, **__):
        return Listing([], "1", [])

    async def watch(self, *_, **__):
        await asyncio.Event().wait()
        yield


async def test_beginning_is_told_once_though_two_kinds_are_listed():
    changes = KubernetesSource(cast("Client", StillClient())).changes()
    assert await anext(changes) == Snapshot([], [])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await anext(changes)
