"""The demo as a person runs it: all steps, exit code 0, and nothing left behind."""

import os
import signal
from pathlib import Path

import pytest

import processes
from kubelend.demo import story
from waiting import PATIENCE, wait_until

pytestmark = pytest.mark.timeout(120)

LONGEST = 3 * PATIENCE
"""Seconds that a demo may take."""


def clean(tmp_path):
    return not list(tmp_path.iterdir()) and not processes.naming(tmp_path)


def test_the_demo_shows_every_step_fits_a_terminal_and_leaves_nothing_behind(tmp_path):
    started = processes.kubelend("dev", "demo", temporary=tmp_path)
    code, out, err = processes.finished(started, LONGEST)
    assert (code, err) == (0, "")
    assert clean(tmp_path)
    for step in (*story.LIFECYCLE_STEPS, *story.FINAL_STEPS):
        assert step.title in out
    for seen in (
        "is reserved in paris",
        "Hold 4 CPU / 16Gi Memory / 1 GPU for requester berlin",
        "no peering is configured",
        "moved there from",
        "Failed, NoCapacity",
        "0 violations",
    ):
        assert seen in out
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out


def test_a_demo_that_is_terminated_leaves_nothing_behind(tmp_path):
    started = processes.kubelend("dev", "demo", temporary=tmp_path)
    wait_until(lambda: len(processes.naming(tmp_path)) > 0)
    started.send_signal(signal.SIGTERM)
    code, _, _ = processes.finished(started, LONGEST)
    assert code == 130
    assert clean(tmp_path)


def staying(tmp_path):
    """A demo that has been told to stay, and what it has shown until then."""
    started = processes.kubelend("dev", "demo", "--stay", temporary=tmp_path)
    shown = []
    assert started.stdout is not None
    for line in started.stdout:
        shown.append(line)
        if "audit check --store" in line:
            break
    return started, shown


def test_demo_that_stays_prints_commands_that_work_and_ends_with_ctrl_c(tmp_path):
    started, shown = staying(tmp_path)
    first = next(number for number, line in enumerate(shown) if line.startswith("export "))
    assert f"export KUBELEND_CERT_PATH={tmp_path}" in shown[first + 1]
    last = shown.index("EOF\n")
    # The agent stores the request that the first commands write, and the next command prints it.
    processes.output("bash", "-c", "".join(shown[first : last + 1]))
    command = shown[last + 1].split()
    assert command[0] == "cat"
    wait_until(Path(command[1]).exists)
    wait_until(lambda: "phase: Reserved" in processes.output(*command))
    started.send_signal(signal.SIGINT)
    code, rest, err = processes.finished(started, LONGEST)
    assert (code, err) == (0, "")
    assert story.FINAL_STEPS[-1].title in rest
    assert clean(tmp_path)


def test_a_step_that_shows_something_else_is_one_line_and_exit_code_1(tmp_path):
    started, _ = staying(tmp_path)
    (broker,) = (one for one in processes.naming(tmp_path) if " broker " in one.command)
    os.kill(broker.pid, signal.SIGKILL)
    started.send_signal(signal.SIGINT)
    code, _, err = processes.finished(started, LONGEST)
    (line,) = err.splitlines()
    assert code == 1
    assert line.startswith("error: step 14, 'Stop all processes': processes exited with codes")
    assert "-9" in line
    assert clean(tmp_path)


def test_demo_on_kubernetes_says_how_to_get_its_programs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    code, out, err = processes.finished(
        processes.kubelend("dev", "demo", "--kubernetes", temporary=tmp_path)
    )
    assert (code, out) == (2, "")
    hint = "run make kube-assets, or set KUBEBUILDER_ASSETS"
    assert err == f"error: kube-apiserver, etcd and kubectl not found: {hint}\n"
