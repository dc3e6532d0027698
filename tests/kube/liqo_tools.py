"""The demo and the benchmarks on clusters with Liqo, until nothing is left behind: `make liqo-proofs`.

Each of them starts clusters of its own, which takes most of a minute.
"""

import json
import signal

import pytest

import processes
from waiting import PATIENCE, wait_until

pytestmark = [pytest.mark.timeout(600), pytest.mark.kube]

STEPS = ("reserve", "handshake", "grant", "node")


def figures(directory, *arguments):
    started = processes.kubelend("dev", "bench", *arguments, "--json", temporary=directory)
    code, out, err = processes.finished(started, 8 * PATIENCE)
    assert (code, err) == (0, ""), out
    assert list(directory.iterdir()) == []
    assert processes.naming(directory) == []
    (line,) = out.splitlines()
    return json.loads(line)


def test_first_and_next_nodes_are_measured_beside_liqo_alone(kube_assets, liqo_assets, tmp_path):
    found = figures(tmp_path, "peering", "--reservations=2", "--firsts=1")
    for which in ("first", "next"):
        ours, alone = found[f"{which}_ready_ms"], found[f"liqo_{which}_ready_ms"]
        assert found[f"{which}_ratio"] == pytest.approx(ours / alone, abs=0.01)
        assert all(found[f"{which}_{step}_ms"] > 0 for step in STEPS)
        assert all(found[f"liqo_{which}_{step}_ms"] > 0 for step in STEPS[1:])
    # Of one measurement, the steps add up to the whole.
    whole = sum(found[f"first_{step}_ms"] for step in STEPS)
    assert whole == pytest.approx(found["first_ready_ms"], abs=1)


def test_memory_of_an_agent_that_peers_and_holds_is_measured(kube_assets, liqo_assets, tmp_path):
    found = figures(tmp_path, "agent", "--pods=60", "--nodes=3", "--seconds=2")
    assert 10 < found["peering_rss_mb"] < 60
    assert 0 <= found["peering_cpu_percent"] < 200


def test_an_interrupted_benchmark_leaves_nothing_behind(kube_assets, liqo_assets, tmp_path):
    started = processes.kubelend("dev", "bench", "peering", temporary=tmp_path)
    wait_until(lambda: len(processes.naming(tmp_path)) > 4)
    started.send_signal(signal.SIGTERM)
    code, out, _ = processes.finished(started, 4 * PATIENCE)
    assert (code, out) == (130, "")
    assert list(tmp_path.iterdir()) == []
    assert processes.naming(tmp_path) == []


# -- the demo


def start_demo(tmp_path):
    return processes.kubelend("dev", "demo", "--kubernetes", temporary=tmp_path)


def is_clean(tmp_path):
    return not list(tmp_path.iterdir()) and not processes.naming(tmp_path)


def test_demo_runs_a_pod_in_another_cluster_and_fits_a_terminal(kube_assets, liqo_assets, tmp_path):
    code, out, err = processes.finished(start_demo(tmp_path), 8 * PATIENCE)
    assert (code, err) == (0, ""), out
    shown = ["the same pod is Running", "is still Pending", "nothing of Liqo is left", "finished."]
    assert sorted(shown, key=out.index) == shown
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
    assert is_clean(tmp_path)


@pytest.mark.parametrize("moment", [" 1  Start the clusters", "ResourceSlice granted"])
def test_demo_that_is_interrupted_leaves_nothing_behind(kube_assets, liqo_assets, tmp_path, moment):
    started = start_demo(tmp_path)
    assert started.stdout is not None
    assert any(moment in line for line in started.stdout)
    started.send_signal(signal.SIGINT)
    code, _, _ = processes.finished(started, 8 * PATIENCE)
    assert code == 130
    wait_until(lambda: is_clean(tmp_path))
