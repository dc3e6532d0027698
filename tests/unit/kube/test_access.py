"""Where an API server is and who calls it."""

import base64
from pathlib import Path

import pytest

import kubeconfigs
from kubelend.core.errors import InvalidSettings
from kubelend.kube import config
from kubelend.kube.config import DataOrFile

V1 = "client.authentication.k8s.io/v1"


def encoded(text):
    return base64.b64encode(text.encode()).decode()


def read(tmp_path, *, cluster=None, user=None):
    path = kubeconfigs.write(tmp_path / "config", cluster=cluster, user=user)
    return config.config_from_kubeconfig(path)


def test_secrets_may_be_in_the_file_itself(tmp_path):
    found = read(
        tmp_path,
        cluster={"certificate-authority-data": encoded("ca")},
        user={
            "client-certificate-data": encoded("certificate"),
            "client-key-data": encoded("key"),
            "token": "token",
        },
    )
    assert found.authorities == DataOrFile(b"ca")
    assert (found.certificate, found.key) == (DataOrFile(b"certificate"), DataOrFile(b"key"))
    assert found.token == DataOrFile(b"token")


def test_files_are_looked_for_beside_the_kubeconfig(tmp_path):
    (tmp_path / "ca.crt").write_text("ca")
    found = read(
        tmp_path,
        cluster={"certificate-authority": "ca.crt"},
        user={
            "client-certificate": "me.crt",
            "client-key": "/elsewhere/me.key",
            "tokenFile": "../token",
        },
    )
    assert found.authorities == DataOrFile(path=tmp_path / "ca.crt")
    assert found.certificate == DataOrFile(path=tmp_path / "me.crt")
    assert found.key == DataOrFile(path=Path("/elsewhere/me.key"))
    assert found.token == DataOrFile(path=tmp_path / "../token")


def test_data_counts_before_a_file_and_a_token_file_before_a_token(tmp_path):
    found = read(
        tmp_path,
        cluster={"certificate-authority": "x", "certificate-authority-data": encoded("ca")},
        user={"token": "t", "tokenFile": "/token"},
    )
    assert found.authorities == DataOrFile(b"ca")
    assert found.token == DataOrFile(path=Path("/token"))


def test_other_settings_are_taken_over(tmp_path):
    found = read(
        tmp_path,
        cluster={
            "server": "https://host:6443/k8s/clusters/c-1/",
            "tls-server-name": "kubernetes",
            "insecure-skip-tls-verify": True,
            "proxy-url": "http://proxy:3128",
        },
        user={"as": "jane", "as-groups": ["a", "b"], "as-user-extra": {"scopes": ["x"]}},
    )
    assert found.server == "https://host:6443/k8s/clusters/c-1"
    assert (found.tls_server_name, found.insecure) == ("kubernetes", True)
    assert (found.proxy, found.namespace) == ("http://proxy:3128", "default")
    assert found.impersonation == (
        ("Impersonate-User", "jane"),
        ("Impersonate-Group", "a"),
        ("Impersonate-Group", "b"),
        ("Impersonate-Extra-scopes", "x"),
    )


def test_plugin_is_found_beside_the_kubeconfig_or_by_its_name(tmp_path):
    near = read(tmp_path, user={"exec": {"command": "./login", "apiVersion": V1}})
    assert near.plugin.command == str(tmp_path / "login")
    known = read(tmp_path, user={"exec": {"command": "login", "apiVersion": V1, "args": None}})
    assert known.plugin.command == "login"


def test_plugin_may_hear_of_the_cluster(tmp_path):
    found = read(
        tmp_path,
        cluster={
            "certificate-authority-data": encoded("ca"),
            "extensions": [{"name": "client.authentication.k8s.io/exec", "extension": {"a": "b"}}],
        },
        user={
            "exec": {
                "command": "login",
                "apiVersion": V1,
                "env": [{"name": "A", "value": "1"}],
                "provideClusterInfo": True,
            }
        },
    )
    assert found.plugin.variables == {"A": "1"}
    assert found.plugin.cluster == {
        "server": "https://here",
        "certificate-authority-data": encoded("ca"),
        "config": {"a": "b"},
    }


