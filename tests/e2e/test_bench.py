"""Each benchmark in small: one JSON object with the documented keys, sane values, nothing left behind."""

import json
import math
import signal

import pytest

import processes
from waiting import wait_until

pytestmark = pytest.mark.timeout(120)

SMALL = {
    "decide": ["--clusters", "50"],
    "reserve": ["--clusters", "10", "--connections", "3", "--seconds", "1"],
    "advertise": ["--clusters", "12", "--interval", "0.5", "--seconds", "1"],
    "restart": ["--reservations", "300", "--starts", "1"],
    "agent": ["--pods", "60", "--nodes", "3", "--seconds", "1"],
    "deliver": ["--count", "5"],
    "agents": ["--count", "3", "--seconds", "1"],
}


SKIPPED = {
    "agent": "skipping an agent with peering: kube-apiserver, etcd and kubectl not found:"
    " run make kube-assets, or set KUBEBUILDER_ASSETS\n"
}
"""What is printed where the programs of a part are missing, as here."""


@pytest.fixture(autouse=True)
def without_assets(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "no-cache"))
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)


def bench(tmp_path, name, *more):
    started = processes.kubelend("dev", "bench", name, *SMALL[name], *more, temporary=tmp_path)
    code, out, err = processes.finished(started)
    assert (code, err) == (0, SKIPPED.get(name, ""))
    assert list(tmp_path.iterdir()) == []
    assert processes.naming(tmp_path) == []
    return out


def figures(tmp_path, name, *more):
    (line,) = bench(tmp_path, name, "--json", *more).splitlines()
    return json.loads(line)


def test_decide_gives_microseconds_per_decision(tmp_path):
    found = figures(tmp_path, "decide")
    assert found["clusters"] == 50
    assert found["us_per_decision"] == max(found["small_us"], found["large_us"]) > 0


def test_reserve_gives_rates_latencies_and_an_audit(tmp_path):
    found = figures(tmp_path, "reserve")
    assert found["violations"] == 0
    assert found["reservations"] > 0
    assert found["reservations_per_s"] > 0
    assert found["constant_per_s"] > 0
    expected = found["reservations_per_s"] / found["constant_per_s"]
    assert math.isclose(found["ratio"], expected, abs_tol=0.01)
    assert 0 < found["p50_ms"] <= found["p99_ms"]


@pytest.mark.parametrize("flags", [[], ["--direct"]], ids=["behind a proxy", "direct"])
def test_advertise_gives_processor_time_and_memory(tmp_path, flags):
    found = figures(tmp_path, "advertise", *flags)
    assert found["direct"] == bool(flags)
    assert found["advertisements"] == 24
    assert 0 <= found["cpu_percent"] < 400
    assert 10 < found["rss_mb"] < 2000


def test_restart_gives_seconds_until_ready_in_a_table_without_json(tmp_path):
    first, second = bench(tmp_path, "restart").splitlines()
    assert first.split() == ["BENCH", "WHAT", "MEASURED", "TARGET"]
    assert second.startswith("restart  s until ready, 300 reservations")
    assert float(second.split()[6]) > 0


def test_agent_gives_memory_and_processor_time_of_one_that_works(tmp_path):
    found = figures(tmp_path, "agent")
    assert (found["pods"], found["nodes"]) == (60, 3)
    assert "peering_rss_mb" not in found
    assert 10 < found["events_per_s"] < 150
    assert 10 < found["rss_mb"] < 60
    assert 0 <= found["cpu_percent"] < 200


def test_deliver_gives_the_time_until_the_provider_knows(tmp_path):
    found = figures(tmp_path, "deliver")
    assert found["count"] == 5
    assert 0 < found["p50_ms"] <= found["p99_ms"] < 10_000


def test_agents_miss_nothing(tmp_path):
    found = figures(tmp_path, "agents")
    assert (found["count"], found["reservations"], found["missed"]) == (3, 20, 0)
    assert 0 <= found["p50_ms"] <= found["p99_ms"]
    assert 0 <= found["cpu_percent"] < 400
    assert 10 < found["rss_mb"] < 2000


def test_an_interrupted_benchmark_leaves_nothing_behind(tmp_path):
    started = processes.kubelend("dev", "bench", "reserve", "--seconds", "60", temporary=tmp_path)
    wait_until(lambda: len(processes.naming(tmp_path)) > 0)
    started.send_signal(signal.SIGINT)
    code, out, _ = processes.finished(started)
    assert (code, out) == (130, "")
    assert list(tmp_path.iterdir()) == []
    assert processes.naming(tmp_path) == []
