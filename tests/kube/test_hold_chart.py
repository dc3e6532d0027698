"""What the agent's chart installs to hold lent resources, by its values and by what the server can do."""

import pytest

import charts

VALUES = {"broker": {"url": "https://broker.example.org:8443"}}
POLICIES = "admissionregistration.k8s.io/v1"
NEWEST = tuple(
    f"--api-versions={POLICIES}/{kind}"
    for kind in ("ValidatingAdmissionPolicy", "MutatingAdmissionPolicy")
)


def render(helm, *flags, **hold):
    return charts.render(helm, "agent", VALUES | {"hold": hold}, *flags)


def kinds(manifests):
    """Those of holds only."""
    found = {one["kind"].removesuffix("Binding") for one in manifests}
    return found & {"PriorityClass", "ValidatingAdmissionPolicy", "MutatingAdmissionPolicy"}


@pytest.mark.parametrize(
    "flags, expected",
    [
        ((), {"PriorityClass"}),
        (NEWEST[:1], {"PriorityClass", "ValidatingAdmissionPolicy"}),
        (
            NEWEST,
            {"PriorityClass", "ValidatingAdmissionPolicy", "MutatingAdmissionPolicy"},
        ),
    ],
    ids=["before 1.30", "before 1.36", "newest"],
)
def test_policies_are_installed_where_the_server_has_them(helm, flags, expected):
    assert kinds(render(helm, *flags)) == expected


def test_without_holding_there_is_nothing_of_it(helm):
    found = render(helm, *NEWEST, mode="none")
    assert kinds(found) == set()
    assert not [flag for flag in charts.container(found)["args"] if flag.startswith("--hold")]
    granted = [
        rule
        for role in charts.of_kind(found, "Role", "ClusterRole")
        for rule in role["rules"]
        if {"pods", "pods/status", "leases", "priorityclasses"} & set(rule["resources"])
    ]
    assert granted == [
        {"apiGroups": [""], "resources": ["nodes", "pods"], "verbs": ["list", "watch"]}
    ]


def test_another_priority_is_another_class(helm):
    """The value of a class cannot be changed."""
    found = render(helm, priority=100)
    [made] = charts.of_kind(found, "PriorityClass")
    assert (made["metadata"]["name"], made["value"]) == ("kubelend-hold-100", 100)
    assert made["preemptionPolicy"] == "Never"
    assert "--hold-priority-class=kubelend-hold-100" in charts.container(found)["args"]


def test_a_priority_below_all_pods_is_refused(helm):
    with pytest.raises(charts.Refused, match="priority"):
        render(helm, priority=-10)


def test_placeholders_are_where_instructions_are(helm):
    values = VALUES | {"namespaces": {"instructions": "lending"}}
    found = charts.render(helm, "agent", values, *NEWEST)
    [role] = [
        one
        for one in charts.of_kind(found, "Role")
        if one["metadata"]["name"].endswith("-placeholders")
    ]
    [binding] = charts.of_kind(found, "MutatingAdmissionPolicyBinding")
    assert role["metadata"]["namespace"] == "lending"
    assert binding["spec"]["paramRef"]["namespace"] == "lending"