@pytest.mark.parametrize(
    "cluster, user, said",
    [
        ({"server": "host:6443"}, {}, "server is not a URL; use https://host:port"),
        ({"server": ""}, {}, "server is not a URL"),
        ({"proxy-url": "socks5://p"}, {}, "proxy-url must have scheme http or https"),
        (
            {"insecure-skip-tls-verify": True, "certificate-authority-data": encoded("x")},
            {},
            "certificate-authority are both set; remove one",
        ),
        (
            {"certificate-authority": "no.crt"},
            {},
            "no.crt is missing; correct certificate-authority",
        ),
        ({}, {"auth-provider": {"name": "gcp"}}, "auth-provider is not supported"),
        ({}, {"username": "u", "password": "hunter2"}, "passwords are not supported"),
        ({}, {"client-key-data": encoded("hunter2")}, "certificate and key must both be set"),
        (
            {},
            {"exec": {"command": "x", "apiVersion": "client.authentication.k8s.io/v1alpha1"}},
            "exec: apiVersion 'client.authentication.k8s.io/v1alpha1' is not supported; use",
        ),
        (
            {},
            {"exec": {"command": "x", "apiVersion": V1, "interactiveMode": "Always"}},
            "exec: interactiveMode Always is not supported without a terminal; set it to Never",
        ),
    ],
)
def test_mistake_is_reported_in_one_line(cluster, user, said, tmp_path):
    with pytest.raises(InvalidSettings) as caught:
        read(tmp_path, cluster=cluster, user=user)
    assert said in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_nothing_secret_is_printed(tmp_path):
    found = read(
        tmp_path,
        cluster={"proxy-url": "http://u:hunter2@proxy"},
        user={
            "token": "hunter2",
            "client-certificate-data": encoded("hunter2"),
            "client-key-data": encoded("hunter2"),
            "exec": {
                "command": "login",
                "apiVersion": V1,
                "args": ["--password=hunter2"],
                "env": [{"name": "A", "value": "hunter2"}],
            },
        },
    )
    assert repr(found) == "KubeConfig('https://here', by login)"
    assert "hunter2" not in f"{found!r} {found.token!r} {found.plugin!r} {found.key!r}"


@pytest.fixture
def account(tmp_path):
    directory = tmp_path / "account"
    directory.mkdir()
    for name, text in {"token": "t", "ca.crt": "ca", "namespace": "lending\n"}.items():
        (directory / name).write_text(text)
    return directory


def test_pod_finds_its_own_cluster(account):
    environment = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "6443"}
    found = config.in_cluster_config(account, environment)
    assert (found.server, found.namespace) == ("https://10.0.0.1:6443", "lending")
    assert found.token == DataOrFile(path=account / "token")
    assert found.authorities == DataOrFile(path=account / "ca.crt")


def test_pod_of_ipv6_finds_its_own_cluster(account):
    found = config.in_cluster_config(account, {"KUBERNETES_SERVICE_HOST": "fd00::1"})
    assert found.server == "https://[fd00::1]:443"


def test_pod_without_an_account_is_an_error(account):
    (account / "token").unlink()
    with pytest.raises(InvalidSettings, match="automountServiceAccountToken"):
        config.in_cluster_config(account, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    with pytest.raises(InvalidSettings, match="not running in a pod"):
        config.in_cluster_config(account, {})


@pytest.fixture
def everywhere(tmp_path, monkeypatch):
    """A kubeconfig in each place where one is looked for, in a pod of a cluster."""
    for place in ("named", "listed", ".kube/config"):
        kubeconfigs.write(tmp_path / place, name=place.removesuffix("/config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "listed"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    return tmp_path


def test_most_explicit_access_is_taken(everywhere, account, monkeypatch):
    assert (
        config.load_config(str(everywhere / "named"), service_account=account).server
        == "https://named"
    )
    assert config.load_config(service_account=account).server == "https://listed"
    monkeypatch.delenv("KUBECONFIG")
    assert config.load_config(service_account=account).server == "https://10.0.0.1:443"
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    assert config.load_config(service_account=account).server == "https://.kube"
