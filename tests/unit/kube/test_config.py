"""Client configuration: kubeconfigs, merged as by kubectl, service accounts and proxies."""

import base64
import os
from pathlib import Path

import pytest
import yaml

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
    pair = {"client-certificate-data": encoded("certificate"), "client-key-data": encoded("key")}
    authority = {"certificate-authority-data": encoded("ca")}
    found = read(tmp_path, cluster=authority, user=pair | {"token": "token"})
    assert found.authorities == DataOrFile(b"ca")
    assert (found.certificate, found.key) == (DataOrFile(b"certificate"), DataOrFile(b"key"))
    assert found.token == DataOrFile(b"token")


def test_files_are_relative_to_the_kubeconfig(tmp_path):
    (tmp_path / "ca.crt").write_text("ca")
    pair = {"client-certificate": "me.crt", "client-key": "/elsewhere/me.key"}
    user = pair | {"tokenFile": "../token"}
    found = read(tmp_path, cluster={"certificate-authority": "ca.crt"}, user=user)
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
    assert found.token == DataOrFile(b"t", Path("/token"))
    assert found.token.read() == b"t"  # the file is missing, as client-go does


def test_base64_may_have_line_breaks(tmp_path):
    wrapped = "".join(f"{encoded('ca' * 60)[at : at + 76]}\n" for at in range(0, 160, 76))
    found = read(tmp_path, cluster={"certificate-authority-data": wrapped})
    assert found.authorities == DataOrFile(b"ca" * 60)


def test_credentials_are_not_sent_without_tls(tmp_path):
    plugin = {"command": "login", "apiVersion": V1}
    pair = {"client-certificate-data": encoded("a"), "client-key-data": encoded("b")}
    user = pair | {"token": "hunter2", "exec": plugin, "as": "jane"}
    found = read(tmp_path, cluster={"server": "http://127.0.0.1:8001"}, user=user)
    assert (found.auth_method, found.impersonation) == ("anonymously", ())


def test_other_settings_of_cluster_and_user(tmp_path):
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


def test_plugin_gets_the_cluster_information(tmp_path):
    extension = {"name": "client.authentication.k8s.io/exec", "extension": {"a": "b"}}
    env = [{"name": "A", "value": "1"}]
    plugin = {"command": "login", "apiVersion": V1, "provideClusterInfo": True, "env": env}
    cluster = {"certificate-authority-data": encoded("ca"), "extensions": [extension]}
    found = read(tmp_path, cluster=cluster, user={"exec": plugin})
    assert found.plugin.variables == {"A": "1"}
    assert found.plugin.cluster == {
        "server": "https://here",
        "certificate-authority-data": encoded("ca"),
        "config": {"a": "b"},
    }


OLD = "client.authentication.k8s.io/v1alpha1"
INTERACTIVE = {"command": "x", "apiVersion": V1, "interactiveMode": "Always"}
CONTRADICTION = {"insecure-skip-tls-verify": True, "certificate-authority-data": encoded("x")}


