"""The context of the demo's steps: broker, agents, and results of earlier steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from kubelend.apps.children import AgentProcess, BrokerProcess
from kubelend.apps.trials import TemporaryDeployment
from kubelend.core.errors import KubelendError
from kubelend.core.roles import Role
from kubelend.demo import clusters
from kubelend.kits import clock
from kubelend.sources.files import FileObjects
from kubelend.transports.http_client import BrokerClient
from kubelend.wire import bodies
from kubelend.wire.objects import Kind

ADMIN_NAME = "admin"
STEP_TIMEOUT = 20.0
"""Timeout of a step in seconds."""

_POLL_SECONDS = 0.005
_AGENT_FLAGS = (
    "--advertisement-requeue-interval=1s",
    "--advertisement-validity=3s",
    "--advertisement-damping=200ms",
)
"""Short intervals, so that the demo detects a lost provider within seconds."""

ResultT = TypeVar("ResultT")


class DemoContext:
    """The processes of the demo and its state."""

    def __init__(
        self, trial: TemporaryDeployment, broker: BrokerProcess, agents: dict[str, AgentProcess]
    ) -> None:
        self.deployment = trial
        self.broker = broker
        self.agents = agents
        self.requested_at = 0.0
        """When the ResourceRequest was written, by `time.time`, which file timestamps use too."""
        self.reservation = ""
        self.provider = ""
        self.available_before: dict[str, bodies.Amounts] = {}
        """Available resources of each cluster before the first reservation."""
        self._objects = {
            name: FileObjects(agent.objects, clock.utc_now) for name, agent in agents.items()
        }

    def client(self, name: str) -> BrokerClient:
        """Returns a client with the certificate of a cluster or of the administrator."""
        role = Role.ADMIN if name == ADMIN_NAME else Role.CLUSTER
        return BrokerClient(self.broker.url, self.deployment.certificate(name, role))

    def path(self, cluster: str, kind: type[Kind], name: str) -> Path:
        """Returns the file of an object."""
        return self.agents[cluster].objects / kind.plural / f"default.{name}.yaml"

    async def find(self, cluster: str, kind: type[Kind], name: str) -> Kind | None:
        return await self._objects[cluster].find(kind, f"default/{name}")

    async def wait_for(
        self, cluster: str, kind: type[Kind], name: str, wanted: Callable[[Kind], bool]
    ) -> Kind:
        """Waits until an object of a cluster fulfils the condition."""

        async def look() -> Kind | None:
            found = await self.find(cluster, kind, name)
            return found if found is not None and wanted(found) else None

        return await _poll_until(
            look, f"{kind.kind} {name} of {cluster} did not reach the expected state"
        )

    async def wait_deleted(self, cluster: str, kind: type[Kind], name: str) -> None:
        """Waits until an object of a cluster has been deleted."""

        async def look() -> bool | None:
            return True if await self.find(cluster, kind, name) is None else None

        await _poll_until(look, f"{kind.kind} {name} of {cluster} was not deleted")

    async def available(self, cluster: str) -> bodies.Amounts:
        async with self.client(ADMIN_NAME) as admin:
            found = (await admin.get_cluster(cluster)).advertisement.resources.available
        return found or bodies.Quantities("0", "0")


async def _poll_until(look: Callable[[], Awaitable[ResultT | None]], otherwise: str) -> ResultT:
    deadline = time.monotonic() + STEP_TIMEOUT
    while (seen := await look()) is None:
        expect(time.monotonic() < deadline, otherwise)
        await asyncio.sleep(_POLL_SECONDS)
    return seen


@contextmanager
def open_context(trial: TemporaryDeployment, broker: BrokerProcess) -> Iterator[DemoContext]:
    """Starts the agents; stops them at exit."""
    with ExitStack() as stack:
        agents = {
            name: stack.enter_context(
                trial.agent(
                    name, broker, _write_file(trial.directory / f"{name}.yaml", text), *_AGENT_FLAGS
                )
            )
            for name, text in clusters.CLUSTER_DESCRIPTIONS.items()
        }
        yield DemoContext(trial, broker, agents)


def expect(holds: bool, otherwise: str) -> None:
    """Raises unless the result of a step is as expected."""
    if not holds:
        raise KubelendError(otherwise)


def _write_file(path: Path, text: str) -> Path:
    path.write_text(text, "utf-8")
    return path
