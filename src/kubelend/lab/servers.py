"""Test control planes: one etcd and any number of API servers, as envtest of controller-runtime runs them.

with run_api_servers(find_assets()) as servers:
    broker, provider = servers.start("broker-cluster", "agent-cluster-1")
    broker.kubectl("get", "namespaces")

There are no kubelets and controllers: objects are stored, validated and watched, but nothing acts on them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kubelend.apps import interrupts
from kubelend.core.errors import InvalidSettings
from kubelend.lab.assets import Assets
from kubelend.lab.clusters import LocalCluster
from kubelend.lab.etcd import Etcd


class ApiServers:
    """The running servers, and the directory with their data, certificates, kubeconfigs and logs.

    A stopped cluster keeps its name and its data in etcd.
    """

    def __init__(self, assets: Assets, directory: Path, *, durable: bool) -> None:
        self.assets = assets
        self.directory = directory
        self.etcd = Etcd(assets, _make_directory(directory / "etcd"), durable=durable)
        self.clusters: dict[str, LocalCluster] = {}

    def start(self, *names: str) -> list[LocalCluster]:
        """Starts one cluster per name in parallel and waits until all are ready."""
        started = [self._make_cluster(name) for name in names]
        for cluster in started:
            cluster.start()
        for cluster in started:
            cluster.wait_until_ready()
        return started

    def stop(self) -> None:
        """Stops all API servers, then etcd."""
        for cluster in self.clusters.values():
            cluster.kill()
        self.etcd.stop()

    def _make_cluster(self, name: str) -> LocalCluster:
        if name in self.clusters:
            raise InvalidSettings(f"cluster {name} already exists")
        directory = _make_directory(self.directory / name)
        self.clusters[name] = LocalCluster(name, self.assets, self.etcd, directory)
        return self.clusters[name]


@contextmanager
def run_api_servers(
    assets: Assets, directory: Path | None = None, *, durable: bool = False
) -> Iterator[ApiServers]:
    """Runs etcd in `directory`, or in a temporary one. `durable` enables fsync, as in production."""
    with ExitStack() as stack:
        stack.enter_context(interrupts.signals_as_interrupt())
        if directory is None:
            temporary = tempfile.TemporaryDirectory(prefix="kubelend-lab-")
            directory = Path(stack.enter_context(temporary))
        lab = ApiServers(assets, directory, durable=durable)
        try:
            lab.etcd.start()
            lab.etcd.wait_until_ready()
            yield lab
        finally:
            # Ctrl-C in here would leave processes running.
            with interrupts.defer_signals():
                lab.stop()


def _make_directory(directory: Path) -> Path:
    directory.mkdir(mode=0o700, parents=True)
    return directory
