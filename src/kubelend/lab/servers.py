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
from kubelend.lab.clusters import Cluster
from kubelend.lab.etcd import Etcd


class Lab:
    """The running servers, and the directory with their data, certificates, kubeconfigs and logs.

    A stopped cluster keeps its name and its data in etcd.
    """

    def __init__(self, assets: Assets, directory: Path, *, durable: bool) -> None:
        self.assets = assets
        self.directory = directory
        self.etcd = Etcd(assets, _made(directory / "etcd"), durable=durable)
        self.clusters: dict[str, Cluster] = {}

    def start(self, *names: str) -> list[Cluster]:
        """Starts one cluster per name in parallel and waits until all are ready."""
        started = [self._make(name) for name in names]
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

    def _make(self, name: str) -> Cluster:
        if name in self.clusters:
            raise InvalidSettings(f"cluster {name} already exists")
        directory = _made(self.directory / name)
        self.clusters[name] = Cluster(name, self.assets, self.etcd, directory)
        return self.clusters[name]


@contextmanager
def running(
    assets: Assets, directory: Path | None = None, *, durable: bool = False
) -> Iterator[Lab]:
    """Runs etcd in `directory`, or in a temporary one. `durable` enables fsync, as in production."""
    with ExitStack() as stack:
        stack.enter_context(interrupts.like_ctrl_c())
        if directory is None:
            temporary = tempfile.TemporaryDirectory(prefix="kubelend-lab-")
            directory = Path(stack.enter_context(temporary))
        lab = Lab(assets, directory, durable=durable)
        try:
            lab.etcd.start()
            lab.etcd.wait_until_ready()
            yield lab
        finally:
            # Ctrl-C in here would leave processes running.
            with interrupts.put_off():
                lab.stop()


def _made(directory: Path) -> Path:
    directory.mkdir(mode=0o700, parents=True)
    return directory
