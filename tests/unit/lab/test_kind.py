"""What would be said to `kind`: a program of that name on the PATH takes it down."""

import pytest

from kubelend.core.errors import InvalidSettings, Unavailable
from kubelend.lab import hosts
from kubelend.lab.state import LabDirectory

SCRIPT = """#!/bin/sh
echo "$*" >> {said}
case "$1 $2" in
"get clusters") cat {there} ;;
"create cluster") {create} ;;
esac
"""


def put(directory, name, text="#!/bin/sh\n"):
    path = directory / name
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def path(tmp_path, monkeypatch):
    """The only directory where programs are found, but for those that scripts need."""
    directory = tmp_path / "bin"
    directory.mkdir()
    put(directory, "cat", '#!/bin/sh\nexec /bin/cat "$@"\n')
    monkeypatch.setenv("PATH", str(directory))
    return directory


@pytest.fixture
def said(path, tmp_path):
    """All that `kind` was asked, a line each. It has the clusters that the file `there` names."""
    (tmp_path / "there").write_text("")
    put(path, "docker")
    return install(path, tmp_path)


def install(path, tmp_path, create=":"):
    said = tmp_path / "said"
    said.write_text("")
    put(path, "kind", SCRIPT.format(said=said, there=tmp_path / "there", create=create))
    return said


def lines(said):
    return said.read_text().splitlines()


def test_without_kind_one_line_says_so(path):
    with pytest.raises(InvalidSettings, match="kind not found on PATH; install it, or omit"):
        hosts.check_kind()


def test_without_containers_one_line_says_so(said, path):
    (path / "docker").unlink()
    with pytest.raises(InvalidSettings, match="kind requires docker, podman or nerdctl"):
        hosts.check_kind()


@pytest.mark.parametrize("program", hosts.CONTAINER_RUNTIMES)
def test_any_of_its_container_programs_will_do(said, path, program):
    (path / "docker").unlink()
    put(path, program)
    hosts.check_kind()


def test_name_that_it_has_already_is_refused(said, tmp_path):
    (tmp_path / "there").write_text("mine\nagent-cluster-1\n")
    with pytest.raises(InvalidSettings, match="kind already has a cluster agent-cluster-1"):
        hosts.check_kind_names(hosts.CLUSTER_NAMES)


def test_clusters_are_made_one_by_one_and_deleted_at_the_end(said, tmp_path):
    home, told = LabDirectory(tmp_path / "home"), list[tuple[str, ...]]()
    with hosts.run_kind_clusters(home, told.append) as found:
        assert list(found.kubeconfigs) == ["broker-cluster", "agent-cluster-1", "agent-cluster-2"]
        assert found.has_real_nodes
        assert told == [hosts.CLUSTER_NAMES]
    flags = [f"--name={name} --kubeconfig={path}" for name, path in found.kubeconfigs.items()]
    assert lines(said) == [
        "get clusters",
        *(f"create cluster {each} --wait=180s" for each in flags),
        *(f"delete cluster {each}" for each in flags),
    ]
    assert told == [hosts.CLUSTER_NAMES, ()]


def test_failure_is_told_in_its_words_and_what_was_made_is_deleted(said, path, tmp_path):
    said = install(path, tmp_path, create="echo one >&2; echo 'ERROR: no space left' >&2; exit 1")
    failed = pytest.raises(Unavailable, match="kind create cluster failed: ERROR: no space left")
    with failed, hosts.run_kind_clusters(LabDirectory(tmp_path / "home"), lambda _: None):
        pass
    assert [line.split()[0] for line in lines(said)] == ["get", "create", *["delete"] * 3]


def test_cluster_of_somebody_else_is_never_deleted(said, tmp_path):
    (tmp_path / "there").write_text("broker-cluster\n")
    home = LabDirectory(tmp_path / "home")
    with pytest.raises(InvalidSettings), hosts.run_kind_clusters(home, lambda _: None):
        pass
    assert lines(said) == ["get clusters"]
