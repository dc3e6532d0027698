"""What the values of our charts bring about, and which of them are refused; by helm, without a cluster."""

import re

import pytest

import charts

pytestmark = pytest.mark.kube

THREE = {"replicas": 3, "store": {"kind": "kubernetes"}, "grantKey": {"secret": "grants"}}
URL = {"broker": {"url": "https://broker.example.org:8443"}}


@pytest.mark.parametrize(
    "name, values, complaint",
    [
        ("broker", {"replicas": 0}, "/replicas"),
        ("broker", {"replicas": "two"}, "/replicas"),
        ("broker", {"replica": 3}, "'replica' not allowed"),
        ("broker", {"clusterNamespaces": "yes"}, "/clusterNamespaces"),
        ("broker", {"store": {"kind": "postgres"}}, "/store/kind"),
        ("broker", {"store": {"size": "large"}}, "/store/size"),
        ("broker", {"interfaces": []}, "/interfaces"),
        ("broker", {"interfaces": ["grpc"]}, "/interfaces/0"),
        ("broker", {"service": {"port": 70000}}, "/service/port"),
        ("broker", {"flags": {"--stale-after": "5m"}}, "'--stale-after' does not match"),
        ("broker", {"certManager": {"issuer": {"kind": "Issuer"}}}, "/certManager/issuer"),
        ("agent", URL | {"logLevel": "loud"}, "/logLevel"),
        ("agent", {"broker": {"url": "http://plain"}}, "/broker/url"),
        ("agent", URL | {"certificate": {"from": "email"}}, "/certificate/from"),
        ("agent", URL | {"prices": {"cpu": "cheap"}}, "/prices/cpu"),
    ],
)
def test_wrong_values_are_refused_by_name(helm, name, values, complaint):
    with pytest.raises(charts.Refused, match=re.escape(complaint)):
        charts.template(helm, name, values)


TWO = {"replicas": 2, "store": {"kind": "kubernetes"}}
ENROLS = {"enrolment": {"enabled": True}}
OF_OBJECTS = {"interfaces": ["kubernetes"]}
NO_SECRET = {"broker": {"transport": "kubernetes"}}
NO_NAMESPACE = {"broker": {"transport": "kubernetes", "kubeconfigSecret": "hub"}}
NO_ISSUER = URL | {"certificate": {"from": "certManager"}}


@pytest.mark.parametrize(
    "name, values, advice",
    [
        ("broker", {"replicas": 2}, "set store.kind=kubernetes"),
        ("broker", TWO, "openssl genpkey -algorithm ed25519"),
        ("broker", ENROLS, "kubelend ca init"),
        ("broker", OF_OBJECTS, "set store.kind=kubernetes"),
        ("broker", THREE | OF_OBJECTS | ENROLS, "add http to interfaces"),
        ("agent", {}, "broker.url: is needed"),
        ("agent", NO_SECRET, "--from-file=kubeconfig"),
        ("agent", NO_NAMESPACE, "kubelend create clusternamespace"),
        ("agent", URL | {"certificate": {"from": "join"}}, "kubelend create token"),
        ("agent", NO_ISSUER, "needs clusterID and issuer.name"),
    ],
)
def test_what_cannot_work_is_refused_with_what_to_do(helm, name, values, advice):
    with pytest.raises(charts.Refused, match=re.escape(advice)):
        charts.template(helm, name, values)


def test_broker_with_a_file_gets_neither_token_nor_roles(helm):
    found = charts.render(helm, "broker", {})
    assert not charts.of_kind(found, "Role", "ClusterRole", "CustomResourceDefinition")
    [deployment] = charts.of_kind(found, "Deployment")
    assert deployment["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


@pytest.mark.parametrize("kind", ["sqlite", "kubernetes"])
@pytest.mark.parametrize("is_serving", [True, False])
def test_only_a_broker_of_cluster_namespaces_has_permissions_in_all_namespaces(
    helm, kind, is_serving
):
    found = charts.render(
        helm, "broker", {"clusterNamespaces": is_serving, "store": {"kind": kind}}
    )
    bound = [one["roleRef"]["name"] for one in charts.of_kind(found, "ClusterRoleBinding")]
    assert bound == (["kubelend-broker-cluster-namespaces"] if is_serving else [])
    assert ("--cluster-namespaces" in charts.container(found)["args"]) is is_serving
    defined = {one["metadata"]["name"] for one in charts.of_kind(found, "CustomResourceDefinition")}
    assert ("providerinstructions.rear.fluidos.eu" in defined) is is_serving
    assert ("clustersessions.broker.fluidos.eu" in defined) is (is_serving or kind == "kubernetes")
    [deployment] = charts.of_kind(found, "Deployment")
    mounts = deployment["spec"]["template"]["spec"]["automountServiceAccountToken"]
    assert mounts is (is_serving or kind == "kubernetes")
    assert bool(charts.of_kind(found, "Role")) is (kind == "kubernetes")


@pytest.mark.parametrize("leader_only", [True, False])
def test_only_where_calls_have_to_go_to_the_leader_may_it_label_its_pod(helm, leader_only):
    values = THREE | {"service": {"leaderOnly": leader_only}}
    found = charts.render(helm, "broker", values)
    by_name = {one["metadata"]["name"]: one for one in charts.of_kind(found, "Service")}
    selector = by_name["liqo-resource-broker"]["spec"]["selector"]
    assert ("kubelend.io/role" in selector) is leader_only
    assert ("liqo-resource-broker-read" in by_name) is leader_only
    [role] = charts.of_kind(found, "Role")
    assert any(rule["resources"] == ["pods"] for rule in role["rules"]) is leader_only


def test_definitions_stay_when_a_release_goes(helm):
    for keep in (True, False):
        found = charts.render(helm, "agent", URL | {"crds": {"keep": keep}})
        notes = [
            one["metadata"].get("annotations", {}).get("helm.sh/resource-policy")
            for one in charts.of_kind(found, "CustomResourceDefinition")
        ]
        assert set(notes) == {"keep" if keep else None}
