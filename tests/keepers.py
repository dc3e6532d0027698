"""Everything that can keep an agent's objects, for tests that run on each.

@pytest.fixture(params=keepers.KINDS)
async def keeping(request, tmp_path):
    async with keepers.keeping(request.param, tmp_path, request.getfixturevalue) as keeping:
        yield keeping
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import kube_objects
from clocks import Clock
from kubelend.agent.ports import LocalObjects
from kubelend.kits import clock
from kubelend.sources.file_objects import FileObjects
from kubelend.sources.kubernetes_objects import KubernetesObjects
from kubelend.sources.memory_objects import MemoryObjects

KINDS = ("memory", "files", pytest.param("kubernetes", marks=pytest.mark.kube))

NAMESPACES = ("default", "one", "two", "a", "b")
"""Elsewhere one need not make them first."""

LATE = timedelta(seconds=30)


class HandClock(Clock):
    """The time of keepers that are told it."""

    def says(self, stamp: datetime | None) -> bool:
        return stamp == self.now


class ServerClock(HandClock):
    """An API server has its own, which counts whole seconds and waits for nobody."""

    def says(self, stamp: datetime | None) -> bool:
        return stamp is not None and abs(stamp - clock.utc_now()) < LATE


class Keeping(NamedTuple):
    """What keeps objects, and the time by which it does."""

    objects: LocalObjects
    clock: HandClock


@asynccontextmanager
async def keeping(
    kind: str, directory: Path, fixture: Callable[[str], Any]
) -> AsyncIterator[Keeping]:
    """An empty one. `fixture` gives the cluster, if one is needed."""
    hands = HandClock()
    match kind:
        case "memory":
            yield Keeping(MemoryObjects(hands), hands)
        case "files":
            files = FileObjects(directory, hands, poll=timedelta(hours=1))
            yield Keeping(files, hands)
            files.close()
        case "kubernetes":
            async with kube_objects.opened(fixture("kube")) as client:
                await kube_objects.make_namespaces(client, *NAMESPACES)
                await kube_objects.clear(client)
                yield Keeping(KubernetesObjects(client, {}), ServerClock())
                await kube_objects.clear(client)
