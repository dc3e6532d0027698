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


def test_the_audit_finds_all_reservations_and_nothing_wrong(found):
    assert (found["reservations"], found["violations"]) == (24, 0)
    assert found["reservations_per_s"] > 0
    assert 0 < found["p50_ms"] <= found["p99_ms"]


def test_a_reservation_is_made_with_two_writes_and_a_share_of_a_commit(found):
    writes = found["writes"]
    assert (writes["POST reservations"], writes["PATCH reservations/status"]) == (1.0, 1.0)
    assert 0 < writes["PUT ledgerrecords"] <= 1
    assert found["writes_per_reservation"] == pytest.approx(sum(writes.values()), abs=0.01)


def test_nothing_is_written_while_nothing_happens(found):
    assert found["idle_writes_per_minute"] == 0
    assert found["idle_seconds"] >= 2


def test_the_start_on_a_history_takes_time(found):
    assert (found["advertisements"], found["history"]) == (5, 50)
    assert found["start_seconds"] > 0


def test_the_version_of_the_server_is_told(found, kube_assets):
    assert found["kubernetes"] == str(kube_assets.version)


def test_an_interrupted_benchmark_leaves_nothing_behind(kube_assets, tmp_path):
    started = processes.kubelend("dev", "bench", "kube", *SMALL, temporary=tmp_path)
    wait_until(lambda: len(processes.naming(tmp_path)) > 1)
    started.send_signal(signal.SIGTERM)
    code, out, _ = processes.finished(started, 6 * PATIENCE)
    assert (code, out) == (130, "")
    assert list(tmp_path.iterdir()) == []
    assert processes.naming(tmp_path) == []
