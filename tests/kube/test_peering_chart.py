"""What the agent's chart installs for peering, by its values and by what the cluster has; by helm alone."""

import pytest

import charts

pytestmark = pytest.mark.kube

VALUES = {"broker": {"url": "https://broker.example.org:8443"}}
LIQO = "--api-versions=core.liqo.io/v1beta1"
POLICIES = "--api-versions=admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy"
LIQO_NAMES = ["kubelend-agent-liqo", "kubelend-agent-liqo-config"]


def render(helm, *flags, **peering):
    return charts.render(helm, "agent", VALUES | {"peering": peering}, *flags)


def mode(found):
    """The last one counts."""
    flags = [one for one in charts.container(found)["args"] if one.startswith("--peering=")]
    return flags[-1].removeprefix("--peering=")


def liqo_roles(found):
    roles = charts.of_kind(found, "Role", "ClusterRole")
    return [one["metadata"]["name"] for one in roles if "liqo" in one["metadata"]["name"]]


@pytest.mark.parametrize(
    "flags, values, expected",
    [
        ((), {}, "none"),
        ((LIQO,), {}, "liqo"),
        ((LIQO,), {"mode": "none"}, "none"),
        ((), {"mode": "liqo"}, "liqo"),
        ((LIQO,), {"kubeconfigsSecret": "providers"}, "liqoctl"),
        ((), {"mode": "liqoctl", "kubeconfigsSecret": "providers"}, "liqoctl"),
    ],
)
def test_rights_on_liqo_are_granted_exactly_where_the_agent_uses_it(helm, flags, values, expected):
    found = render(helm, *flags, **values)
    assert mode(found) == expected
    assert liqo_roles(found) == (LIQO_NAMES if expected == "liqo" else [])


def test_agent_without_a_broker_peers_with_nobody(helm):
    found = charts.render(helm, "agent", {"broker": {"transport": "none"}}, LIQO)
    assert (mode(found), liqo_roles(found)) == ("none", [])
    assert not charts.of_kind(found, "Job")


def test_liqoctl_gets_the_kubeconfigs_of_its_secret(helm):
    found = render(helm, kubeconfigsSecret="providers")
    container = charts.container(found)
    [mount] = [one for one in container["volumeMounts"] if one["name"] == "kubeconfigs"]
    assert f"--kubeconfigs-dir={mount['mountPath']}" in container["args"]
    [deployment] = charts.of_kind(found, "Deployment")
    volumes = {one["name"]: one for one in deployment["spec"]["template"]["spec"]["volumes"]}
    assert volumes["kubeconfigs"]["secret"]["secretName"] == "providers"


def test_liqoctl_without_kubeconfigs_is_refused(helm):
    with pytest.raises(charts.Refused, match="kubeconfigsSecret: is needed"):
        render(helm, mode="liqoctl")


@pytest.mark.parametrize(
    "flags, restricts, expected",
    [
        ((POLICIES,), True, ["kubelend-agent-liqo-agent", "kubelend-agent-liqo-requesters"]),
        ((POLICIES,), False, ["kubelend-agent-liqo-agent"]),
        ((), True, []),
    ],
)
def test_policies_are_installed_where_the_server_has_them(helm, flags, restricts, expected):
    found = render(helm, *flags, mode="liqo", restrictRequesters=restricts)
    policies = charts.of_kind(found, "ValidatingAdmissionPolicy")
    names = [one["metadata"]["name"] for one in policies]
    assert [name for name in names if "liqo" in name] == expected


def test_liqo_may_be_installed_elsewhere(helm):
    found = render(helm, mode="liqo", liqoNamespace="federation")
    placed = {
        one["metadata"]["namespace"]
        for one in charts.of_kind(found, "Role", "RoleBinding")
        if "liqo" in one["metadata"]["name"]
    }
    assert placed == {"federation"}
    assert "--liqo-namespace=federation" in charts.container(found)["args"]


def test_a_shared_account_is_limited_only_where_the_agent_is(helm):
    """Else the policies would apply to the account `default` of every namespace."""
    values = VALUES | {"serviceAccount": {"create": False}, "peering": {"mode": "liqo"}}
    found = charts.render(helm, "agent", values, POLICIES, "--namespace=lending")
    callers = [
        one["matchConditions"][0]["expression"]
        for one in (each["spec"] for each in charts.of_kind(found, "ValidatingAdmissionPolicy"))
        if one["matchConditions"][0]["name"] == "by-the-agent"
    ]
    expected = "request.userInfo.username == 'system:serviceaccount:lending:default'"
    assert callers == [expected] * 2


def hooks(found):
    return {
        one["kind"]: one
        for one in found
        if one["metadata"].get("annotations", {}).get("helm.sh/hook") == "pre-delete"
    }


def test_cleanup_runs_before_anything_is_deleted_with_a_right_that_the_agent_never_has(helm):
    found = render(helm)
    assert list(hooks(found)) == ["Role", "RoleBinding", "Job"]
    [rule] = hooks(found)["Role"]["rules"]
    assert rule == {
        "apiGroups": ["apps"],
        "resources": ["deployments/scale"],
        "resourceNames": ["kubelend-agent"],
        "verbs": ["patch"],
    }


def test_cleanup_is_the_agent_with_another_flag(helm):
    found = render(helm, LIQO)
    [container] = hooks(found)["Job"]["spec"]["template"]["spec"]["containers"]
    agent = charts.container(found)
    assert container["args"][: len(agent["args"])] == agent["args"]
    assert container["args"][len(agent["args"]) :] == [
        "--cleanup",
        "--cleanup-deployment=kubelend-agent",
        "--cleanup-timeout=3m",
    ]
    assert (container["env"], container["image"]) == (agent["env"], agent["image"])
    assert container["volumeMounts"] == agent["volumeMounts"]


def test_pods_of_the_cleanup_are_not_those_of_the_agent(helm):
    """It waits until none of these is left."""
    found = render(helm)
    [deployment] = charts.of_kind(found, "Deployment")
    labels = hooks(found)["Job"]["spec"]["template"]["metadata"]["labels"]
    assert not deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_agent_without_its_certificate_can_be_uninstalled(helm):
    volumes = hooks(render(helm))["Job"]["spec"]["template"]["spec"]["volumes"]
    assert [one["secret"]["optional"] for one in volumes if "secret" in one] == [True]


def test_cleanup_can_be_left_out(helm):
    found = charts.render(helm, "agent", VALUES | {"cleanup": {"enabled": False}})
    assert hooks(found) == {}
