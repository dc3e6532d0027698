"""The accounts of a lab may do what the documents say, and no more."""

import charts
import kube_roles
from kubelend.lab import setup


def test_agents_roles_are_those_of_the_documentation():
    documented = {role["metadata"]["name"]: role["rules"] for role in kube_roles.documented()}
    assert {name: rules for (name, _), rules in setup.AGENT_ROLES.items()} == documented


def test_each_role_is_bound_to_the_account_where_it_holds():
    found = setup.rbac_manifests(setup.AGENT_ACCOUNT, setup.AGENT_ROLES)
    kinds = [one["kind"] for one in found]
    assert kinds == [
        *("Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding"),
        *["Role", "RoleBinding"] * 2,
    ]
    for role, binding in zip(found[2::2], found[3::2], strict=True):
        assert binding["roleRef"]["kind"] == role["kind"]
        assert binding["metadata"] == role["metadata"]
        assert binding["subjects"][0]["name"] == setup.AGENT_ACCOUNT


def test_brokers_role_is_that_of_the_chart():
    """But for the label of its pod: it runs in none."""
    [role] = charts.of_kind(charts.rendered("broker", "overlays/replicated"), "Role")
    without = [rule for rule in role["rules"] if rule["resources"] != ["pods"]]
    assert setup.BROKER_ROLES[setup.BROKER_ACCOUNT, setup.OBJECT_NAMESPACE] == without
