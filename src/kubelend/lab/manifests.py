"""Applies manifests to a test cluster with kubectl."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from kubelend.lab.assets import KubernetesVersion
from kubelend.lab.clusters import LocalCluster
from kubelend.wire import crds

CEL_SINCE = KubernetesVersion(1, 25)
"""First version that supports CEL validation rules in CRDs; kubectl of older ones rejects them."""

_CRD_PREFIX = "customresourcedefinition.apiextensions.k8s.io/"


def apply_manifests(cluster: LocalCluster, paths: Iterable[Path]) -> list[str]:
    """Applies files or directories and waits until CRDs are established; returns the objects' names."""
    named = [f"--filename={path}" for path in paths]
    if not named:
        return []
    applied = cluster.kubectl("apply", "--output=name", *named).split()
    if definitions := [name for name in applied if name.startswith(_CRD_PREFIX)]:
        cluster.kubectl("wait", "--for=condition=Established", "--timeout=30s", *definitions)
    return applied


def install_crds(cluster: LocalCluster) -> list[str]:
    """Installs our CRDs, without CEL rules on servers that do not support them."""
    directory = cluster.directory / "definitions"
    directory.mkdir(exist_ok=True)
    documents = crds.crd_documents(cel=cluster.assets.version >= CEL_SINCE)
    for name, document in documents.items():
        (directory / name).with_suffix(".json").write_bytes(msgspec.json.encode(document))
    return apply_manifests(cluster, [directory])
