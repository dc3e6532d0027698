"""Kubeconfig files: one cluster, one user and one context, of which a test changes what it is about.

path = kubeconfigs.write(tmp_path / "config", user={"token": "t"}, cluster={"server": "https://a"})
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def write(
    path: Path,
    *,
    name: str = "here",
    cluster: dict[str, Any] | None = None,
    user: dict[str, Any] | None = None,
    context: dict[str, Any] | None = None,
    current: str | None = None,
) -> Path:
    """A file whose parts all have the same name."""
    body = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": {"server": f"https://{name}"} | (cluster or {})}],
        "users": [{"name": name, "user": user or {}}],
        "contexts": [
            {"name": name, "context": {"cluster": name, "user": name} | (context or {})},
        ],
        "current-context": name if current is None else current,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(body))
    return path
