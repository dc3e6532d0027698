"""Runs kind, which creates clusters with real nodes and pods in containers.

Clusters are deleted by name. So a name that kind already has is rejected: that cluster is not ours.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from kubelend.core.errors import InvalidSettings, Unavailable

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
