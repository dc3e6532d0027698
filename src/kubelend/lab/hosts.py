"""The three clusters of the lab: local API servers (`envtest`), or clusters created by kind."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from kubelend.core.errors import InvalidSettings, Unavailable
from kubelend.envtest import assets, servers, waiting
from kubelend.envtest.assets import LiqoAssets
from kubelend.envtest.servers import LocalCluster
from kubelend.kits import tasks
from kubelend.lab import setup
from kubelend.lab.state import LabDirectory

BROKER_CLUSTER = "broker-cluster"
*_FIRST_TWO, THIRD_AGENT_CLUSTER = setup.CLUSTER_FIXTURES
AGENT_CLUSTERS = tuple(_FIRST_TWO)
CLUSTER_NAMES = (BROKER_CLUSTER, *AGENT_CLUSTERS)


def agent_clusters(*, has_third: bool) -> tuple[str, ...]:
    """The third is optional: it is needed for two requesters with one provider, and for failover."""
    return (*AGENT_CLUSTERS, THIRD_AGENT_CLUSTER) if has_third else AGENT_CLUSTERS


class LabClusters(NamedTuple):
    """The clusters, when ready."""

    kubeconfigs: dict[str, Path]
    """Administrator kubeconfigs by cluster."""
    kubectl: str
    has_real_nodes: bool
    """Whether they have real nodes and pods."""
    local: Mapping[str, LocalCluster] = MappingProxyType({})
    """Local clusters by name."""


@contextmanager
def run_local_clusters(
    home: LabDirectory, liqo: LiqoAssets | None, agents: Sequence[str] = AGENT_CLUSTERS
) -> Iterator[LabClusters]:
    """Starts API servers that share one etcd; stops them at exit.

    `liqo` gives each of them a controller manager and a scheduler.
    """
    found = assets.find_assets()
    with servers.run_api_servers(found, home.directory / "lab", controllers=liqo) as lab:
        started = {cluster.name: cluster for cluster in lab.start(BROKER_CLUSTER, *agents)}
        kubeconfigs = {name: cluster.admin_kubeconfig for name, cluster in started.items()}
        kubectl = str(found.kubectl)
        yield LabClusters(kubeconfigs, kubectl, has_real_nodes=False, local=started)


@contextmanager
def run_kind_clusters(
    home: LabDirectory, record_names: Callable[[tuple[str, ...]], None]
) -> Iterator[LabClusters]:
    """Creates clusters with kind and deletes them at exit.

    `record_names` is called with all names before the first is created and with none after deletion, so that
    the state file always lists the clusters to delete.
    """
    check_kind()
    existing = _kind("get", "clusters").split()
    if taken := [name for name in CLUSTER_NAMES if name in existing]:
        raise InvalidSettings(
            f"kind already has a cluster {taken[0]}",
            hint=f"if it is not needed, run: kind delete cluster --name {taken[0]}",
        )
    kubeconfigs = {name: _kind_kubeconfig(home, name) for name in CLUSTER_NAMES}
    with tasks.signals_as_interrupt():
        try:
            record_names(CLUSTER_NAMES)
            for name, path in kubeconfigs.items():
                _run_kind("create", name, path, f"--wait={_KIND_READY_TIMEOUT * waiting.FACTOR:g}s")
            yield LabClusters(kubeconfigs, "kubectl", has_real_nodes=True)
        finally:
            with tasks.defer_signals():
                delete_kind_clusters(home, CLUSTER_NAMES)
                record_names(())


def delete_kind_clusters(home: LabDirectory, names: tuple[str, ...]) -> None:
    for name in names:
        _run_kind("delete", name, _kind_kubeconfig(home, name))


def _kind_kubeconfig(home: LabDirectory, name: str) -> Path:
    directory = home.directory / "kind" / name
    directory.mkdir(parents=True, exist_ok=True)
    return directory / "admin.kubeconfig"


CONTAINER_RUNTIMES = ("docker", "podman", "nerdctl")
"""Container runtimes that kind supports."""

_KIND_READY_TIMEOUT = 180.0
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


def _run_kind(verb: str, name: str, kubeconfig: Path, *flags: str) -> None:
    _kind(verb, "cluster", f"--name={name}", f"--kubeconfig={kubeconfig}", *flags)


def _kind(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["kind", *arguments], check=False, capture_output=True, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise Unavailable(f"kind cannot be executed: {error}") from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no output"]
        raise Unavailable(f"kind {' '.join(arguments[:2])} failed: {lines[-1]}")
    return done.stdout.decode(errors="replace")
