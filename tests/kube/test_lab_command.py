"""`kubelend dev lab` as a person runs it: clusters in the background, tried, looked at and ended."""

import io
import os
import re
import signal
from contextlib import redirect_stderr, redirect_stdout

import pytest

import processes
from kubelend.cli import main
from kubelend.lab import hosts, walkthrough
from labs import AGENT, LONGEST, PROVIDER, REQUESTER, Lab
from waiting import wait_until

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def site(plain_lab):
    return plain_lab[0]


@pytest.fixture
def fresh(tmp_path):
    """A directory where nothing runs yet, nor will when the test has failed."""
    site = Lab(tmp_path / "clusters")
    yield site
    site.lab("down")


@pytest.fixture
def provider(site):
    """The process of the agent that lends."""
    [pid] = site.find(AGENT, PROVIDER)
    return pid


def borrow(site, path, name):
    site.kubectl(REQUESTER, "apply", f"--filename={path}")
    reserved = ("--for=condition=Reserved", "--timeout=30s")
    site.kubectl(REQUESTER, "wait", f"resourcerequest/{name}", *reserved)


def test_up_prints_the_kubeconfigs_and_what_to_try_and_does_nothing_when_it_is_repeated(
    plain_lab,
):
    site, out = plain_lab
    for name in hosts.CLUSTER_NAMES:
        assert f"    {site.directory / name}.kubeconfig\n" in out
    for command in (
        "kubectl --context broker-cluster get clusteradvertisements",
        f"kubectl --context agent-cluster-1 apply -f {site.directory / 'request.yaml'}",
        "kubelend get clusters",
        "kubelend dev lab down",
    ):
        assert command in out
    assert "\x1b" not in out
    assert len(re.findall(r"^ \d  .* \d+(\.\d)? m?s$", out, re.M)) == 5
    before = site.record
    code, out, err = site.lab("up", "--no-liqo")
    assert (code, err) == (0, "")
    assert "They are running or starting already" in out
    assert site.record == before


def test_status_shows_all_parts_and_offers(site):
    code, out, err = site.lab("status")
    assert (code, err) == (0, "All components are ready.\n")
    for part in (
        "supervisor",
        "broker",
        *(f"API server of {name}" for name in hosts.CLUSTER_NAMES),
    ):
        assert re.search(rf"^{part} +ready +\S", out, re.M)
    assert re.search(r"^agent of agent-cluster-1 +ready +agent-cluster-1\.log$", out, re.M)
    assert out.endswith(f"\nLogs and kubeconfigs are in {site.directory}\n")
    # The contract's example.
    assert re.search(r"^agent-cluster-2 +8950m +7\.2Gi +- +0 0 +\d+\.\d\d +yes$", out, re.M)
    assert re.search(r"^agent-cluster-1 +5050m +7\.7Gi +1 ", out, re.M)


def test_request_is_walked_through_every_step(site):
    code, out, err = site.lab("test")
    assert (code, err) == (0, "")
    [name] = set(re.findall(r"rsv-agent-cluster-1-\w+", out))
    steps = [re.sub(r" +[\d.]+ m?s$", "", line) for line in out.splitlines()]
    [request] = set(re.findall(r"test-\w+", out))
    assert steps == [
        f"agent-cluster-1: ResourceRequest {request} created: {walkthrough.CPU} CPU, {walkthrough.MEMORY}",
        "agent-cluster-1: finalizer set by the agent",
        f"broker-cluster: {name} is Reserved",
        "agent-cluster-1: ReservationInstruction created",
        "agent-cluster-2: ProviderInstruction is Held",
        "broker-cluster: agent-cluster-2-adv has 500m more reserved",
        "agent-cluster-1: ResourceRequest is Reserved: no peering is configured",
        f"agent-cluster-1: ResourceRequest {request} deleted",
        f"broker-cluster: {name} is Released",
        "agent-cluster-1: ResourceRequest removed",
        "agent-cluster-1: ReservationInstruction is Finished",
        "agent-cluster-2: ProviderInstruction is Withdrawn",
        "broker-cluster: agent-cluster-2-adv has the same reserved as before",
        "Every step was observed on the API servers.",
    ]
    assert max(map(len, out.splitlines())) <= 80


def test_suggested_commands_work(site):
    borrow(site, site.directory / "request.yaml", "small")
    assert "agent-cluster-2-adv" in site.kubectl("broker-cluster", "get", "clusteradvertisements")
    site.kubectl(REQUESTER, "delete", "resourcerequest", "small")
    arguments = ("audit", "check", f"--store={site.record['store']}")
    assert site.run(*arguments)[0] == 0


