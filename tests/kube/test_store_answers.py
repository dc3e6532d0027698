"""A commit that goes through counts, also if the server's answer is lost on the way back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

import kube_stores
import make
import tcp_cuts
import waiting
from kube_stores import Gate, Place, told
from kubelend.core.errors import StoreFailed
from kubelend.kube.client import Client
from kubelend.stores.kubernetes.objects import HEAD_NAME, LEDGER_RECORDS
from kubelend.stores.kubernetes.store import KubernetesStore

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def place(kube):
    return await asyncio.to_thread(Place, kube)


@pytest.fixture
async def line(kube):
    """Between the broker and the API server."""
    async with tcp_cuts.network(urlsplit(kube.url).port) as line:
        yield line


class Loss:
    """Loses the answer to one write, and breaks its connection when it is lost and `meanwhile` is over."""

    def __init__(self, line: tcp_cuts.Line) -> None:
        self.left = 0
        self.meanwhile: Callable[[], None] | None = None
        self._line = line
        self._loop = asyncio.get_running_loop()

    async def around(self, write: Coroutine[Any, Any, Any]) -> Any:
        """In the loop of the store, which is another than that of the line."""
        self.left -= 1
        if self.left != 0:
            return await write
        self._loop.call_soon_threadsafe(self._lose)
        return await write

    def _lose(self) -> None:
        self._line.cut(up=False)
        self._mending = self._loop.create_task(self._mend())

    async def _mend(self) -> None:
        await waiting.until(lambda: self._line.has_lost)
        if self.meanwhile is not None:
            await asyncio.to_thread(self.meanwhile)
        self._line.mend()


@asynccontextmanager
async def far_store(
    place: Place, line: tcp_cuts.Line, loss: Loss
) -> AsyncIterator[KubernetesStore]:
    """One behind the line, with a connection that was used before."""
    access = msgspec.structs.replace(
        place.access, server=f"https://127.0.0.1:{line.port}", origin=None
    )
    connect = kube_stores.connecting(loss.around)
    store = await asyncio.to_thread(KubernetesStore.open, access, place.namespace, connect=connect)
    try:
        await asyncio.to_thread(store.load)
        yield store
    finally:
        await asyncio.to_thread(store.close)


async def head_of(place: Place) -> tuple[str, str]:
    async with Client.open(place.access) as client:
        found = await client.find(LEDGER_RECORDS, HEAD_NAME, place.namespace)
    assert found is not None
    return found.metadata.resource_version, found.record.data


async def test_commit_whose_answer_is_lost_is_known_to_have_gone_through(place, line):
    loss = Loss(line)
    async with far_store(place, line, loss) as store:
        before = await head_of(place)
        loss.left = 1
        await asyncio.to_thread(store.commit, [make.cluster("a")], 1)
        assert await head_of(place) != before
        await asyncio.to_thread(store.commit, [make.cluster("b")], 2)
        loaded = await asyncio.to_thread(store.load)
    assert ({one.id for one in loaded.clusters}, loaded.revision) == ({"a", "b"}, 2)


async def test_broker_that_was_overtaken_while_it_waited_for_an_answer_is_refused(place, line):
    """Its commit is durable, and it may not go on: its successor has read the store since."""
    loss = Loss(line)

    async with far_store(place, line, loss) as store:
        loss.left, loss.meanwhile = 1, lambda: place.open().close()
        with pytest.raises(StoreFailed, match="another broker has written"):
            await asyncio.to_thread(store.commit, [make.cluster("a")], 1)
        with pytest.raises(StoreFailed, match="another broker has written"):
            await asyncio.to_thread(store.commit, [make.cluster("b")], 1)
    records, *_ = await asyncio.to_thread(lambda: told(place.open(), []))
    assert [*records[0]] == ["a"]


def test_two_that_open_a_store_at_once_are_two_writers(kube):
    """Both write the same epoch on the same version: nothing but who they are tells them apart."""
    place, gate, opened = Place(kube), Gate(), list[KubernetesStore]()
    place.open().close()
    gate.left = 1
    later = threading.Thread(
        target=lambda: opened.append(place.open(kube_stores.connecting(gate.around)))
    )
    later.start()
    assert gate.reached.wait(20)
    with closing(place.open()) as first:
        gate.opened.set()
        later.join(20)
        with closing(opened[0]) as second:
            with pytest.raises(StoreFailed, match="another broker has written"):
                first.commit([make.cluster("a")], 1)
            second.commit([make.cluster("b")], 1)
