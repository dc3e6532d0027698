"""Every store of an agent's objects, for the contract tests."""

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
"""The other kinds do not require them."""

LATE = timedelta(seconds=30)


class HandClock(Clock):
    """The time of stores that take it from a test."""

    def says(self, stamp: datetime | None) -> bool:
        return stamp == self.now


class ServerClock(HandClock):
    """An API server has its own, which counts whole seconds and waits for nobody."""

    def says(self, stamp: datetime | None) -> bool:
        return stamp is not None and abs(stamp - clock.utc_now()) < LATE


class Opened(NamedTuple):
    """A store of objects and its clock."""

    objects: LocalObjects
    clock: HandClock


@asynccontextmanager
async def opened(
    kind: str, directory: Path, fixture: Callable[[str], Any]
) -> AsyncIterator[Opened]:
    """An empty one. `fixture` gives the cluster, if one is needed."""
    hands = HandClock()
    match kind:
        case "memory":
            yield Opened(MemoryObjects(hands), hands)
        case "files":
            files = FileObjects(directory, hands, poll=timedelta(hours=1))
            yield Opened(files, hands)
            files.close()
        case "kubernetes":
            async with kube_objects.opened(fixture("kube")) as client:
                await kube_objects.make_namespaces(client, *NAMESPACES)
                await kube_objects.clear(client)
                yield Opened(KubernetesObjects(client, {}), ServerClock())
                await kube_objects.clear(client)
