"""The background lab: its directory, its processes, and the clusters that `kind` creates for it."""

import contextlib
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kubelend.core.errors import InvalidSettings, Unavailable
from kubelend.lab import background, hosts
from kubelend.lab.state import LabDirectory, LabState
from waiting import FACTOR

# -- directory


@pytest.fixture
def home(tmp_path):
    home = LabDirectory(tmp_path / "state" / "clusters")
    home.create()
    return home


def test_state_is_private_and_read_as_it_was_written(home):
    assert stat.S_IMODE(home.directory.stat().st_mode) == 0o700
    assert home.read_state() is None
    record = LabState(kind=("a",), clusters={"b": "/c"})
    home.write_state(record)
    assert home.read_state() == record
    (home.directory / "lab.json").write_text("{")
    with pytest.raises(InvalidSettings, match=r"lab\.json cannot be read"):
        home.read_state()


def test_directory_with_files_of_others_is_refused_and_stays(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(InvalidSettings, match="contains other files; use another directory"):
        LabDirectory(tmp_path).create()
    assert not background.stop_lab(LabDirectory(tmp_path))
    assert (tmp_path / "thesis.tex").exists()


def test_of_two_starts_only_one_gets_the_pid_file(home):
    home.write_pid(7)
    home.create()
    with pytest.raises(FileExistsError):
        home.write_pid(8)
    assert home.pid == 7


def test_nothing_exists_before_the_first_start(tmp_path):
    home = LabDirectory(tmp_path / "none")
    assert not home.exists()
    assert not home.is_running()
    assert not background.stop_lab(home)
    assert not home.directory.exists()


# -- processes

LEADER = """
import signal, subprocess
subprocess.Popen(["sleep", "60"])
{more}
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def start(home):
    """Starts the leader of a process group with one child, and writes the PID file."""
    started = []

    def start(more="", directory=home.directory):
        process = subprocess.Popen(
            [sys.executable, "-c", LEADER.format(more=more)],
            cwd=directory,
            start_new_session=True,
            stdout=subprocess.PIPE,
        )
        started.append(process)
        home.write_pid(process.pid)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_stop_kills_what_a_crashed_leader_has_left(home, start):
    leader = start()
    assert home.is_running()
    leader.kill()
    leader.wait()
    assert not home.is_running()
    [child] = home.processes()
    assert os.getpgid(child) == leader.pid
    assert background.stop_lab(home)
    assert not home.directory.exists()
    assert not Path(f"/proc/{child}/cwd").exists()


@pytest.mark.parametrize(
    "more, suspended, end",
    [
        ("", False, signal.SIGTERM),
        ("", True, signal.SIGTERM),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", False, signal.SIGKILL),
    ],
    ids=["running", "suspended", "stubborn"],
)
def test_leader_is_asked_first_and_then_killed(home, start, more, suspended, end):
    leader = start(more)
    if suspended:
        leader.send_signal(signal.SIGSTOP)
    assert background.stop_lab(home, timeout=0.1 / FACTOR if more else 60)
    assert leader.wait() == -end


def test_process_of_others_is_never_signalled(home, start, tmp_path):
    """After a crash, the number in the PID file may be that of another process."""
    other = start(directory=tmp_path)
    assert not home.is_running()
    background.stop_lab(home)
    assert other.poll() is None
    os.killpg(other.pid, 0)


# -- kind

SCRIPT = """#!/bin/sh
echo "$*" >> {calls}
case "$1 $2" in
"get clusters") cat {existing} ;;
"create cluster") {create} ;;
esac
"""


def put(directory, name, text="#!/bin/sh\n"):
    path = directory / name
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def path(tmp_path, monkeypatch):
    """The only directory where programs are found, except for those that scripts need."""
    directory = tmp_path / "bin"
    directory.mkdir()
    put(directory, "cat", '#!/bin/sh\nexec /bin/cat "$@"\n')
    monkeypatch.setenv("PATH", str(directory))
    return directory


@pytest.fixture
def install_kind(path, tmp_path):
    """Installs a `kind` that has the clusters in `existing`; returns its calls, one per line."""

    def install(create=":", existing=""):
        calls = tmp_path / "calls"
        calls.write_text("")
        (tmp_path / "existing").write_text(existing)
        put(path, "docker")
        text = SCRIPT.format(calls=calls, existing=tmp_path / "existing", create=create)
        put(path, "kind", text)
        return lambda: calls.read_text().splitlines()

    return install


@pytest.fixture
def kind(install_kind):
    return install_kind()


def test_missing_kind_is_one_line(path):
    with pytest.raises(InvalidSettings, match="kind not found on PATH; install it, or omit"):
        background.check_prerequisites(uses_kind=True)


@pytest.mark.parametrize("program", hosts.CONTAINER_RUNTIMES)
def test_any_container_runtime_of_kind_is_enough(kind, path, program):
    (path / "docker").unlink()
    with pytest.raises(InvalidSettings, match="kind requires docker, podman or nerdctl"):
        background.check_prerequisites(uses_kind=True)
    put(path, program)
    background.check_prerequisites(uses_kind=True)


def test_kind_clusters_are_created_one_by_one_and_deleted_at_exit(kind, home):
    recorded = list[tuple[str, ...]]()
    with hosts.run_kind_clusters(home, recorded.append) as found:
        assert list(found.kubeconfigs) == ["broker-cluster", "agent-cluster-1", "agent-cluster-2"]
        assert found.has_real_nodes
        assert recorded == [hosts.CLUSTER_NAMES]
    flags = [f"--name={name} --kubeconfig={path}" for name, path in found.kubeconfigs.items()]
    assert kind() == [
        "get clusters",
        *(f"create cluster {each} --wait={180 * FACTOR:g}s" for each in flags),
        *(f"delete cluster {each}" for each in flags),
    ]
    assert recorded == [hosts.CLUSTER_NAMES, ()]


def test_failure_of_kind_is_its_last_line_and_created_clusters_are_deleted(install_kind, home):
    calls = install_kind("echo one >&2; echo 'ERROR: no space left' >&2; exit 1")
    failed = pytest.raises(Unavailable, match="kind create cluster failed: ERROR: no space left")
    with failed, hosts.run_kind_clusters(home, lambda _: None):
        pass
    assert [line.split()[0] for line in calls()] == ["get", "create", *["delete"] * 3]


def test_kind_cluster_of_others_is_an_error_and_never_deleted(install_kind, home):
    calls = install_kind(existing="mine\nagent-cluster-1\n")
    failed = pytest.raises(InvalidSettings, match="kind already has a cluster agent-cluster-1")
    with failed, hosts.run_kind_clusters(home, lambda _: None):
        pass
    assert calls() == ["get clusters"]


def test_stop_deletes_the_kind_clusters_of_a_crashed_lab(kind, home):
    home.write_pid(1)
    home.write_state(LabState(kind=("agent-cluster-1",)))
    assert background.stop_lab(home)
    [call] = kind()
    assert call.startswith("delete cluster --name=agent-cluster-1 ")
