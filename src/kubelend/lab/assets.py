"""Locates kube-apiserver, etcd and kubectl and their versions. `make kube-assets` installs them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import msgspec

from kubelend.core.errors import InvalidSettings

VARIABLE = "KUBEBUILDER_ASSETS"
"""Variable with the directory of the programs, the same as envtest of controller-runtime uses."""

PROGRAMS = ("kube-apiserver", "etcd", "kubectl")

_ANSWERS_WITHIN = 30.0
_NUMBERS = re.compile(r"(\d+)\.(\d+)\.(\d+)")


class Version(NamedTuple):
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
    version: Version
    """Version of Kubernetes."""

    etcd_version: Version


def find() -> Assets:
    """Returns the programs in the directory of `KUBEBUILDER_ASSETS`, else the newest in the cache."""
    server, etcd, kubectl = (locate() / program for program in PROGRAMS)
    return Assets(server, etcd, kubectl, _ask(server), _ask(etcd))


def locate() -> Path:
    """Returns the directory that contains all programs, without running them."""
    for directory in _candidates():
        if all(os.access(directory / program, os.X_OK) for program in PROGRAMS):
            return directory
    raise InvalidSettings(
        f"kube-apiserver, etcd and kubectl not found: run make kube-assets, or set {VARIABLE}"
    )


def cache() -> Path:
    """Returns the cache directory, which is outside of the repository so that `make clean` keeps it."""
    home = os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache"
    return Path(home) / "kubelend" / "kube"


def _candidates() -> list[Path]:
    if named := os.environ.get(VARIABLE, ""):
        return [Path(named)]
    return sorted(cache().glob("*.*.*"), key=_named_version, reverse=True)


def _named_version(directory: Path) -> Version:
    return _version_in(directory.name) or Version(0, 0)


def _ask(program: Path) -> Version:
    try:
        done = subprocess.run(
            [program, "--version"],
            check=False,
            capture_output=True,
            text=True,
            timeout=_ANSWERS_WITHIN,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InvalidSettings(f"{program} cannot be executed: {error}") from error
    if found := _version_in(done.stdout):
        return found
    raise InvalidSettings(f"{program} prints no version", hint=done.stderr[-200:].strip())


def _version_in(text: str) -> Version | None:
    found = _NUMBERS.search(text)
    return Version(*map(int, found.groups())) if found else None
