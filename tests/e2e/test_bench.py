"""Each benchmark in small: one JSON object with the documented keys, sane values, nothing left behind."""

import json
import math
import signal

import pytest

import processes
from kubelend.cli import main
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


@pytest.fixture
def bench(tmp_path, monkeypatch, capsys):
    """Runs a benchmark in this process; returns its output."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)

    def run(name, *more):
        code = main.run(["dev", "bench", name, *SMALL[name], *more])
        out, err = capsys.readouterr()
        assert (code, err) == (0, "")
        assert_nothing_left(tmp_path)
        return out

    return run


@pytest.fixture
def figures(bench):
    def run(name, *more):
        (line,) = bench(name, "--json", *more).splitlines()
        return json.loads(line)

    return run


def assert_nothing_left(directory):
    assert list(directory.iterdir()) == []
    assert processes.naming(directory) == []


def test_decide_gives_microseconds_per_decision(figures):
    found = figures("decide")
    assert found["clusters"] == 50
    assert found["us_per_decision"] == max(found["small_us"], found["large_us"]) > 0


def test_reserve_gives_rates_latencies_and_an_audit(figures):
    found = figures("reserve")
    assert found["violations"] == 0
    assert found["reservations"] > 0
    assert found["reservations_per_s"] > 0
    assert found["constant_per_s"] > 0
    expected = found["reservations_per_s"] / found["constant_per_s"]
    assert math.isclose(found["ratio"], expected, abs_tol=0.01)
    assert 0 < found["p50_ms"] <= found["p99_ms"]


@pytest.mark.parametrize("flags", [[], ["--direct"]], ids=["behind a proxy", "direct"])
def test_advertise_gives_processor_time_and_memory(figures, flags):
    found = figures("advertise", *flags)
    assert found["direct"] == bool(flags)
    assert found["advertisements"] == 24
    assert 0 <= found["cpu_percent"] < 400
    assert 10 < found["rss_mb"] < 2000


def test_restart_gives_seconds_until_ready(figures):
    found = figures("restart")
    assert found["reservations"] == 300
    assert found["starts"] == [found["seconds"]]
    assert found["seconds"] > 0


def test_agent_gives_memory_and_processor_time_of_one_that_works(figures):
    found = figures("agent")
    assert (found["pods"], found["nodes"]) == (60, 3)
    assert 10 < found["events_per_s"] < 150
    assert 10 < found["rss_mb"] < 60
    assert 0 <= found["cpu_percent"] < 200


def test_deliver_gives_the_time_until_the_provider_knows(figures):
    found = figures("deliver")
    assert found["count"] == 5
    assert 0 < found["p50_ms"] <= found["p99_ms"] < 10_000


def test_agents_miss_nothing(figures):
    found = figures("agents")
    assert (found["count"], found["reservations"], found["missed"]) == (3, 20, 0)
    assert 0 <= found["p50_ms"] <= found["p99_ms"]
    assert 0 <= found["cpu_percent"] < 400
    assert 10 < found["rss_mb"] < 2000


def test_without_json_a_table_is_printed(bench):
    first, second = bench("restart").splitlines()
    assert first.split() == ["BENCH", "WHAT", "MEASURED", "TARGET"]
    assert second.startswith("restart  s until ready, 300 reservations")


def test_an_interrupted_benchmark_leaves_nothing_behind(tmp_path):
    started = processes.kubelend("dev", "bench", "reserve", "--seconds", "60", temporary=tmp_path)
    wait_until(lambda: len(processes.naming(tmp_path)) > 0)
    started.send_signal(signal.SIGINT)
    code, out, _ = processes.finished(started)
    assert (code, out) == (130, "")
    assert_nothing_left(tmp_path)
