"""The clusters that all other tests here run on are real ones, and apart from each other."""

import signal

import msgspec
import pytest

import kube_fixtures
import processes
from kubelend.core.errors import InvalidSettings, Unavailable, UnexpectedAnswer
from kubelend.envtest import assets, servers

pytestmark = pytest.mark.timeout(120)


def names(cluster):
    found = msgspec.json.decode(cluster.call("GET", "/api/v1/namespaces"))
    return {each["metadata"]["name"] for each in found["items"]}


def make_namespace(cluster, name):
    cluster.kubectl("create", "namespace", name)


def make_program(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_versions_are_stated(kube, kube_assets, record_property):
    version = msgspec.json.decode(kube.call("GET", "/version"))
    assert version["gitVersion"] == f"v{kube_assets.version}"
    assert kube_assets.version >= (1, 20)
    assert kube_assets.etcd_version >= (3, 4)
    record_property("kubernetes", str(kube_assets.version))
    record_property("etcd", str(kube_assets.etcd_version))


def test_unknown_user_is_refused_by_the_roles(kube):
    with pytest.raises(UnexpectedAnswer, match='User "mallory" cannot list resource "namespaces"'):
        kube.kubectl("get", "namespaces", kubeconfig=kube.kubeconfig_for("mallory"))


def test_user_may_what_a_role_of_his_group_allows(kube, namespace):
    kube.kubectl("create", "clusterrole", "readers", "--verb=list", "--resource=configmaps")
    binding = ("clusterrolebinding", "readers", "--clusterrole=readers", "--group=readers")
    kube.kubectl("create", *binding)
    reader = kube.kubeconfig_for("alice", ["readers"])
    kube.kubectl("get", "configmaps", f"--namespace={namespace}", kubeconfig=reader)
    with pytest.raises(UnexpectedAnswer, match='User "alice" cannot create resource "configmaps"'):
        kube.kubectl("create", "configmap", "notes", kubeconfig=reader)


def test_service_account_is_known_by_its_token(kube, namespace):
    kube.kubectl("create", "serviceaccount", "robot", f"--namespace={namespace}")
    config = kube.kubeconfig_of_account("robot", namespace)
    with pytest.raises(UnexpectedAnswer, match=f'User "system:serviceaccount:{namespace}:robot"'):
        kube.kubectl("get", "nodes", kubeconfig=config)


def test_each_test_has_a_namespace(kube, namespace):
    assert namespace.startswith("each-test-has-a-namespace-")
    assert namespace in names(kube)


async def test_client_is_connected_as_administrator(kube_client, kube_assets):
    version = msgspec.json.decode(await kube_client.raw("GET", "/version"))
    assert version["gitVersion"] == f"v{kube_assets.version}"
    assert b'"items"' in await kube_client.raw("GET", "/api/v1/secrets")


def test_clusters_on_one_store_are_apart(clusters):
    one, other = clusters(2)
    make_namespace(one, "only-here")
    assert "only-here" in names(one)
    assert "only-here" not in names(other)
    # Nor does anybody from one get into the other.
    stranger = one.admin_kubeconfig.read_text().replace(one.url, other.url)
    stolen = one.directory / "stolen.kubeconfig"
    stolen.write_text(stranger)
    with pytest.raises(UnexpectedAnswer, match="certificate signed by unknown authority"):
        one.kubectl("get", "namespaces", kubeconfig=stolen)


def test_restart_keeps_the_data_and_the_address(clusters):
    [cluster] = clusters()
    make_namespace(cluster, "kept")
    before = cluster.pid, cluster.url
    cluster.restart()
    assert "kept" in names(cluster)
    assert cluster.pid != before[0]
    assert cluster.url == before[1]


def test_killed_server_comes_back_with_its_data(clusters):
    [cluster] = clusters()
    make_namespace(cluster, "kept")
    cluster.kill()
    with pytest.raises(UnexpectedAnswer):
        names(cluster)
    cluster.start()
    cluster.wait_until_ready()
    assert "kept" in names(cluster)


def test_paused_store_holds_up_writes_until_it_goes_on(kube, lab, namespace):
    order = ("create", "configmap", "notes", f"--namespace={namespace}")
    lab.etcd.pause()
    try:
        with pytest.raises(UnexpectedAnswer, match=r"(?i)timeout|timed out|deadline"):
            kube.kubectl(*order, "--request-timeout=1s")
    finally:
        lab.etcd.resume()
    # The write that nobody waited for may have happened.
    kube.kubectl("delete", "--ignore-not-found", *order[1:])
    kube.kubectl(*order)


def test_server_that_did_not_start_fails_who_asked_and_is_started_for_the_next(
    kube_assets, tmp_path
):
    etcd = make_program(
        tmp_path / "etcd", f'[ -e {tmp_path}/mended ] || exit 1; exec {kube_assets.etcd} "$@"'
    )
    servers = kube_fixtures.Servers(msgspec.structs.replace(kube_assets, etcd=etcd))
    with pytest.raises(Unavailable, match="did not start"):
        servers.kube()
    (tmp_path / "mended").touch()
    try:
        assert "default" in names(servers.kube())
    finally:
        servers.stop()


def test_compacted_store_forgets_what_was(kube, kube_assets, lab):
    if kube_assets.etcd_version < (3, 5):
        pytest.skip("etcd before 3.5 cannot be told to")
    # A version of now: the server itself has the store forget what is older than five minutes.
    version = msgspec.json.decode(kube.call("GET", "/api/v1/namespaces"))["metadata"]
    then = "/api/v1/namespaces?resourceVersionMatch=Exact&resourceVersion="
    then += version["resourceVersion"]
    make_namespace(kube, "since-then")
    kube.restart()
    kube.call("GET", then)
    kube_fixtures.compact(lab.etcd)
    with pytest.raises(UnexpectedAnswer, match=": 410 "):
        kube.call("GET", then)


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
    crooked = msgspec.structs.replace(kube_assets, kube_apiserver=program)
    said = r"^the API server of crooked did not start; 7\n8\n9\n10\nno disk left$"
    with (
        servers.run_api_servers(crooked, tmp_path / "lab") as lab,
        pytest.raises(Unavailable, match=said),
    ):
        lab.start("crooked")
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
