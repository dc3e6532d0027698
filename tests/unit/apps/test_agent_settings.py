"""The agent's settings: the flags that existing manifests use, their defaults and limits."""

import re
from datetime import timedelta

import pytest

from kubelend.apps import flags
from kubelend.apps.agent_settings import AgentSettings
from kubelend.core.errors import InvalidSettings

LEAST = {"broker_cert_path": "certs", "source": "simulated", "simulation": "berlin.yaml"}


def problems_of(**texts):
    with pytest.raises(InvalidSettings) as raised:
        flags.parse_settings(AgentSettings, LEAST | texts)
    return raised.value.message


@pytest.mark.parametrize(
    "name,default",
    [
        ("--broker-transport", "http"),
        ("--broker-url", "https://localhost:8443"),
        ("--broker-cert-path", ""),
        ("--broker-kubeconfig", ""),
        ("--broker-namespace", "default"),
        ("--cluster-id", ""),
        ("--advertisement-name", "cluster-advertisement"),
        ("--advertisement-namespace", "default"),
        ("--instruction-namespace", ""),
        ("--advertisement-requeue-interval", "30s"),
        ("--instruction-poll-interval", "5s"),
        ("--kubeconfigs-dir", ""),
        ("--health-probe-bind-address", ":8081"),
        ("--metrics-bind-address", ":8080"),
        ("--leader-elect", "false"),
    ],
)
def test_the_published_flags_are_there_with_their_defaults(name, default):
    found = {flag.name: flag.default for flag in flags.flags_of(AgentSettings)}
    assert found[name] == default


def test_every_flag_has_a_help_that_is_a_sentence():
    for flag in flags.flags_of(AgentSettings):
        assert re.fullmatch(r"[A-Z].*\.", flag.help), flag


def test_what_is_needed_is_enough():
    settings = flags.parse_settings(AgentSettings, LEAST)
    assert settings.problems() == []
    assert settings.advertisement_requeue_interval == timedelta(seconds=30)


def test_an_agent_without_a_broker_needs_no_certificate():
    texts = LEAST | {"broker_transport": "", "broker_cert_path": "", "broker_url": "nonsense"}
    assert flags.parse_settings(AgentSettings, texts).broker_transport == ""


def test_an_agent_over_kubernetes_needs_no_certificate():
    texts = LEAST | {"broker_transport": "kubernetes", "broker_cert_path": "", "broker_url": "x"}
    assert flags.parse_settings(AgentSettings, texts).problems() == []


@pytest.mark.parametrize(
    "texts,problem",
    [
        ({"broker_transport": "mqtt"}, "--broker-transport: 'mqtt' is not supported"),
        (
            {"broker_namespace": "Mail box"},
            "--broker-namespace: 'Mail box' is not a valid namespace",
        ),
        ({"broker_url": "http://broker"}, "--broker-url: 'http://broker' is not a broker URL"),
        ({"broker_cert_path": ""}, "--broker-cert-path: required"),
        ({"source": "kubernetes"}, "--simulation: only valid with --source=simulated"),
        ({"source": "kubernetes", "objects_dir": "x"}, "--objects-dir: only valid with"),
        ({"simulation": ""}, "--simulation: required with --source=simulated"),
        ({"peering": "liqoctl"}, "--kubeconfigs-dir: required with --peering=liqoctl"),
        ({"labels": "tier=gold,blue"}, "--labels: 'blue' is not KEY=VALUE"),
        ({"labels": "=gold"}, "--labels: '=gold' is not KEY=VALUE"),
        ({"advertisement_requeue_interval": "0"}, "-interval: must be at least 100ms"),
        ({"instruction_poll_interval": "-1s"}, "-poll-interval: must be at least 0s"),
        ({"finished_for": "-1s"}, "--finished-for: must be at least 0s"),
        ({"peering": "magic"}, "--peering: 'magic' is not supported"),
        ({"cpu_cost": "abc"}, "--cpu-cost: price: 'abc' is not a price"),
        ({"currency": "euro!!"}, "--currency: currency: 'euro!!' is not a currency code"),
        ({"advertisement_name": "Bad_Name"}, "--advertisement-name: 'Bad_Name' is no"),
        (
            {"advertisement_namespace": "Bad"},
            "--advertisement-namespace: 'Bad' is not a valid namespace",
        ),
        ({"request_namespace": "Bad_NS"}, "--request-namespace: 'Bad_NS' is not a valid namespace"),
        (
            {"instruction_namespace": "Bad_NS"},
            "--instruction-namespace: 'Bad_NS' is not a valid namespace",
        ),
        ({"advertisement_validity": "1ms"}, "--advertisement-validity: must be 0 or at least"),
    ],
)
def test_what_cannot_work_is_told_by_its_flag(texts, problem):
    assert problem in problems_of(**texts)
