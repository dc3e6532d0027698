"""Applies manifests to a test cluster with kubectl."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from kubelend.lab.assets import Version
from kubelend.lab.clusters import Cluster
from kubelend.wire import crds

RULES_SINCE = Version(1, 25)
"""First version that supports CEL validation rules in CRDs; kubectl of older ones rejects them."""

_DEFINITION = "customresourcedefinition.apiextensions.k8s.io/"


def install(cluster: Cluster, paths: Iterable[Path]) -> list[str]:
    """Applies files or directories and waits until CRDs are established; returns the objects' names."""
    named = [f"--filename={path}" for path in paths]
    if not named:
        return []
    applied = cluster.kubectl("apply", "--output=name", *named).split()
    if definitions := [name for name in applied if name.startswith(_DEFINITION)]:
        cluster.kubectl("wait", "--for=condition=Established", "--timeout=30s", *definitions)
    return applied


def install_kinds(cluster: Cluster) -> list[str]:
    """Installs our CRDs, without CEL rules on servers that do not support them."""
    directory = cluster.directory / "definitions"
    directory.mkdir(exist_ok=True)
    documents = crds.documents(cel=cluster.assets.version >= RULES_SINCE)
    for name, document in documents.items():
        (directory / name).with_suffix(".json").write_bytes(msgspec.json.encode(document))
    return install(cluster, [directory])
