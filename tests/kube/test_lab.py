"""The clusters that all other tests here run on are real ones, and apart from each other."""

import signal

import msgspec
import pytest

import kube_fixtures
import kube_objects
import processes
from kubelend.core.errors import InvalidSettings, Unavailable, UnexpectedResponse
from kubelend.envtest import assets, servers

pytestmark = pytest.mark.timeout(120)


def names(cluster):
    found = msgspec.json.decode(cluster.call("GET", "/api/v1/namespaces"))
    return {each["metadata"]["name"] for each in found["items"]}


def make_program(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def pair(lab):
    found = lab.start("one", "other")
    yield found
    for cluster in found:
        cluster.kill()


def test_clusters_on_one_store_are_apart(pair):
    one, other = pair
    kube_objects.create_namespace(one, "only-here")
    assert "only-here" in names(one)
    assert "only-here" not in names(other)
    # Nor does anybody from one get into the other.
    stranger = one.admin_kubeconfig.read_text().replace(one.url, other.url)
    stolen = one.directory / "stolen.kubeconfig"
    stolen.write_text(stranger)
    with pytest.raises(UnexpectedResponse, match="certificate signed by unknown authority"):
        one.kubectl("get", "namespaces", kubeconfig=stolen)


def test_restart_keeps_the_data_and_the_address(pair):
    cluster, _ = pair
    kube_objects.create_namespace(cluster, "kept")
    before = cluster.pid, cluster.url
    cluster.restart()
    assert "kept" in names(cluster)
    assert cluster.pid != before[0]
    assert cluster.url == before[1]


def test_server_that_did_not_start_fails_who_asked_and_is_started_for_the_next(
    kube_assets, tmp_path
):
    etcd = make_program(
        tmp_path / "etcd", f'[ -e {tmp_path}/repaired ] || exit 1; exec {kube_assets.etcd} "$@"'
    )
    servers = kube_fixtures.Servers(msgspec.structs.replace(kube_assets, etcd=etcd))
    with pytest.raises(Unavailable, match="did not start"):
        servers.kube()
    (tmp_path / "repaired").touch()
    try:
        assert "default" in names(servers.kube())
    finally:
        servers.stop()


def test_nothing_is_left_of_a_lab(kube_assets, tmp_path):
    def begin_and_be_interrupted():
        with servers.run_api_servers(kube_assets, tmp_path / "lab") as lab:
            [cluster] = lab.start("short")
            cluster.pause()
            assert len(processes.naming(lab.directory)) == 2
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        begin_and_be_interrupted()
    assert processes.naming(tmp_path) == []


def test_server_that_cannot_start_says_why(kube_assets, tmp_path):
    program = make_program(tmp_path / "kube-apiserver", "seq 10 >&2; echo no disk left >&2; exit 1")
    broken = msgspec.structs.replace(kube_assets, kube_apiserver=program)
    expected = r"^the API server of broken did not start; 7\n8\n9\n10\nno disk left$"
    with (
        servers.run_api_servers(broken, tmp_path / "lab") as lab,
        pytest.raises(Unavailable, match=expected),
    ):
        lab.start("broken")
    assert processes.naming(tmp_path) == []


def test_missing_programs_are_one_clear_line(monkeypatch, tmp_path):
    monkeypatch.setenv(assets.ASSETS_VARIABLE, str(tmp_path))
    line = "kube-apiserver, etcd and kubectl not found: run make kube-assets, or set KUBEBUILDER_ASSETS"
    with pytest.raises(InvalidSettings) as raised:
        assets.find_assets()
    assert str(raised.value) == line


def test_newest_programs_of_the_cache_are_taken(monkeypatch, tmp_path):
    monkeypatch.delenv(assets.ASSETS_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for version, complete in [("1.9.1", True), ("1.36.3", True), ("1.40.0", False)]:
        directory = assets.asset_cache() / version
        directory.mkdir(parents=True)
        for program in assets.PROGRAMS if complete else assets.PROGRAMS[:2]:
            make_program(directory / program, f"echo {program} v{version}")
    assert assets.find_assets().version == (1, 36, 3)
