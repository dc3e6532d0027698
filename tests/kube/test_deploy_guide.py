"""docs/deploy.md, command by command, as a reader pastes it, into a real cluster without nodes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import charts
import foreign_kinds
from waiting import PATIENCE

pytestmark = [pytest.mark.timeout(240), pytest.mark.kube]

GUIDE = charts.ROOT / "docs" / "deploy.md"
ELSEWHERE = ("docker ", "kubectl rollout status ", "kubectl wait --for=condition=Complete ")
"""Commands that need a container engine, or nodes."""

UNDELETABLE = """
apiVersion: rear.fluidos.eu/v1alpha1
kind: ResourceRequest
metadata: {name: left, namespace: team, finalizers: [resourcerequest.rear.fluidos.eu/finalizer]}
spec: {requestedCPU: "1", requestedMemory: 1Gi}
---
apiVersion: rear.fluidos.eu/v1alpha1
kind: ReservationInstruction
metadata: {name: left, namespace: team, finalizers: [reservationinstruction.rear.fluidos.eu/peering]}
spec: {reservationName: left, targetClusterID: x, requestedCPU: "1", requestedMemory: 1Gi}
"""
"""As an agent leaves it that was deleted without its cleanup."""


def blocks():
    return re.findall(r"```bash\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)


def runnable(block):
    lines = (line for line in block.splitlines(True) if not line.startswith(ELSEWHERE))
    # The Job before it would never end: tests/kube/test_install.py runs it.
    return "".join(lines).replace(
        "helm uninstall kubelend-agent", "helm uninstall --no-hooks kubelend-agent"
    )


@pytest.fixture(scope="module")
def cluster(lab):
    with foreign_kinds.cluster(lab, "guide") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def shell(helm, cluster, tmp_path_factory):
    """Runs a script as the cluster's administrator, in a directory with our deploy/."""
    home = tmp_path_factory.mktemp("guide")
    (home / "deploy").symlink_to(charts.DEPLOY)
    paths = (helm.parent, cluster.assets.kubectl.parent, Path(sys.executable).parent)
    environment = os.environ | {
        "PATH": ":".join([*map(str, paths), os.environ["PATH"]]),
        "KUBECONFIG": str(cluster.admin_kubeconfig),
        "KUBECACHEDIR": str(cluster.directory / "kubectl"),
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / ".config"),
    }

    def shell(script):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            check=False,
            capture_output=True,
            text=True,
            cwd=home,
            env=environment,
            timeout=4 * PATIENCE,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return shell


def test_every_command_of_the_guide_runs(shell, cluster):
    said = [shell(runnable(block)) for block in blocks()]
    notes = "\n".join(said)
    assert "The broker of Kubelend" in notes
    assert "kubectl rollout status deployment/kubelend-agent -n kubelend" in notes
    left = cluster.kubectl("get", "crds,pvc", "--namespace=kubelend", "--output=name")
    assert "reservations.broker.fluidos.eu" in left
    assert "resourcerequests.rear.fluidos.eu" in left
    assert "persistentvolumeclaim/kubelend-broker" in left
    assert "namespace: lending" in shell("cat mine/all.yaml")


def test_objects_without_an_agent_can_be_deleted(shell, cluster):
    shell(f"kubectl create namespace team\nkubectl apply -f - <<'EOF'{UNDELETABLE}EOF")
    kinds = "resourcerequests,reservationinstructions"
    shell(f"kubectl delete {kinds} -n team --all --wait=false")
    assert len(shell(f"kubectl get {kinds} -n team -o name").split()) == 2
    [block] = [one for one in blocks() if "finalizers" in one]
    shell(block)
    assert shell(f"kubectl get {kinds} -n team -o name") == ""


def test_plugin_is_found_by_kubectl_and_completed(shell):
    assert "kubectl lend [OPTIONS]" in shell("kubectl lend --help")
    *offered, directive = shell("kubectl __complete lend get '' 2>/dev/null").splitlines()
    assert [line.partition("\t")[0] for line in offered] == [
        *("clusters", "reservations", "borrowed", "lent"),
        *("members", "tokens", "quotas", "policies"),
    ]
    assert directive == ":4"
