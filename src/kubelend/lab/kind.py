"""Runs kind, which creates clusters with real nodes and pods in containers.

Clusters are deleted by name. So a name that kind already has is rejected: that cluster is not ours.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from kubelend.core.errors import InvalidSettings, Unavailable

CONTAINERS = ("docker", "podman", "nerdctl")
"""Container runtimes that kind supports."""

_READY_WITHIN = "180s"
_INSTEAD = "install it, or omit --kind (KIND=1)"


def check() -> None:
    """Raises `InvalidSettings` if kind or a container runtime is not installed."""
    if shutil.which("kind") is None:
        raise InvalidSettings("kind not found on PATH", hint=_INSTEAD)
    if not any(map(shutil.which, CONTAINERS)):
        raise InvalidSettings(
            "kind requires docker, podman or nerdctl, and none was found on PATH",
            hint=_INSTEAD,
        )


def check_names(names: Iterable[str]) -> None:
    """Raises `InvalidSettings` if kind already has a cluster with one of these names."""
    there = set(_run("get", "clusters").split())
    if taken := [name for name in names if name in there]:
        raise InvalidSettings(
            f"kind already has a cluster {taken[0]}",
            hint=f"if it is not needed, run: kind delete cluster --name {taken[0]}",
        )


def create(name: str, kubeconfig: Path) -> None:
    """Creates a cluster and waits until it is ready."""
    _run("create", "cluster", f"--name={name}", f"--kubeconfig={kubeconfig}", _wait())


def delete(name: str, kubeconfig: Path) -> None:
    """Deletes a cluster, if it exists."""
    _run("delete", "cluster", f"--name={name}", f"--kubeconfig={kubeconfig}")


def _wait() -> str:
    return f"--wait={_READY_WITHIN}"


def _run(*arguments: str) -> str:
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
