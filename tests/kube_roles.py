"""The roles of an agent, as docs/agent.md has them: given to somebody in a cluster, word for word."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

import shipped
from kubelend.envtest.servers import LocalCluster

DOCUMENT = Path(__file__).parents[1] / "docs" / "agent.md"

Json = dict[str, Any]


def documented() -> list[Json]:
    """Those of the one block that has any."""
    text = DOCUMENT.read_text()
    [block] = re.findall(r"```yaml\n(apiVersion: rbac[^`]*)```", text)
    return list(yaml.safe_load_all(block))


def grant(
    cluster: LocalCluster, user: str, *, instructions: str = "", advertisement: str = "default"
) -> None:
    """`instructions`: the namespace for them; without one that role is for all namespaces."""
    found = []
    for role in documented():
        name = role["metadata"]["name"]
        namespace = {
            "kubelend-agent-instructions": instructions,
            "kubelend-agent-placeholders": instructions,
            "kubelend-agent-advertisement": advertisement,
        }.get(name, "")
        found += [_placed(role, namespace), _binding(role, namespace, user)]
    shipped.apply(cluster, found)


def _placed(role: Json, namespace: str) -> Json:
    if not namespace:
        return role | {"kind": "ClusterRole"}
    return role | {"kind": "Role", "metadata": role["metadata"] | {"namespace": namespace}}


def _binding(role: Json, namespace: str, user: str) -> Json:
    kind, name = ("Role" if namespace else "ClusterRole"), role["metadata"]["name"]
    group = "rbac.authorization.k8s.io"
    return {
        "apiVersion": f"{group}/v1",
        "kind": f"{kind}Binding",
        "metadata": {"name": f"{name}-{user}", **({"namespace": namespace} if namespace else {})},
        "roleRef": {"apiGroup": group, "kind": kind, "name": name},
        "subjects": [{"apiGroup": group, "kind": "User", "name": user}],
    }
