"""Derives kubeconfigs from others: one for a service account, one with contexts for several clusters.

The source files, written by kind or by us, have one cluster, one user and one context each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from kubelend.kits import keyfiles

Config = dict[str, Any]


class _Part(NamedTuple):
    name: str
    cluster: Config
    user: str
    proof: Config


def with_token(administrator: Path, path: Path, user: str, token: str) -> Path:
    """Writes a kubeconfig for the same cluster with another user's token."""
    name, cluster = _cluster(administrator)
    return _write(path, [_Part(name, cluster, user, {"token": token})])


def together(administrators: Mapping[str, Path], path: Path) -> Path:
    """Writes a kubeconfig with one context per cluster, named like it. The first is the current context."""
    return _write(
        path,
        [
            _Part(name, _cluster(source)[1], f"{name}-admin", _user(source))
            for name, source in administrators.items()
        ],
    )


def _write(path: Path, parts: Iterable[_Part]) -> Path:
    parts = tuple(parts)
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": part.name, "cluster": part.cluster} for part in parts],
        "users": [{"name": part.user, "user": part.proof} for part in parts],
        "contexts": [
            {"name": part.name, "context": {"cluster": part.name, "user": part.user}}
            for part in parts
        ],
        "current-context": parts[0].name,
    }
    text = yaml.safe_dump(content, sort_keys=False).encode()
    keyfiles.write(path, text, mode=keyfiles.PRIVATE, overwrite=True)
    return path


def _cluster(path: Path) -> tuple[str, Config]:
    [found] = _read(path)["clusters"]
    return found["name"], found["cluster"]


def _user(path: Path) -> Config:
    [found] = _read(path)["users"]
    user: Config = found["user"]
    return user


def _read(path: Path) -> Config:
    found: Config = yaml.safe_load(path.read_text("utf-8"))
    return found
