"""The accounts of a lab may do what the documents say, and no more."""

import charts
import kube_roles
from kubelend.lab import rights


def test_agents_roles_are_those_of_the_documentation():
    documented = {role["metadata"]["name"]: role["rules"] for role in kube_roles.documented()}
    assert {name: rules for (name, _), rules in rights.AGENT_ROLES.items()} == documented


def test_each_role_is_bound_to_the_account_where_it_holds():
    found = rights.rbac_manifests(rights.AGENT_ACCOUNT, rights.AGENT_ROLES)
    kinds = [one["kind"] for one in found]
    assert kinds == [
        *("Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding"),
        *["Role", "RoleBinding"] * 2,
    ]
    for role, binding in zip(found[2::2], found[3::2], strict=True):
        assert binding["roleRef"]["kind"] == role["kind"]
        assert binding["metadata"] == role["metadata"]
        assert binding["subjects"][0]["name"] == rights.AGENT_ACCOUNT


def test_brokers_role_is_that_of_the_chart():
    """But for the label of its pod: it runs in none."""
    [role] = charts.of_kind(charts.rendered("broker", "overlays/replicated"), "Role")
    without = [rule for rule in role["rules"] if rule["resources"] != ["pods"]]
    assert rights.BROKER_ROLES[rights.BROKER_ACCOUNT, rights.OBJECT_NAMESPACE] == without