@pytest.mark.parametrize(
    "cluster, user, message",
    [
        ({"server": "host:6443"}, {}, "server is not a URL; use https://host:port"),
        ({"server": ""}, {}, "server is not a URL"),
        ({"proxy-url": "socks5://p"}, {}, "proxy-url must be a URL with scheme http or https"),
        ({"proxy-url": "invalid{{}}"}, {}, "proxy-url must be a URL with scheme http or https"),
        ({"proxy-url": "http://[p"}, {}, "proxy-url must be a URL with scheme http or https"),
        ({"certificate-authority-data": "?"}, {}, "invalid base64 in a -data field; correct it"),
        (CONTRADICTION, {}, "certificate-authority are both set; remove one"),
        ({"certificate-authority": "no.crt"}, {}, "no.crt is missing; correct certificate-auth"),
        ({}, {"auth-provider": {"name": "gcp"}}, "auth-provider is not supported"),
        ({}, {"username": "u", "password": "hunter2"}, "passwords are not supported"),
        ({}, {"client-key-data": encoded("hunter2")}, "certificate and key must both be set"),
        (
            {},
            {"exec": {"command": "x", "apiVersion": OLD}},
            f"apiVersion '{OLD}' is not supported; use",
        ),
        (
            {},
            {"exec": INTERACTIVE},
            "interactiveMode Always is not supported without a terminal; set",
        ),
    ],
)
def test_mistake_is_reported_in_one_line(cluster, user, message, tmp_path):
    with pytest.raises(InvalidSettings) as caught:
        read(tmp_path, cluster=cluster, user=user)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_nothing_secret_is_printed(tmp_path):
    secret = encoded("hunter2")
    user = {"token": "hunter2", "client-certificate-data": secret, "client-key-data": secret}
    env = [{"name": "A", "value": "hunter2"}]
    plugin = {"command": "login", "apiVersion": V1, "args": ["--password=hunter2"], "env": env}
    proxy = {"proxy-url": "http://u:hunter2@proxy"}
    found = read(tmp_path, cluster=proxy, user=user | {"exec": plugin})
    assert repr(found) == "KubeConfig('https://here', by login)"
    assert "hunter2" not in f"{found!r} {found.token!r} {found.plugin!r} {found.key!r}"


@pytest.fixture
def account(tmp_path):
    directory = tmp_path / "account"
    directory.mkdir()
    for name, text in {"token": "t", "ca.crt": "ca", "namespace": "lending\n"}.items():
        (directory / name).write_text(text)
    return directory


def test_pod_uses_its_service_account(account):
    environment = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBERNETES_SERVICE_PORT": "6443"}
    found = config.in_cluster_config(account, environment)
    assert (found.server, found.namespace) == ("https://10.0.0.1:6443", "lending")
    assert found.token == DataOrFile(path=account / "token")
    assert found.authorities == DataOrFile(path=account / "ca.crt")
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
    """A kubeconfig at each default path, in a pod."""
    for place in ("named", "listed", ".kube/config"):
        kubeconfigs.write(tmp_path / place, name=place.removesuffix("/config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "listed"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    return tmp_path


def test_most_explicit_configuration_is_used(everywhere, account, monkeypatch):
    def server(*named):
        return config.load_config(*named, service_account=account).server

    assert server(str(everywhere / "named")) == "https://named"
    assert server() == "https://listed"
    monkeypatch.delenv("KUBECONFIG")
    assert server() == "https://10.0.0.1:443"
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    assert server() == "https://.kube"


# -- kubeconfig files


@pytest.mark.parametrize(
    "named, listed, expected",
    [
        pytest.param("mine", "other", ["mine"], id="named file before the environment"),
        pytest.param("", os.pathsep.join(("a", "", "b")), ["a", "b"], id="several in it"),
        pytest.param("", "", ["/home/me/.kube/config"], id="empty"),
        pytest.param("", None, ["/home/me/.kube/config"], id="unset"),
    ],
)
def test_most_explicit_files_are_read(monkeypatch, named, listed, expected):
    monkeypatch.setenv("HOME", "/home/me")
    environment = {} if listed is None else {"KUBECONFIG": listed}
    assert [str(path) for path in config.kubeconfig_files(named, environment)] == expected


def test_first_file_with_an_entry_wins(tmp_path):
    first = kubeconfigs.write(tmp_path / "a", user={"token": "first"}, current="")
    second = kubeconfigs.write(tmp_path / "b", user={"token": "second"})
    choice = config.select_context([tmp_path / "missing", first, second])
    assert (choice.name, choice.user.token) == ("here", "first")


def test_parts_may_be_in_different_files(tmp_path):
    clusters = kubeconfigs.write(tmp_path / "a", name="far", cluster={"server": "https://far:1"})
    users = kubeconfigs.write(tmp_path / "b", name="me", user={"token": "t"})
    contexts = kubeconfigs.write(tmp_path / "c", name="x", context={"cluster": "far", "user": "me"})
    choice = config.select_context([clusters, users, contexts], "x")
    assert (choice.cluster_file, choice.user_file) == (clusters, users)


def test_parts_may_be_null_as_kubectl_writes_them(tmp_path):
    path = tmp_path / "a"
    path.write_text("clusters: null\nusers: null\ncontexts: null\ncurrent-context: ''\n")
    with pytest.raises(InvalidSettings, match="has no current-context"):
        config.select_context([path])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"current-context": "x"}, "has no context 'x'; use one of: here"),
        ({"users": []}, "has no user 'here'; use one of: none"),
        ({"clusters": [{"name": "y", "cluster": {}}]}, "has no cluster 'here'; use one of: y"),
        (
            {"users": [{"name": "here", "user": {"token": 12}}]},
            "got `int` - at `$.users[0].user.token`",
        ),
        ({"clusters": "none"}, "Expected `array | null`, got `str`"),
    ],
    ids=["context", "user", "cluster", "number for a token", "no list"],
)
def test_invalid_kubeconfig_is_reported_in_one_line(change, message, tmp_path):
    path = kubeconfigs.write(tmp_path / "config")
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change))
    with pytest.raises(InvalidSettings) as caught:
        config.select_context([path])
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_broken_yaml_is_reported_without_its_content(tmp_path):
    path = tmp_path / "config"
    path.write_text("users:\n- name: me\n  user: {token: SECRET: [}\n")
    reported = pytest.raises(
        InvalidSettings, match=r"config is not valid YAML \(line 3\); correct it"
    )
    with reported as caught:
        config.select_context([path])
    assert "SECRET" not in str(caught.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidSettings, match="gone is missing; use --kubeconfig"):
        config.select_context([tmp_path / "gone"])
    with pytest.raises(InvalidSettings, match=r"none of .*a:.*b exists"):
        config.select_context([tmp_path / "a", tmp_path / "b"])


