"""Derives kubeconfigs from others: one for a service account, one with contexts for several clusters.

The source files, written by kind or by us, have one cluster, one user and one context each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from kubelend.kits import keyfiles

ConfigDict = dict[str, Any]


class _ContextEntry(NamedTuple):
    name: str
    cluster: ConfigDict
    user: str
    credentials: ConfigDict


def write_token_kubeconfig(administrator: Path, path: Path, user: str, token: str) -> Path:
    """Writes a kubeconfig for the same cluster with another user's token."""
    name, cluster = _cluster_entry(administrator)
    return _write_contexts(path, [_ContextEntry(name, cluster, user, {"token": token})])


def merge_kubeconfigs(administrators: Mapping[str, Path], path: Path) -> Path:
    """Writes a kubeconfig with one context per cluster, named like it. The first is the current context."""
    return _write_contexts(
        path,
        [
            _ContextEntry(name, _cluster_entry(source)[1], f"{name}-admin", _user_entry(source))
            for name, source in administrators.items()
        ],
    )


def _write_contexts(path: Path, parts: Iterable[_ContextEntry]) -> Path:
    parts = tuple(parts)
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": part.name, "cluster": part.cluster} for part in parts],
        "users": [{"name": part.user, "user": part.credentials} for part in parts],
        "contexts": [
            {"name": part.name, "context": {"cluster": part.name, "user": part.user}}
            for part in parts
        ],
        "current-context": parts[0].name,
    }
    text = yaml.safe_dump(content, sort_keys=False).encode()
    keyfiles.write_atomic(path, text, mode=keyfiles.PRIVATE_MODE, overwrite=True)
    return path


def _cluster_entry(path: Path) -> tuple[str, ConfigDict]:
    [found] = _read_kubeconfig(path)["clusters"]
    return found["name"], found["cluster"]


def _user_entry(path: Path) -> ConfigDict:
    [found] = _read_kubeconfig(path)["users"]
    user: ConfigDict = found["user"]
    return user


def _read_kubeconfig(path: Path) -> ConfigDict:
    found: ConfigDict = yaml.safe_load(path.read_text("utf-8"))
    return found
