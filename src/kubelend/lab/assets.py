"""The programs that make a cluster: where they are, and of which version. `make kube-assets` gets them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

import msgspec

from kubelend.core.errors import InvalidSettings

VARIABLE = "KUBEBUILDER_ASSETS"
"""The directory that holds them, as the tests of other Kubernetes projects know it."""

PROGRAMS = ("kube-apiserver", "etcd", "kubectl")

_ANSWERS_WITHIN = 30.0
_NUMBERS = re.compile(r"(\d+)\.(\d+)\.(\d+)")


class Version(NamedTuple):
    """Compares as versions do."""

    major: int
    minor: int
    patch: int = 0

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


class Assets(msgspec.Struct, frozen=True):
    """The three programs."""

    kube_apiserver: Path
    etcd: Path
    kubectl: Path
    version: Version
    """Of Kubernetes."""

    etcd_version: Version


def find() -> Assets:
    """Those that the variable names; else the newest that `make kube-assets` has put into its cache."""
    server, etcd, kubectl = (locate() / program for program in PROGRAMS)
    return Assets(server, etcd, kubectl, _ask(server), _ask(etcd))


def locate() -> Path:
    """The directory that holds all of them, which `find` asks for their versions."""
    for directory in _candidates():
        if all(os.access(directory / program, os.X_OK) for program in PROGRAMS):
            return directory
    raise InvalidSettings(
        f"no kube-apiserver, etcd and kubectl: run make kube-assets, or set {VARIABLE}"
    )


def cache() -> Path:
    """Outside of the repository, so that neither `make clean` nor a new clone loses it."""
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
        raise InvalidSettings(f"{program} does not run: {error}") from error
    if found := _version_in(done.stdout):
        return found
    raise InvalidSettings(f"{program} does not tell its version", hint=done.stderr[-200:].strip())


def _version_in(text: str) -> Version | None:
    found = _NUMBERS.search(text)
    return Version(*map(int, found.groups())) if found else None
