"""`kubelend dev lab` as a person runs it: clusters in the background, tried, looked at and ended."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

import processes
from kubelend.lab import hosts, walkthrough
from waiting import PATIENCE, wait_until

pytestmark = pytest.mark.timeout(180)

LONGEST = 4 * PATIENCE
"""Seconds that a command may take on a busy machine."""


class Site:
    """One directory, and the commands on it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def start(self, command, *flags):
        where = f"--directory={self.directory}"
        arguments = ("dev", "lab", command, where, *flags)
        return processes.kubelend(*arguments, temporary=self.directory.parent)

    def run(self, command, *flags):
        return processes.finished(self.start(command, *flags), LONGEST)

    @property
    def record(self):
        return json.loads((self.directory / "lab.json").read_text())

    @property
    def supervisor(self):
        return int((self.directory / "supervisor.pid").read_text())

    def runs(self):
        """What is left of it, the commands apart."""
        found = processes.naming(self.directory)
        return [one for one in found if "kubelend dev lab " not in one.command]

    def is_clean(self):
        return not self.directory.exists() and not self.runs()


@pytest.fixture(scope="module")
def started(kube_assets, tmp_path_factory):
    """All that runs, and what `up` printed. The last test ends it, if all go well."""
    site = Site(tmp_path_factory.mktemp("lab") / "clusters")
    code, out, err = site.run("up", "--no-liqo")
    assert (code, err) == (0, ""), out
    yield site, out
    site.run("down")


@pytest.fixture
def site(started):
    return started[0]


@pytest.fixture
def fresh(tmp_path):
    """A directory where nothing runs yet, nor will when the test has failed."""
    site = Site(tmp_path / "clusters")
    yield site
    site.run("down")


@pytest.fixture
def provider(site):
    """The process of the agent that lends."""
    agents = {one["name"]: one["pid"] for one in site.record["processes"]}
    return agents["agent of agent-cluster-2"]


@pytest.fixture
def kubectl(site, kube_assets):
    def run(context, *arguments):
        config = f"--kubeconfig={site.directory / 'kubeconfig'}"
        return processes.output(kube_assets.kubectl, config, f"--context={context}", *arguments)

    return run


def borrow(kubectl, path, name):
    kubectl("agent-cluster-1", "apply", f"--filename={path}")
    reserved = ("--for=condition=Reserved", "--timeout=30s")
    kubectl("agent-cluster-1", "wait", f"resourcerequest/{name}", *reserved)


def test_up_prints_the_kubeconfigs_and_what_to_try_and_does_nothing_when_it_is_repeated(started):
    site, out = started
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
    code, out, err = site.run("up", "--no-liqo")
    assert (code, err) == (0, "")
    assert "They are running or starting already" in out
    assert site.record == before


def test_status_shows_all_parts_and_offers(site):
    code, out, err = site.run("status")
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
    assert "No reservations." in out


def test_request_is_walked_through_every_step(site):
    code, out, err = site.run("test")
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


def test_suggested_commands_work(site, kubectl):
    borrow(kubectl, site.directory / "request.yaml", "small")
    assert "agent-cluster-2-adv" in kubectl("broker-cluster", "get", "clusteradvertisements")
    kubectl("agent-cluster-1", "delete", "resourcerequest", "small")
    arguments = ("audit", "check", f"--store={site.record['store']}")
    audit = processes.kubelend(*arguments, temporary=site.directory.parent)
    assert processes.finished(audit)[0] == 0


def test_rejection_is_the_brokers_error(site, kubectl, tmp_path):
    """All that agent-cluster-2 has is taken, so that the request of the test does not fit."""
    whole = tmp_path / "whole.yaml"
    whole.write_text(
        "apiVersion: rear.fluidos.eu/v1alpha1\nkind: ResourceRequest\nmetadata: {name: whole}\n"
        "spec: {requestedCPU: 8950m, requestedMemory: 1Gi}\n"
    )
    borrow(kubectl, whole, "whole")
    code, _, err = site.run("test")
    kubectl("agent-cluster-1", "delete", "resourcerequest", "whole")
    assert code == 5
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_step_that_is_not_seen_fails_the_test(site, provider):
    os.kill(provider, signal.SIGSTOP)
    code, out, err = site.run("test", "--timeout=2s")
    os.kill(provider, signal.SIGCONT)
    assert code == 7
    assert re.fullmatch(
        r"error: ProviderInstruction \S+ of agent-cluster-2 was not Held within [\d.]+ s\n", err
    )
    assert "is Reserved" in out
    # What it asked for is given back all the same.
    idle = re.compile(r"^agent-cluster-2 +8950m .* 0 0 ", re.M)
    wait_until(lambda: idle.search(site.run("status")[1]) is not None)


def test_agent_that_died_is_reported(site, provider):
    os.kill(provider, signal.SIGKILL)
    code, out, err = site.run("status")
    assert code == 7
    assert re.search(r"^agent of agent-cluster-2 +NotReady ", out, re.M)
    assert err == "not ready: agent of agent-cluster-2: does not respond\n"


def test_down_cleans_up_after_a_killed_supervisor(site):
    os.kill(site.supervisor, signal.SIGKILL)
    wait_until(lambda: site.run("test")[0] == 3)
    code, _, err = site.run("status")
    assert (code, "not ready: supervisor: not running\n" in err) == (7, True)
    assert len(site.runs()) >= 6
    code, out, err = site.run("down")
    assert (code, err) == (0, "")
    assert out == f"Stopped, and deleted {site.directory}.\n"
    assert site.is_clean()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_up_that_is_interrupted_leaves_nothing_running(kube_assets, fresh, number):
    site = fresh
    up = site.start("up", "--no-liqo")
    assert up.stdout is not None
    for line in up.stdout:
        if "Start the clusters" in line:
            break
    assert len(site.runs()) >= 5
    up.send_signal(number)
    code, _, err = processes.finished(up, LONGEST)
    if number is signal.SIGINT:
        assert (code, err) == (130, "")
        assert site.is_clean()
    wait_until(lambda: not site.runs())
    assert site.run("down")[0] == 0
    assert site.is_clean()


@pytest.mark.parametrize("command", ["status", "test", "down"])
def test_without_clusters_each_command_says_so(tmp_path, command):
    code, out, err = Site(tmp_path / "none").run(command)
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
    code, out, err = Site(tmp_path / "clusters").run("up", "--no-liqo", *flags)
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
    """A `kind` that hands out existing clusters; the file of its calls."""
    path = tmp_path / "bin"
    path.mkdir()
    for name, cluster in zip(hosts.CLUSTER_NAMES, clusters(3), strict=True):
        (path / name).write_text(cluster.admin_kubeconfig.read_text())
    for program in ("kind", "docker"):
        (path / program).write_text(KIND.format(calls=tmp_path / "calls", sources=path))
        (path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{path}:{os.environ['PATH']}")
    return tmp_path / "calls"


def test_with_kind_all_runs_in_its_clusters_and_down_deletes_them(fake_kind, fresh):
    site = fresh
    code, out, err = site.run("up", "--kind")
    assert (code, err) == (0, ""), out
    code, out, _ = site.run("status")
    assert (code, "agent of agent-cluster-2" in out) == (0, True)
    assert site.run("down")[0] == 0
    assert site.is_clean()
    calls = fake_kind.read_text().split("\n")
    verbs = [line.split()[0] for line in calls if line]
    assert verbs == ["get", *["create"] * 3, *["delete"] * 3]