def test_directory_is_no_file(tmp_path):
    with pytest.raises(InvalidSettings, match="cannot be read: Is a directory"):
        config.select_context([tmp_path])


# -- proxies

PROXY = {"HTTPS_PROXY": "http://proxy:3128"}


@pytest.mark.parametrize(
    "url, environment, expected",
    [
        pytest.param("https://api:6443", {}, "", id="none"),
        pytest.param("https://api:6443", PROXY, "http://proxy:3128", id="one"),
        pytest.param("https://api:6443", {"https_proxy": "p:1"}, "http://p:1", id="lower case"),
        pytest.param("http://api", PROXY, "", id="for another scheme"),
        pytest.param("https://127.0.0.1:6443", PROXY, "", id="loopback"),
        pytest.param("https://localhost:6443", PROXY, "", id="localhost"),
    ],
)
def test_proxy_of_the_environment(url, environment, expected):
    assert config.proxy_for(url, environment) == expected


@pytest.mark.parametrize(
    "host, rules, is_excluded",
    [
        pytest.param("api:6443", "*", True, id="all"),
        pytest.param("10.96.0.1", "x, 10.96.0.0/12", True, id="network"),
        pytest.param("10.1.0.1", "10.96.0.0/12", False, id="other network"),
        pytest.param("a.example.org", "example.org", True, id="subdomain"),
        pytest.param("a.example.org", ".example.org", True, id="dot"),
        pytest.param("example.org", ".example.org", False, id="dot means subdomains only"),
        pytest.param("badexample.org", "example.org", False, id="same suffix"),
    ],
)
def test_hosts_without_a_proxy(host, rules, is_excluded):
    proxy = config.proxy_for(f"https://{host}", PROXY | {"NO_PROXY": rules})
    assert proxy == ("" if is_excluded else "http://proxy:3128")
