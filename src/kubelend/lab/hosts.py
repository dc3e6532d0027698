"""The three clusters of the lab: local API servers (`envtest`), or clusters created by kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kubelend.apps import interrupts
from kubelend.lab import assets, inhabitants, kind, servers
from kubelend.lab.records import LabDirectory

BROKER_CLUSTER = "broker-cluster"
AGENT_CLUSTERS = tuple(inhabitants.CLUSTER_FIXTURES)
CLUSTER_NAMES = (BROKER_CLUSTER, *AGENT_CLUSTERS)


class LabClusters(NamedTuple):
    """The clusters, when ready."""

    kubeconfigs: dict[str, Path]
    """Administrator kubeconfigs by cluster."""
    kubectl: str
    has_real_nodes: bool
    """Whether they have real nodes and pods."""


@contextmanager
def run_local_clusters(home: LabDirectory) -> Iterator[LabClusters]:
    """Starts API servers that share one etcd; stops them at exit."""
    found = assets.find_assets()
    with servers.run_api_servers(found, home.directory / "lab") as lab:
        started = lab.start(*CLUSTER_NAMES)
        kubeconfigs = {cluster.name: cluster.admin_kubeconfig for cluster in started}
        yield LabClusters(kubeconfigs, str(found.kubectl), has_real_nodes=False)


@contextmanager
def run_kind_clusters(
    home: LabDirectory, record_names: Callable[[tuple[str, ...]], None]
) -> Iterator[LabClusters]:
    """Creates clusters with kind and deletes them at exit.

    `making` is called with all names before the first is created and with none after deletion, so that the
    state file always lists the clusters to delete.
    """
    kind.check_kind()
    kind.check_kind_names(CLUSTER_NAMES)
    kubeconfigs = {name: _kind_kubeconfig(home, name) for name in CLUSTER_NAMES}
    with interrupts.signals_as_interrupt():
        try:
            record_names(CLUSTER_NAMES)
            for name, path in kubeconfigs.items():
                kind.create_kind_cluster(name, path)
            yield LabClusters(kubeconfigs, "kubectl", has_real_nodes=True)
        finally:
            with interrupts.defer_signals():
                delete_kind_clusters(home, CLUSTER_NAMES)
                record_names(())


def delete_kind_clusters(home: LabDirectory, names: tuple[str, ...]) -> None:
    for name in names:
        kind.delete_kind_cluster(name, _kind_kubeconfig(home, name))


def _kind_kubeconfig(home: LabDirectory, name: str) -> Path:
    directory = home.directory / "kind" / name
    directory.mkdir(parents=True, exist_ok=True)
    return directory / "admin.kubeconfig"
