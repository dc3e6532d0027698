"""What the steps of the demo act on: the broker, the agents, and what earlier steps have left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from kubelend.apps.children import AgentProcess, BrokerProcess
from kubelend.apps.trials import Trial
from kubelend.core.errors import KubelendError
from kubelend.core.roles import Role
from kubelend.demo import clusters
from kubelend.kits import clock
from kubelend.sources.files import FileObjects
from kubelend.transports.http_client import BrokerClient
from kubelend.wire import bodies
from kubelend.wire.objects import Kind

ADMIN = "admin"
PATIENCE = 20.0
"""Seconds after which what has not happened will not."""

_LOOK_EVERY = 0.005
_AGENT = (
    "--advertisement-requeue-interval=1s",
    "--advertisement-validity=3s",
    "--advertisement-damping=200ms",
)
"""A hurry that only a demo is in: a cluster that falls silent is noticed within seconds."""

Seen = TypeVar("Seen")


class Stage:
    """Everybody is there once the agents are ready."""

    def __init__(
        self, trial: Trial, broker: BrokerProcess, agents: dict[str, AgentProcess]
    ) -> None:
        self.trial = trial
        self.broker = broker
        self.agents = agents
        self.asked_at = 0.0
        """When the request was put down, by the clock of `time.time`, which files have too."""
        self.reservation = ""
        self.lender = ""
        self.before: dict[str, bodies.Amounts] = {}
        """What each cluster had to offer before anybody borrowed."""
        self._objects = {
            name: FileObjects(agent.objects, clock.utc_now) for name, agent in agents.items()
        }

    def client(self, name: str) -> BrokerClient:
        """One that calls the broker in somebody's name."""
        role = Role.ADMIN if name == ADMIN else Role.CLUSTER
        return BrokerClient(self.broker.url, self.trial.certificate(name, role))

    def path(self, cluster: str, kind: type[Kind], name: str) -> Path:
        """The file of an object, as a user sees it."""
        return self.agents[cluster].objects / kind.plural / f"default.{name}.yaml"

    async def find(self, cluster: str, kind: type[Kind], name: str) -> Kind | None:
        return await self._objects[cluster].find(kind, f"default/{name}")

    async def sees(
        self, cluster: str, kind: type[Kind], name: str, wanted: Callable[[Kind], bool]
    ) -> Kind:
        """Wait until an object of a cluster is as wanted."""

        async def look() -> Kind | None:
            found = await self.find(cluster, kind, name)
            return found if found is not None and wanted(found) else None

        return await _until(look, f"{kind.kind} {name} of {cluster} does not become what it should")

    async def misses(self, cluster: str, kind: type[Kind], name: str) -> None:
        """Wait until an object of a cluster is gone."""

        async def look() -> bool | None:
            return True if await self.find(cluster, kind, name) is None else None

        await _until(look, f"{kind.kind} {name} of {cluster} does not go")

    async def available(self, cluster: str) -> bodies.Amounts:
        async with self.client(ADMIN) as admin:
            found = (await admin.get_cluster(cluster)).advertisement.resources.available
        return found or bodies.Quantities("0", "0")


async def _until(look: Callable[[], Awaitable[Seen | None]], otherwise: str) -> Seen:
    deadline = time.monotonic() + PATIENCE
    while (seen := await look()) is None:
        expect(time.monotonic() < deadline, otherwise)
        await asyncio.sleep(_LOOK_EVERY)
    return seen


@contextmanager
def opened(trial: Trial, broker: BrokerProcess) -> Iterator[Stage]:
    """Start the agents; they are stopped at the end."""
    with ExitStack() as stack:
        agents = {
            name: stack.enter_context(
                trial.agent(name, broker, _written(trial.directory / f"{name}.yaml", text), *_AGENT)
            )
            for name, text in clusters.EVERYONE.items()
        }
        yield Stage(trial, broker, agents)


def expect(holds: bool, otherwise: str) -> None:
    """What a step shows must be so."""
    if not holds:
        raise KubelendError(otherwise)


def _written(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path
