"""`kubelend dev bench peering` and `agent` with Liqo's programs, in small: keys, and nothing left behind."""

import json
import signal

import pytest

import processes
from waiting import PATIENCE, wait_until

pytestmark = [pytest.mark.timeout(300), pytest.mark.kube]

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
