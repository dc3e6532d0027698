"""Locates the programs of test clusters and their versions.

`make kube-assets` installs kube-apiserver, etcd and kubectl; `make liqo-assets` Liqo, and the controller
manager and scheduler of Kubernetes.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
from pathlib import Path
from typing import NamedTuple

import msgspec

from kubelend.core.errors import InvalidSettings
from kubelend.envtest import waiting

ASSETS_VARIABLE = "KUBEBUILDER_ASSETS"
"""Variable with the directory of the programs, the same as envtest of controller-runtime uses."""

PROGRAMS = ("kube-apiserver", "etcd", "kubectl")

_VERSION_TIMEOUT = 30.0
_VERSION_PATTERN = re.compile(r"(\d+)\.(\d+)\.(\d+)")


class KubernetesVersion(NamedTuple):
    """A version number; ordered."""

    major: int
    minor: int
    patch: int = 0

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


class Assets(msgspec.Struct, frozen=True):
    """Paths and versions of the three programs."""

    kube_apiserver: Path
    etcd: Path
    kubectl: Path
    version: KubernetesVersion
    """Version of Kubernetes."""

    etcd_version: KubernetesVersion


def find_assets() -> Assets:
    """Returns the programs in the directory of `KUBEBUILDER_ASSETS`, else the newest in the cache."""
    server, etcd, kubectl = (locate_assets() / program for program in PROGRAMS)
    return Assets(server, etcd, kubectl, _program_version(server), _program_version(etcd))


def locate_assets() -> Path:
    """Returns the directory that contains all programs, without running them."""
    for directory in _candidate_directories():
        if all(os.access(directory / program, os.X_OK) for program in PROGRAMS):
            return directory
    raise InvalidSettings(
        f"kube-apiserver, etcd and kubectl not found: run make kube-assets, or set {ASSETS_VARIABLE}"
    )


def asset_cache() -> Path:
    """Returns the cache directory, which is outside of the repository so that `make clean` keeps it."""
    home = os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache"
    return Path(home) / "kubelend" / "kube"


def _candidate_directories() -> list[Path]:
    if named := os.environ.get(ASSETS_VARIABLE, ""):
        return [Path(named)]
    return _newest_first(asset_cache())


def _newest_first(cache: Path) -> list[Path]:
    found = cache.glob("*.*.*")
    return sorted(found, key=lambda path: _version_in(path.name) or (0, 0), reverse=True)


LIQO_VARIABLE = "KUBELEND_LIQO_ASSETS"
"""Variable with the directory of Liqo's programs and manifests."""

LIQO_PROGRAMS = (
    *("kube-controller-manager", "kube-scheduler"),
    *("liqo-controller-manager", "crd-replicator", "webhook", "virtual-kubelet"),
)


class LiqoAssets(NamedTuple):
    """The directory that `make liqo-assets` has made."""

    directory: Path

    def program(self, name: str) -> Path:
        return self.directory / name

    @property
    def crds(self) -> Path:
        """Directory with Liqo's CustomResourceDefinitions."""
        return self.directory / "crds"

    @property
    def manifests(self) -> Path:
        """Liqo's chart, rendered without networking, with placeholders for one cluster's values."""
        return self.directory / "liqo.yaml"


def find_liqo_assets() -> LiqoAssets:
    """Returns the directory of `KUBELEND_LIQO_ASSETS`, else the newest in the cache."""
    named = os.environ.get(LIQO_VARIABLE, "")
    directories = [Path(named)] if named else _newest_first(asset_cache().with_name("liqo"))
    for directory in directories:
        found = LiqoAssets(directory)
        programs = map(found.program, LIQO_PROGRAMS)
        if all(os.access(each, os.X_OK) for each in programs) and found.manifests.exists():
            return found
    raise InvalidSettings(f"Liqo not found: run make liqo-assets, or set {LIQO_VARIABLE}")


def _program_version(program: Path) -> KubernetesVersion:
    try:
        done = subprocess.run(
            [program, "--version"],
            check=False,
            capture_output=True,
            text=True,
            timeout=_VERSION_TIMEOUT * waiting.FACTOR,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidSettings(f"{program} cannot be executed: {error}") from error
    if found := _version_in(done.stdout):
        return found
    raise InvalidSettings(f"{program} prints no version", hint=done.stderr[-200:].strip())


def _version_in(text: str) -> KubernetesVersion | None:
    found = _VERSION_PATTERN.search(text)
    return KubernetesVersion(*map(int, found.groups())) if found else None


# Below the ephemeral ports: an outgoing connection could otherwise take the port of a server that is
# being restarted.
_PORT_RANGE = range(20_000, 32_000)


def free_port() -> int:
    """Returns a random free port on the loopback interface."""
    while True:
        port = secrets.choice(_PORT_RANGE)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
