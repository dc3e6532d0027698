"""The three clusters of the lab: local API servers (`envtest`), or clusters created by kind."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kubelend.core.errors import InvalidSettings, Unavailable
from kubelend.envtest import assets, servers
from kubelend.kits import tasks
from kubelend.lab import setup
from kubelend.lab.state import LabDirectory

BROKER_CLUSTER = "broker-cluster"
AGENT_CLUSTERS = tuple(setup.CLUSTER_FIXTURES)
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

    `record_names` is called with all names before the first is created and with none after deletion, so that
    the state file always lists the clusters to delete.
    """
    check_kind()
    check_kind_names(CLUSTER_NAMES)
    kubeconfigs = {name: _kind_kubeconfig(home, name) for name in CLUSTER_NAMES}
    with tasks.signals_as_interrupt():
        try:
            record_names(CLUSTER_NAMES)
            for name, path in kubeconfigs.items():
                create_kind_cluster(name, path)
            yield LabClusters(kubeconfigs, "kubectl", has_real_nodes=True)
        finally:
            with tasks.defer_signals():
                delete_kind_clusters(home, CLUSTER_NAMES)
                record_names(())


def delete_kind_clusters(home: LabDirectory, names: tuple[str, ...]) -> None:
    for name in names:
        delete_kind_cluster(name, _kind_kubeconfig(home, name))


def _kind_kubeconfig(home: LabDirectory, name: str) -> Path:
    directory = home.directory / "kind" / name
    directory.mkdir(parents=True, exist_ok=True)
    return directory / "admin.kubeconfig"


CONTAINER_RUNTIMES = ("docker", "podman", "nerdctl")
"""Container runtimes that kind supports."""

_KIND_READY_TIMEOUT = "180s"
_INSTALL_HINT = "install it, or omit --kind (KIND=1)"


def check_kind() -> None:
    """Raises `InvalidSettings` if kind or a container runtime is not installed."""
    if shutil.which("kind") is None:
        raise InvalidSettings("kind not found on PATH", hint=_INSTALL_HINT)
    if not any(map(shutil.which, CONTAINER_RUNTIMES)):
        raise InvalidSettings(
            "kind requires docker, podman or nerdctl, and none was found on PATH",
            hint=_INSTALL_HINT,
        )


def check_kind_names(names: Iterable[str]) -> None:
    """Raises `InvalidSettings` if kind already has a cluster with one of these names."""
    there = set(_run_kind("get", "clusters").split())
    if taken := [name for name in names if name in there]:
        raise InvalidSettings(
            f"kind already has a cluster {taken[0]}",
            hint=f"if it is not needed, run: kind delete cluster --name {taken[0]}",
        )


def create_kind_cluster(name: str, kubeconfig: Path) -> None:
    """Creates a cluster and waits until it is ready."""
    _run_kind("create", "cluster", f"--name={name}", f"--kubeconfig={kubeconfig}", _wait_flag())


def delete_kind_cluster(name: str, kubeconfig: Path) -> None:
    """Deletes a cluster, if it exists."""
    _run_kind("delete", "cluster", f"--name={name}", f"--kubeconfig={kubeconfig}")


def _wait_flag() -> str:
    return f"--wait={_KIND_READY_TIMEOUT}"


def _run_kind(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["kind", *arguments],
            check=False,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    except OSError as error:
        raise Unavailable(f"kind cannot be executed: {error}") from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no output"]
        raise Unavailable(f"kind {' '.join(arguments[:2])} failed: {lines[-1]}")
    return done.stdout
