"""The accounts of a lab may do what the documents say, and no more."""

import kube_roles
from kubelend.lab import rights


def test_agents_roles_are_those_of_the_documentation():
    documented = {role["metadata"]["name"]: role["rules"] for role in kube_roles.documented()}
    assert {name: rules for (name, _), rules in rights.AGENTS_ROLES.items()} == documented


def test_each_role_is_bound_to_the_account_where_it_holds():
    found = rights.documents(rights.AGENT, rights.AGENTS_ROLES)
    kinds = [one["kind"] for one in found]
    assert kinds == [
        *("Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding"),
        *["Role", "RoleBinding"] * 2,
    ]
    for role, binding in zip(found[2::2], found[3::2], strict=True):
        assert binding["roleRef"]["kind"] == role["kind"]
        assert binding["metadata"] == role["metadata"]
        assert binding["subjects"][0]["name"] == rights.AGENT


def test_broker_may_not_touch_what_is_not_its_own():
    rules = [rule for rules in rights.BROKERS_ROLES.values() for rule in rules]
    for rule in rules:
        assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
        assert not {"secrets", "pods", "nodes"} & set(rule["resources"])
