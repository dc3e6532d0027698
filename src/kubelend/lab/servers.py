"""A lab: one etcd, and as many clusters as asked for, all gone at its end.

with servers.running(assets.find()) as lab:
    broker, lender = lab.start("broker-cluster", "agent-cluster-1")
    broker.kubectl("get", "namespaces")
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
    """What runs, and the directory with its data, certificates, kubeconfigs and logs.

    A cluster that is stopped keeps its name and its part of the store.
    """

    def __init__(self, assets: Assets, directory: Path, *, durable: bool) -> None:
        self.assets = assets
        self.directory = directory
        self.etcd = Etcd(assets, _made(directory / "etcd"), durable=durable)
        self.clusters: dict[str, Cluster] = {}

    def start(self, *names: str) -> list[Cluster]:
        """Start a cluster of each name, all at once; ready when this returns."""
        started = [self._make(name) for name in names]
        for cluster in started:
            cluster.start()
        for cluster in started:
            cluster.wait_until_ready()
        return started

    def stop(self) -> None:
        """All of it, the store last."""
        for cluster in self.clusters.values():
            cluster.kill()
        self.etcd.stop()

    def _make(self, name: str) -> Cluster:
        if name in self.clusters:
            raise InvalidSettings(f"there is a cluster {name} already")
        directory = _made(self.directory / name)
        self.clusters[name] = Cluster(name, self.assets, self.etcd, directory)
        return self.clusters[name]


@contextmanager
def running(
    assets: Assets, directory: Path | None = None, *, durable: bool = False
) -> Iterator[Lab]:
    """In `directory`, which stays, or in one that is removed. `durable`: as safe as production's etcd."""
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
            # Ctrl-C in here would leave the rest of them running.
            with interrupts.put_off():
                lab.stop()


def _made(directory: Path) -> Path:
    directory.mkdir(mode=0o700, parents=True)
    return directory
