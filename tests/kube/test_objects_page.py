"""docs/objects.md shows what people see: done again, line by line, with a broker on a real API server."""

import contextlib
import re
import shlex
import subprocess
from pathlib import Path

import pytest

import transcripts
from kubelend.envtest.assets import KubernetesVersion
from kubelend.envtest.processes import ChildProcess
from waiting import wait_until

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "objects.md"
STEPS = [*transcripts.steps(PAGE.read_text())]


def kubectl(cluster, step):
    program, *arguments = shlex.split(step.command)
    assert program == "kubectl"
    done = subprocess.run(
        [cluster.assets.kubectl, f"--kubeconfig={cluster.admin_kubeconfig}", *arguments],
        input=step.document,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def outcome(cluster, step):
    """What it prints; a read-only command is repeated until it prints what the page shows, or for a while."""
    printed = ""

    def is_right():
        nonlocal printed
        printed = kubectl(cluster, step)
        return not step.is_read_only or transcripts.same(step.printed, printed)

    with contextlib.suppress(AssertionError):  # the caller says how they differ
        wait_until(is_right, poll=0.2)
    return printed


@contextlib.contextmanager
def broker_of(cluster, directory):
    """As a person starts it."""
    flags = (
        "--broker-interface=kubernetes",
        f"--kubeconfig={cluster.admin_kubeconfig}",
        "--health-probe-bind-address=127.0.0.1:0",
        "--metrics-bind-address=0",
    )
    process = ChildProcess("broker", directory / "log", list(flags))
    try:
        process.start()
        process.wait_until_ready()
        yield
    finally:
        process.stop()


@pytest.mark.timeout(240)
def test_page_shows_what_kubectl_prints(clusters, tmp_path):
    [cluster] = clusters()
    [number] = re.findall(r"`kubectl` v([\d.]+)", PAGE.read_text())
    shown = KubernetesVersion(*map(int, number.split(".")))
    if cluster.assets.version[:2] != shown[:2]:
        pytest.skip(
            f"the page was made with {shown}: others print columns and explanations otherwise"
        )
    assert len(STEPS) > 20
    with broker_of(cluster, tmp_path):
        for step in STEPS:
            printed = outcome(cluster, step)
            if step.printed:
                assert transcripts.same(step.printed, printed), f"{step.command}:\n{printed}"


@pytest.mark.parametrize(
    "shown, printed, is_right",
    [
        pytest.param("a  950m  2s", "a   950m   1m3s", True, id="another age"),
        pytest.param("a  950m  2s", "a  951m  2s", False, id="another amount"),
        pytest.param("a\nb", "a", False, id="a line too many"),
        pytest.param("Phase: Reserved", "Phase: Failed", False, id="another phase"),
        pytest.param("Record: {one ...", "Record: {one, two}", True, id="cut off"),
        pytest.param("Record: {one ...", "Record: {two}", False, id="cut off, another"),
        pytest.param("  UID: 1", "UID: 1", False, id="another depth"),
    ],
)
def test_page_is_wrong_about_everything_that_stays_the_same(shown, printed, is_right):
    assert transcripts.same(shown, printed) is is_right
