"""Kubeconfig files, read and merged as kubectl does."""

import os

import pytest
import yaml

import kubeconfigs
from kubelend.core.errors import InvalidSettings
from kubelend.kube import kubeconfig


def test_named_file_counts_before_the_environment():
    found = kubeconfig.kubeconfig_files("mine", {"KUBECONFIG": "other"})
    assert [str(path) for path in found] == ["mine"]


def test_environment_may_name_several_files():
    listed = os.pathsep.join(("a", "", "b"))
    assert [path.name for path in kubeconfig.kubeconfig_files("", {"KUBECONFIG": listed})] == [
        "a",
        "b",
    ]


@pytest.mark.parametrize("environment", [{}, {"KUBECONFIG": ""}], ids=["unset", "empty"])
def test_every_home_has_one(environment, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kubeconfig.kubeconfig_files("", environment) == [tmp_path / ".kube" / "config"]


def test_current_context_is_chosen(tmp_path):
    path = kubeconfigs.write(tmp_path / "a", user={"token": "t"}, context={"namespace": "n"})
    choice = kubeconfig.select_context([path])
    assert (choice.name, choice.namespace) == ("here", "n")
    assert (choice.cluster.server, choice.user.token) == ("https://here", "t")


def test_first_file_that_says_something_counts(tmp_path):
    first = kubeconfigs.write(tmp_path / "a", user={"token": "first"}, current="")
    second = kubeconfigs.write(tmp_path / "b", user={"token": "second"})
    choice = kubeconfig.select_context([tmp_path / "missing", first, second])
    assert (choice.name, choice.user.token) == ("here", "first")


def test_parts_may_be_in_different_files(tmp_path):
    clusters = kubeconfigs.write(tmp_path / "a", name="far", cluster={"server": "https://far:1"})
    users = kubeconfigs.write(tmp_path / "b", name="me", user={"token": "t"})
    contexts = kubeconfigs.write(tmp_path / "c", name="x", context={"cluster": "far", "user": "me"})
    choice = kubeconfig.select_context([clusters, users, contexts], "x")
    assert (choice.cluster_file, choice.user_file) == (clusters, users)


def test_parts_may_be_null_as_kubectl_writes_them(tmp_path):
    path = tmp_path / "a"
    path.write_text("clusters: null\nusers: null\ncontexts: null\ncurrent-context: ''\n")
    with pytest.raises(InvalidSettings, match="has no current-context"):
        kubeconfig.select_context([path])


def changed(path, change):
    kubeconfigs.write(path)
    body = yaml.safe_load(path.read_text())
    change(body)
    path.write_text(yaml.safe_dump(body))


@pytest.mark.parametrize(
    "change, said",
    [
        (
            lambda body: body.update({"current-context": "x"}),
            "has no context 'x'; use one of: here",
        ),
        (lambda body: body["users"].clear(), "has no user 'here'; use one of: none"),
        (
            lambda body: body["clusters"][0].update(name="y"),
            "has no cluster 'here'; use one of: y",
        ),
        (
            lambda body: body["users"][0]["user"].update({"token": 12}),
            "Expected `str`, got `int` - at `$.users[0].user.token`",
        ),
        (
            lambda body: body["users"][0]["user"].update({"client-key-data": "%%"}),
            "Invalid base64 encoded string",
        ),
        (lambda body: body.update(clusters="none"), "Expected `array | null`, got `str`"),
    ],
    ids=["context", "user", "cluster", "number for a token", "no base64", "no list"],
)
def test_mistake_is_reported_in_one_line_with_its_file(change, said, tmp_path):
    path = tmp_path / "config"
    changed(path, change)
    with pytest.raises(InvalidSettings) as caught:
        kubeconfig.select_context([path])
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_broken_yaml_is_reported_without_what_is_in_it(tmp_path):
    path = tmp_path / "config"
    path.write_text("users:\n- name: me\n  user: {token: SECRET: [}\n")
    with pytest.raises(
        InvalidSettings, match=r"config is not valid YAML \(line 3\); correct it"
    ) as caught:
        kubeconfig.select_context([path])
    assert "SECRET" not in str(caught.value)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidSettings, match="gone is missing; use --kubeconfig"):
        kubeconfig.select_context([tmp_path / "gone"])
    with pytest.raises(InvalidSettings, match=r"none of .*a:.*b exists"):
        kubeconfig.select_context([tmp_path / "a", tmp_path / "b"])


def test_directory_is_no_file(tmp_path):
    with pytest.raises(InvalidSettings, match="cannot be read: Is a directory"):
        kubeconfig.select_context([tmp_path])
