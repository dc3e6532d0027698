"""What can stand behind `kubernetes:`."""

import pytest

from kubelend.core.errors import InvalidSettings
from kubelend.kube.config import KubeConfig
from kubelend.stores import factory
from kubelend.stores.factory import KubernetesStoreUrl

ACCESS = KubeConfig(server="https://127.0.0.1:1", namespace="of-the-context")


@pytest.mark.parametrize(
    "rest, place",
    [
        ("", KubernetesStoreUrl()),
        ("///etc/kube/config", KubernetesStoreUrl("/etc/kube/config")),
        ("local/config", KubernetesStoreUrl("local/config")),
        ("?namespace=brokers", KubernetesStoreUrl(namespace="brokers")),
        ("///k?context=hub&namespace=n", KubernetesStoreUrl("/k", "hub", "n")),
        ("?context=arn:aws:eks/x", KubernetesStoreUrl(context="arn:aws:eks/x")),
    ],
)
def test_every_part_may_be_left_out(rest, place):
    assert factory.parse_kubernetes_url(rest) == place


@pytest.mark.parametrize(
    "rest, why",
    [
        ("//host/path", "three slashes"),
        ("?name=x", "use context and namespace"),
        ("?namespace=", "not a namespace name"),
        ("?namespace=A_b", "not a namespace name"),
    ],
)
def test_what_names_no_place_is_refused(rest, why):
    with pytest.raises(InvalidSettings, match=why):
        factory.parse_kubernetes_url(rest)


@pytest.mark.parametrize(
    "place, usual, pod, namespace",
    [
        (KubernetesStoreUrl(namespace="said"), "usual", "pod", "said"),
        (KubernetesStoreUrl(), "usual", "pod", "usual"),
        (KubernetesStoreUrl(), "", "pod", "pod"),
        (KubernetesStoreUrl(), "", "", "of-the-context"),
    ],
)
def test_namespace_is_the_one_that_was_said_most_clearly(monkeypatch, place, usual, pod, namespace):
    monkeypatch.setenv("POD_NAMESPACE", pod)
    assert place.namespace_for(ACCESS, usual) == namespace


def test_kubeconfig_that_is_not_there_is_refused_before_anything_is_opened(tmp_path):
    for use in (factory.check_store_url, factory.open_store, factory.open_readonly):
        with pytest.raises(InvalidSettings, match="missing"):
            use(f"kubernetes://{tmp_path}/none")


def test_store_in_kubernetes_has_no_file_that_others_could_read():
    assert factory.store_mode_problems("kubernetes:") == []
    assert factory.path_beside("kubernetes:", "grants.key") is None