def test_rejection_is_the_brokers_error(site, tmp_path):
    """All that agent-cluster-2 has is taken, so that the request of the test does not fit."""
    whole = tmp_path / "whole.yaml"
    whole.write_text(
        "apiVersion: rear.fluidos.eu/v1alpha1\nkind: ResourceRequest\nmetadata: {name: whole}\n"
        "spec: {requestedCPU: 8950m, requestedMemory: 1Gi, wait: 1m}\n"  # for what is being given back
    )
    borrow(site, whole, "whole")
    code, _, err = site.lab("test")
    site.kubectl(REQUESTER, "delete", "resourcerequest", "whole")
    assert code == 5
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_step_that_is_not_seen_fails_the_test(site, provider):
    os.kill(provider, signal.SIGSTOP)
    code, out, err = site.lab("test", "--timeout=2s")
    os.kill(provider, signal.SIGCONT)
    assert code == 7
    assert re.fullmatch(
        r"error: ProviderInstruction \S+ of agent-cluster-2 was not Held within [\d.]+ s\n", err
    )
    assert "is Reserved" in out
    # What it asked for is given back all the same.
    idle = re.compile(r"^agent-cluster-2 +8950m .* 0 0 ", re.M)
    wait_until(lambda: idle.search(site.lab("status")[1]) is not None, poll=0.5)


def test_agent_that_died_is_reported(site, provider):
    os.kill(provider, signal.SIGKILL)
    code, out, err = site.lab("status")
    assert code == 7
    assert re.search(r"^agent of agent-cluster-2 +NotReady ", out, re.M)
    assert err == "not ready: agent of agent-cluster-2: does not respond\n"


def test_down_cleans_up_after_a_killed_supervisor(site):
    os.kill(site.supervisor, signal.SIGKILL)
    wait_until(lambda: site.lab("test")[0] == 3, poll=0.5)
    code, _, err = site.lab("status")
    assert (code, "not ready: supervisor: not running\n" in err) == (7, True)
    assert len(site.runs()) >= 6
    code, out, err = site.lab("down")
    assert (code, err) == (0, "")
    assert out == f"Stopped, and deleted {site.directory}.\n"
    assert site.is_gone()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_up_that_is_interrupted_leaves_nothing_running(kube_assets, fresh, number):
    site = fresh
    up = site.start("up", "--no-liqo")
    # The supervisor, etcd and the API servers, which are starting.
    wait_until(lambda: len(site.runs()) >= 5, poll=0.1)
    up.send_signal(number)
    code, _, err = processes.finished(up, LONGEST)
    if number is signal.SIGINT:
        assert (code, err) == (130, "")
        assert site.is_gone()
    wait_until(lambda: not site.runs(), poll=0.1)
    assert site.lab("down")[0] == 0
    assert site.is_gone()


def run_here(command, directory, *flags):
    """In this process: nothing is started."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main.run(["dev", "lab", command, f"--directory={directory}", *flags])
    return code, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("command", ["status", "test", "down"])
def test_without_clusters_each_command_says_so(tmp_path, command):
    code, out, err = run_here(command, tmp_path / "none")
    if command == "down":
        assert (code, out, err) == (0, "Nothing was running.\n", "")
    else:
        assert (code, out) == (3, "")
        assert err.startswith("error: no clusters ")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            (),
            "kube-apiserver, etcd and kubectl not found: run make kube-assets, or set"
            " KUBEBUILDER_ASSETS",
        ),
        (("--kind",), "kind not found on PATH; install it, or omit --kind (KIND=1)"),
    ],
    ids=["assets", "kind"],
)
def test_what_is_missing_is_one_line(tmp_path, monkeypatch, flags, message):
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    code, out, err = run_here("up", tmp_path / "clusters", "--no-liqo", *flags)
    assert (code, out, err) == (2, "", f"error: {message}\n")
    assert not (tmp_path / "clusters").exists()


KIND = """#!/bin/sh
echo "$*" >> {calls}
for word; do
  case "$word" in
  --name=*) name=${{word#--name=}} ;;
  --kubeconfig=*) kubeconfig=${{word#--kubeconfig=}} ;;
  esac
done
if [ "$1" = create ]; then cp "{sources}/$name" "$kubeconfig"; fi
"""


@pytest.fixture
def fake_kind(clusters, tmp_path, monkeypatch):
    """A `kind` that hands out an existing cluster for all three; the file of its calls."""
    path = tmp_path / "bin"
    path.mkdir()
    [cluster] = clusters()
    for name in hosts.CLUSTER_NAMES:
        (path / name).write_text(cluster.admin_kubeconfig.read_text())
    for program in ("kind", "docker"):
        (path / program).write_text(KIND.format(calls=tmp_path / "calls", sources=path))
        (path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{path}:{os.environ['PATH']}")
    return tmp_path / "calls"


def test_with_kind_all_runs_in_its_clusters_and_down_deletes_them(fake_kind, fresh):
    site = fresh
    code, out, err = site.lab("up", "--kind")
    assert (code, err) == (0, ""), out
    code, out, _ = site.lab("status")
    assert (code, "agent of agent-cluster-2" in out) == (0, True)
    assert "No reservations." in out
    assert site.lab("down")[0] == 0
    assert site.is_gone()
    calls = fake_kind.read_text().split("\n")
    verbs = [line.split()[0] for line in calls if line]
    assert verbs == ["get", *["create"] * 3, *["delete"] * 3]
