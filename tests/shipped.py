"""What we ship for a cluster, as kustomize puts it together: accounts, their roles, and flags.

shipped.install(cluster, "broker", "agent")
flags = shipped.flags("broker", pod="kubelend-broker-0")

Tests run broker and agents with these, so that no right and no flag is true in a test only.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import tempfile
from pathlib import Path

import charts
from charts import KUSTOMIZE, Json
from kubelend.envtest import assets
from kubelend.envtest.servers import LocalCluster

HOME = "kubelend"
"""The namespace of all of it."""

_PARTS = {
    "broker": ("broker/overlays/replicated", "broker/components/cluster-namespaces"),
    "agent": ("agent/base",),
    "agent-by-namespace": ("agent/overlays/cluster-namespace",),
}
"""A kustomization, and components on it."""

_ROLES = ("Role", "ClusterRole")
_BINDINGS = ("RoleBinding", "ClusterRoleBinding")
_HOLDS = ("PriorityClass", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
_PORTS = ("--health-probe-bind-address", "--metrics-bind-address", "--http-port")


@functools.cache
def part(name: str) -> list[Json]:
    """All its objects."""
    with tempfile.TemporaryDirectory() as directory:
        base, *components = (os.path.relpath(KUSTOMIZE / one, directory) for one in _PARTS[name])
        whole = json.dumps({"resources": [base], "components": components})
        Path(directory, "kustomization.yaml").write_text(whole)
        kubectl = assets.locate_assets() / "kubectl"
        done = subprocess.run(
            [kubectl, "kustomize", directory], check=True, capture_output=True, text=True
        )
    return charts.load(done.stdout)


def install(cluster: LocalCluster, *names: str) -> None:
    """Accounts, roles and policies, and no Deployments: nobody would run them."""
    for name in names:
        kinds = ("ServiceAccount", *_ROLES, *_BINDINGS, *_HOLDS)
        apply(cluster, charts.of_kind(part(name), *kinds))


def apply(cluster: LocalCluster, found: list[Json]) -> None:
    path = cluster.directory / "applied.json"
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": found}))
    cluster.kubectl("apply", "--server-side", f"--filename={path}")


def roles(name: str) -> list[Json]:
    """Those of the program itself, and not those of people."""
    found = part(name)
    bound = {one["roleRef"]["name"] for one in charts.of_kind(found, *_BINDINGS)}
    return [one for one in charts.of_kind(found, *_ROLES) if one["metadata"]["name"] in bound]


def flags(name: str, *left_out: str, pod: str = "") -> list[str]:
    """Those of the Deployment, but for ports and what else is left out: these are the test's."""
    return [
        argument.replace("$(POD_NAMESPACE)", HOME).replace("$(POD_NAME)", pod)
        for argument in charts.container(part(name))["args"][1:]
        if not argument.startswith((*_PORTS, *left_out))
    ]
