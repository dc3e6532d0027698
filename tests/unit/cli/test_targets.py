"""Whom a command asks: the broker that was named, or the cluster that kubectl would ask."""

import pytest

from kubelend.apps import flags
from kubelend.apps.settings import ClientSettings
from kubelend.cli import main, options
from kubelend.cli.options import PLUGIN, BrokerNaming, KubeTarget
from kubelend.core.errors import InvalidInput, InvalidSettings

NOBODY, FLAG, VARIABLE = BrokerNaming(), BrokerNaming(by_flag=True), BrokerNaming(by_variable=True)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch, tmp_path):
    for name in (
        "KUBELEND_BROKER_URL",
        "KUBELEND_BROKER",
        "KUBELEND_CERT_PATH",
        "KUBERNETES_SERVICE_HOST",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-kubeconfig"))


@pytest.mark.parametrize(
    "program, place, named, is_cluster",
    [
        pytest.param(PLUGIN, KubeTarget(), NOBODY, True, id="plugin"),
        pytest.param("kubelend", KubeTarget(), NOBODY, False, id="by-itself"),
        pytest.param(PLUGIN, KubeTarget(), VARIABLE, False, id="variable-wins-over-plugin"),
        pytest.param(PLUGIN, KubeTarget(), FLAG, False, id="flag-wins-over-plugin"),
        pytest.param("kubelend", KubeTarget(context="x"), NOBODY, True, id="context"),
        pytest.param("kubelend", KubeTarget(kubeconfig="x"), NOBODY, True, id="kubeconfig"),
        pytest.param("kubelend", KubeTarget(namespace="x"), NOBODY, True, id="namespace"),
        pytest.param(
            "kubelend", KubeTarget(context="x"), VARIABLE, True, id="flag-wins-over-variable"
        ),
    ],
)
def test_who_is_asked_follows_from_flags_then_variables_then_name(
    program, place, named, is_cluster
):
    assert options.uses_kube_target(place, named, program) is is_cluster


def test_broker_and_cluster_at_once_are_refused():
    with pytest.raises(InvalidSettings, match="both a broker and a cluster; give --broker-url"):
        options.uses_kube_target(KubeTarget(context="x"), FLAG, PLUGIN)


@pytest.mark.parametrize(
    "given, parsed",
    [
        (["--context", "x", "get", "clusters"], ["get", "clusters", "--context", "x"]),
        (["--context=x", "get", "clusters"], ["get", "clusters", "--context=x"]),
        (
            ["get", "-n", "team", "rsv", "--phase", "A"],
            ["get", "rsv", "--phase", "A", "-n", "team"],
        ),
        (["-A", "get", "rsv"], ["get", "rsv", "-A"]),
        (["--debug", "-n", "t", "get", "rsv"], ["--debug", "get", "rsv", "-n", "t"]),
        (["-n", "t", "release", "--", "-x"], ["release", "-n", "t", "--", "-x"]),
        (["revoke", "x", "--reason", "-n"], ["revoke", "x", "--reason", "-n"]),
        (["--context"], ["--context"]),
        ([], []),
    ],
    ids=lambda words: " ".join(words) or "nothing",
)
def test_flags_of_kubectl_may_stand_before_the_command(given, parsed):
    assert options.move_global_flags(given) == parsed


def test_all_namespaces_are_those_of_a_cluster():
    assert options.all_namespaces(KubeTarget(context="x")) == KubeTarget(
        context="x", is_everywhere=True
    )
    with pytest.raises(InvalidInput, match="give --kube-context"):
        options.all_namespaces(flags.parse_settings(ClientSettings, {"cert_path": "x"}))
    with pytest.raises(InvalidInput, match="exclude each other"):
        options.all_namespaces(KubeTarget(namespace="x"))


@pytest.mark.parametrize(
    "program, arguments, problem",
    [
        (PLUGIN, ["get", "reservations"], "no-kubeconfig is missing; use --kubeconfig"),
        (PLUGIN, ["get", "clusters", "--cert-path", "no/where"], "no/where/tls.crt is missing"),
        (PLUGIN, ["get", "clusters", "--timeout", "soon"], "--timeout: "),
        (PLUGIN, ["get", "reservations", "x", "-A"], "one reservation is in one namespace"),
        (
            PLUGIN,
            ["get", "reservations", "-w", "--role", "provider"],
            "cannot be watched by this command",
        ),
        (PLUGIN, ["borrow", "--cpu", "1", "--memory", "1", "--dry-run"], "give --broker-url and"),
        (PLUGIN, ["cordon", "x"], "--cert-path: required"),
        (PLUGIN, ["-n", "x", "cordon", "x"], "no such option: -n"),
        ("kubelend", ["get", "clusters"], "--cert-path: required"),
        ("kubelend", ["get", "clusters", "--kube-context", "x"], "no-kubeconfig is missing"),
        ("kubelend", ["get", "reservations", "-A", "--cert-path", "x"], "give --kube-context too"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_use_is_one_line_and_exit_code_2(program, arguments, problem, capsys):
    assert main.run(arguments, program) == 2
    out, err = capsys.readouterr()
    assert problem in err
    assert (out, err.count("\n")) == ("", 1)


def test_variables_of_a_broker_hold_for_the_plugin_until_a_context_is_named(monkeypatch, capsys):
    monkeypatch.setenv("KUBELEND_CERT_PATH", "by/variable")
    main.run(["get", "clusters"], PLUGIN)
    assert "by/variable/tls.crt" in capsys.readouterr().err
    main.run(["get", "clusters", "--context", "x"], PLUGIN)
    assert "no-kubeconfig is missing" in capsys.readouterr().err
