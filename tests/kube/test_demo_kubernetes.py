"""`kubelend dev demo --kubernetes`: the story on real API servers with Liqo, and nothing left behind."""

import signal

import pytest

import processes
from waiting import PATIENCE, wait_until

pytestmark = [pytest.mark.timeout(300), pytest.mark.kube]


def start(tmp_path):
    return processes.kubelend("dev", "demo", "--kubernetes", temporary=tmp_path)


def is_clean(tmp_path):
    return not list(tmp_path.iterdir()) and not processes.naming(tmp_path)


def test_demo_runs_a_pod_in_another_cluster_and_fits_a_terminal(kube_assets, liqo_assets, tmp_path):
    code, out, err = processes.finished(start(tmp_path), 8 * PATIENCE)
    assert (code, err) == (0, ""), out
    shown = ["the same pod is Running", "is still Pending", "nothing of Liqo is left", "finished."]
    assert sorted(shown, key=out.index) == shown
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
    assert is_clean(tmp_path)


@pytest.mark.parametrize("moment", [" 1  Start the clusters", "ResourceSlice granted"])
def test_demo_that_is_interrupted_leaves_nothing_behind(kube_assets, liqo_assets, tmp_path, moment):
    started = start(tmp_path)
    assert started.stdout is not None
    assert any(moment in line for line in started.stdout)
    started.send_signal(signal.SIGINT)
    code, _, _ = processes.finished(started, 8 * PATIENCE)
    assert code == 130
    wait_until(lambda: is_clean(tmp_path))


def test_missing_programs_are_one_line_that_says_how_to_get_them(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    code, out, err = processes.finished(start(tmp_path))
    assert (code, out) == (2, "")
    hint = "run make kube-assets, or set KUBEBUILDER_ASSETS"
    assert err == f"error: kube-apiserver, etcd and kubectl not found: {hint}\n"
