"""What of the charts can be judged without helm: versions, copies, and what is said in two places."""

import json
import re

import pytest
import yaml

import kube_roles
import kubelend
from audited_cluster import granted
from charts import CHARTS, DEPLOY, KUSTOMIZE, NAMES, container, of_kind, rendered
from kubelend.wire import cluster_namespaces, crds
from kubelend.wire.broker_objects import LedgerRecord


@pytest.mark.parametrize("name", NAMES)
def test_versions_are_those_of_the_program(name):
    chart = yaml.safe_load((CHARTS / f"kubelend-{name}" / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (kubelend.__version__,) * 2
    assert container(rendered(name))["image"] == f"kubelend:{kubelend.__version__}"


@pytest.mark.parametrize("name", NAMES)
def test_schema_knows_every_value_and_no_other(name):
    chart = CHARTS / f"kubelend-{name}"
    schema = json.loads((chart / "values.schema.json").read_text())
    values = yaml.safe_load((chart / "values.yaml").read_text())
    assert values.keys() == schema["properties"].keys() - {"global"}
    assert schema["additionalProperties"] is False


def test_each_definition_is_in_the_chart_of_its_group():
    """And what a broker writes into cluster namespaces in its own too."""
    copies = {name: sorted(CHARTS.glob(f"kubelend-{name}/files/crds/*.yaml")) for name in NAMES}
    agents = {name for name in crds.crd_documents() if name.startswith("rear.")}
    brokers = crds.crd_documents().keys() - agents | {"rear.fluidos.eu_providerinstructions.yaml"}
    assert {path.name for path in copies["broker"]} == brokers
    assert {path.name for path in copies["agent"]} == agents
    for path in (*copies["broker"], *copies["agent"]):
        assert path.read_text() == (DEPLOY / "crds" / path.name).read_text()


def test_broker_may_do_in_cluster_namespaces_what_it_has_to():
    [role] = of_kind(rendered("broker", "components/cluster-namespaces"), "ClusterRole")
    needed = cluster_namespaces.policy_rules(cluster_namespaces.BROKER_RULES)
    assert granted([role]) == granted([{"metadata": {}, "rules": needed}])


def test_roles_in_the_manual_are_those_of_the_chart():
    """docs/agent.md explains them one by one, for an agent that has neither certificate nor name."""
    documented = {role["metadata"]["name"]: role["rules"] for role in kube_roles.documented()}
    nameless = [
        rule for rule in documented["kubelend-agent"] if rule["resources"] == ["namespaces"]
    ]
    assert [rule["resourceNames"] for rule in nameless] == [["kube-system"]]
    documented["kubelend-agent"] = [
        rule for rule in documented["kubelend-agent"] if rule not in nameless
    ]
    own = {
        role["metadata"]["name"]: role["rules"]
        for role in of_kind(rendered("agent"), "Role", "ClusterRole")
        if not role["metadata"]["name"].endswith(("-viewer", "-editor"))
    }
    assert own == documented


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_has_a_viewer(name):
    directory = {"broker": "overlays/replicated", "agent": "base"}[name]
    group = {"broker": "broker.fluidos.eu", "agent": "rear.fluidos.eu"}[name]
    roles = of_kind(rendered(name, directory), "ClusterRole")
    viewers = {
        match[1]
        for role in roles
        if (match := re.fullmatch(rf"kubelend-{name}-(\w+)-viewer", role["metadata"]["name"]))
    }
    kinds = {kind.plural for kind in crds.ALL_KINDS if kind.group == group}
    assert viewers == kinds - {LedgerRecord.plural}


@pytest.mark.parametrize("path", sorted((KUSTOMIZE / "broker").rglob("manifests.yaml")), ids=str)
def test_what_only_the_broker_may_read_is_in_no_role_of_people(path):
    """LedgerRecords hold who joined, hashes of tokens, and the key that records are sealed with."""
    documents = [*yaml.safe_load_all(path.read_text())]
    for role in of_kind(documents, "ClusterRole"):
        named = {name for rule in role["rules"] for name in rule["resources"]}
        assert not named & {LedgerRecord.plural, "*"}


@pytest.mark.parametrize("path", sorted(KUSTOMIZE.rglob("manifests.yaml")), ids=str)
def test_rendered_manifests_know_nothing_of_helm(path):
    assert "helm" not in path.read_text().lower()
