"""Clusters that Kind makes in containers, instead of the lab's own: with real nodes and pods in them.

All that is said to `kind` is said here. What it made is deleted by name, so a name that it has already is
refused: that cluster is somebody else's.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from kubelend.core.errors import InvalidSettings, Unavailable

CONTAINERS = ("docker", "podman", "nerdctl")
"""What it makes clusters with, one of them."""

_READY_WITHIN = "180s"
_INSTEAD = "install it, or leave out --kind (KIND=1)"


def check() -> None:
    """Whether it can make clusters at all; one line says what is missing."""
    if shutil.which("kind") is None:
        raise InvalidSettings("there is no kind on the PATH", hint=_INSTEAD)
    if not any(map(shutil.which, CONTAINERS)):
        raise InvalidSettings(
            "kind needs docker, podman or nerdctl, and none is on the PATH",
            hint=_INSTEAD,
        )


def check_names(names: Iterable[str]) -> None:
    """Whether it has none of these names."""
    there = set(_run("get", "clusters").split())
    if taken := [name for name in names if name in there]:
        raise InvalidSettings(
            f"kind has a cluster {taken[0]} already",
            hint=f"if nobody needs it: kind delete cluster --name {taken[0]}",
        )


def create(name: str, kubeconfig: Path) -> None:
    """Ready when this returns."""
    _run("create", "cluster", f"--name={name}", f"--kubeconfig={kubeconfig}", _wait())


def delete(name: str, kubeconfig: Path) -> None:
    """Nothing happens if it is not there."""
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
        raise Unavailable(f"kind does not run: {error}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        raise Unavailable(f"kind {' '.join(arguments[:2])} failed: {said[-1]}")
    return done.stdout
