"""A real agent in a process of its own, in a real cluster, for tests from outside.

with kube_agents.running(cluster, broker.url, certificates.cluster("rome"), tmp_path / "rome") as rome:
    rome.wait_until_ready()
    rome.shows(ResourceRequest, "w", lambda found: found.status.phase == "Reserved")
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

import agent_process
from kubelend.core.errors import UnexpectedResponse
from kubelend.envtest.servers import LocalCluster
from kubelend.kube import resources
from kubelend.wire.objects import Kind
from waiting import PATIENCE


class Running(agent_process.Running):
    """Its objects are in its cluster, where the administrator sees them."""

    cluster: LocalCluster

    def find_in(self, kind: type[Kind], name: str, namespace: str = "default") -> Kind | None:
        """None if it is not there, or the API server is away."""
        path = resources.resource_for(kind).path(namespace, name)
        try:
            return msgspec.json.decode(self.cluster.call("GET", path), type=kind)
        except (UnexpectedResponse, OSError):
            return None

    shows = agent_process.Running.sees

    def apply(self, text: str) -> None:
        """As a user does."""
        path = self.directory / "applied.yaml"
        path.write_text(text)
        self.cluster.kubectl("apply", f"--filename={path}")


@contextlib.contextmanager
def running(
    cluster: LocalCluster, kubeconfig: Path, directory: Path, *flags: str
) -> Iterator[Running]:
    """Start it with its log in `directory`; kill it at the end, if it still runs."""
    directory.mkdir(exist_ok=True)
    process = agent_process.started(
        directory, "--source=kubernetes", f"--kubeconfig={kubeconfig}", *flags
    )
    try:
        agent = Running(directory, process)
        agent.cluster = cluster
        yield agent
    finally:
        process.kill()
        process.wait(PATIENCE)
