"""`kubelend dev bench kube` in small: the documented keys, figures that are counted, nothing left behind."""

import json
import signal

import pytest

import processes
from waiting import PATIENCE, wait_until

pytestmark = pytest.mark.timeout(240)

SMALL = (
    *("--clusters", "3", "--connections", "4", "--reservations", "20", "--idle-seconds", "2"),
    *("--advertisements", "5", "--history", "50"),
)


@pytest.fixture(scope="module")
def found(kube_assets, tmp_path_factory):
    directory = tmp_path_factory.mktemp("bench")
    started = processes.kubelend("dev", "bench", "kube", "--json", *SMALL, temporary=directory)
    code, out, err = processes.finished(started, 6 * PATIENCE)
    assert code == 0, err
    assert err == ""
    assert list(directory.iterdir()) == []
    assert processes.naming(directory) == []
    (line,) = out.splitlines()
    return json.loads(line)


def test_reservations_pass_the_audit_and_writes_are_counted(found, kube_assets):
    assert (found["reservations"], found["violations"]) == (24, 0)
    assert found["reservations_per_s"] > 0
    assert 0 < found["p50_ms"] <= found["p99_ms"]
    writes = found["writes"]
    assert (writes["POST reservations"], writes["PATCH reservations/status"]) == (1.0, 1.0)
    assert 0 < writes["PUT ledgerrecords"] <= 1
    assert found["writes_per_reservation"] == pytest.approx(sum(writes.values()), abs=0.01)
    assert found["floor_reservations_per_s"] > 0
    assert found["ratio"] == pytest.approx(
        found["reservations_per_s"] / found["floor_reservations_per_s"], abs=0.01
    )
    assert found["kubernetes"] == str(kube_assets.version)


def test_idle_broker_writes_nothing_and_its_start_on_a_history_is_measured(found):
    assert found["idle_writes_per_minute"] == 0
    assert found["idle_seconds"] >= 2
    assert (found["advertisements"], found["history"]) == (5, 50)
    assert found["start_seconds"] > 0


def test_an_interrupted_benchmark_leaves_nothing_behind(kube_assets, tmp_path):
    started = processes.kubelend("dev", "bench", "kube", *SMALL, temporary=tmp_path)
    wait_until(lambda: len(processes.naming(tmp_path)) > 1, poll=0.1)
    started.send_signal(signal.SIGTERM)
    code, out, _ = processes.finished(started, 6 * PATIENCE)
    assert (code, out) == (130, "")
    assert list(tmp_path.iterdir()) == []
    assert processes.naming(tmp_path) == []
