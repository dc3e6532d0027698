"""Settings: flags and variables derived from a class, and the flags of the processes with their limits."""

import re
from datetime import timedelta
from pathlib import Path
from typing import Literal

import pytest

from kubelend.apps import broker_kubernetes, flags
from kubelend.apps.agent_settings import AgentSettings
from kubelend.apps.flags import Address, Settings
from kubelend.apps.settings import BrokerSettings, ClientSettings
from kubelend.core.errors import InvalidSettings

REQUIRED: dict[type[Settings], dict[str, str]] = {
    BrokerSettings: {"http_cert_path": "certs"},
    ClientSettings: {"cert_path": "certs"},
    AgentSettings: {
        "broker_cert_path": "certs",
        "source": "simulated",
        "simulation": "berlin.yaml",
    },
}


def parse(record, **texts):
    return flags.parse_settings(record, REQUIRED.get(record, {}) | texts)


def problems_of(record, **texts):
    with pytest.raises(InvalidSettings) as raised:
        parse(record, **texts)
    return raised.value.message


# -- flags of any class


class Sample(Settings, frozen=True, kw_only=True):
    directory: Path
    """Where it lies."""

    listen_port: int = 80
    """A port,
    on two lines."""

    mode: Literal["fast", "slow"] = "fast"
    """How."""

    is_on: bool = False
    """Whether."""

    pause: timedelta = timedelta(minutes=90)
    """How long."""

    address: Address | None = Address("", 8080)
    """Where."""

    log: Path | None = None
    """Where else."""

    title: str = ""
    """What."""

    def problems(self) -> list[str]:
        return [] if self.listen_port else ["--listen-port: must not be zero"]


REQUIRED[Sample] = {"directory": "d"}


def flag(attribute):
    return next(found for found in flags.flags_of(Sample) if found.attribute == attribute)


def test_attribute_becomes_a_flag_and_a_variable_with_its_docstring_as_help():
    assert flag("listen_port").name == "--listen-port"
    assert flag("listen_port").variable == "KUBELEND_LISTEN_PORT"
    assert flag("listen_port").help == "A port, on two lines."


@pytest.mark.parametrize(
    "attribute, metavar, default",
    [
        ("directory", "PATH", None),
        ("listen_port", "N", "80"),
        ("mode", "fast|slow", "fast"),
        ("is_on", "true|false", "false"),
        ("pause", "DURATION", "1h30m"),
        ("address", "ADDRESS", ":8080"),
        ("log", "PATH", ""),
        ("title", "TEXT", ""),
    ],
)
def test_help_shows_type_and_default_as_they_are_written(attribute, metavar, default):
    assert (flag(attribute).metavar, flag(attribute).default) == (metavar, default)


def test_defaults_can_be_parsed():
    texts = {found.attribute: found.default for found in flags.flags_of(Sample) if found.default}
    assert parse(Sample, **texts) == Sample(directory=Path("d"))


@pytest.mark.parametrize(
    "attribute, text, value",
    [
        ("directory", "/a/b", Path("/a/b")),
        ("listen_port", "-1", -1),
        ("mode", "slow", "slow"),
        ("is_on", "T", True),
        ("is_on", "0", False),
        ("pause", "90s", timedelta(seconds=90)),
        ("address", "127.0.0.1:1", Address("127.0.0.1", 1)),
        ("address", "[::1]:1", Address("::1", 1)),
        ("address", "0", None),
        ("log", "", None),
        ("log", "x", Path("x")),
        ("title", "", ""),
    ],
)
def test_text_is_parsed_by_the_type_of_the_attribute(attribute, text, value):
    assert getattr(parse(Sample, **{attribute: text}), attribute) == value


@pytest.mark.parametrize(
    "attribute, text, problem",
    [
        ("directory", "", "--directory: required; set the flag or KUBELEND_DIRECTORY"),
        ("listen_port", "8O", "--listen-port: '8O' is not an integer"),
        ("listen_port", "1" * 19, "is not an integer"),
        ("listen_port", "²", "is not an integer"),
        ("listen_port", "1\n", "is not an integer"),
        ("listen_port", "", "--listen-port: required"),
        ("mode", "medium", "--mode: 'medium' is not supported; use one of fast, slow"),
        ("is_on", "yes", "--is-on: 'yes' is not a boolean; use true or false"),
        ("pause", "5", "--pause: '5' has a number without a unit; write numbers with units"),
        ("address", "8080", "--address: not a valid address; use :8081"),
        ("address", ":70000", "--address: not a valid address"),
        ("address", ":x", "--address: not a valid address"),
        ("address", "::1:80", "--address: too many colons"),
        ("listen_port", "0", "--listen-port: must not be zero"),
    ],
)
def test_invalid_text_is_reported_with_its_flag(attribute, text, problem):
    assert problem in problems_of(Sample, **{attribute: text})


def test_all_problems_are_reported_at_once():
    found = problems_of(Sample, directory="", mode="x", pause="y", listen_port="0")
    positions = [
        found.index(name) for name in ("--directory", "--mode", "--pause", "--listen-port")
    ]
    assert positions == sorted(positions)


@pytest.mark.parametrize("text", [":8081", "localhost:1", "[::1]:443", "1.2.3.4:0"])
def test_address_round_trips(text):
    assert str(Address.parse(text)) == text


# -- flags of the processes


LISTENERS = {
    "--health-probe-bind-address": ":8081",
    "--metrics-bind-address": ":8080",
    "--leader-elect": "false",
}
MANIFESTS = {
    BrokerSettings: LISTENERS
    | {
        "--broker-interface": "http",
        "--http-port": "8443",
        "--http-cert-path": "",
        "--http-namespace": "default",
    },
    AgentSettings: LISTENERS
    | {
        "--broker-transport": "auto",
        "--broker-url": "https://localhost:8443",
        "--broker-cert-path": "",
        "--broker-kubeconfig": "",
        "--broker-namespace": "default",
        "--cluster-id": "",
        "--advertisement-name": "cluster-advertisement",
        "--advertisement-namespace": "default",
        "--instruction-namespace": "",
        "--advertisement-requeue-interval": "30s",
        "--instruction-poll-interval": "5s",
        "--kubeconfigs-dir": "",
    },
}


@pytest.mark.parametrize("record", MANIFESTS)
def test_flags_of_existing_manifests_have_their_defaults(record):
    found = {flag.name: flag.default for flag in flags.flags_of(record)}
    assert found.items() >= MANIFESTS[record].items()


@pytest.mark.parametrize("record", [BrokerSettings, ClientSettings, AgentSettings])
def test_every_help_is_a_sentence_and_defaults_are_valid(record):
    for found in flags.flags_of(record):
        assert re.fullmatch(r"[A-Z].*\.", found.help), found
    assert parse(record).problems() == []
    assert parse(BrokerSettings) == BrokerSettings(http_cert_path=Path("certs"))


@pytest.mark.parametrize(
    "interface, serves",
    [
        ("http", (True, False)),
        ("kubernetes", (False, True)),
        ("http,kubernetes", (True, True)),
        ("kubernetes, http", (True, True)),
    ],
)
def test_interfaces_are_listed_in_any_order(interface, serves):
    settings = parse(BrokerSettings, broker_interface=interface)
    assert (settings.serves_http, settings.serves_objects) == serves


OBJECTS = {"broker_interface": "kubernetes"}


@pytest.mark.parametrize(
    "texts, store",
    [
        ({}, "kubelend.db"),
        ({"kubeconfig": "/hub"}, "kubelend.db"),
        (OBJECTS, "kubernetes:"),
        (OBJECTS | {"store": "kubernetes:?namespace=hub"}, "kubernetes:?namespace=hub"),
        (OBJECTS | {"kubeconfig": "/etc/hub.yaml"}, "kubernetes:/etc/hub.yaml"),
        (OBJECTS | {"kubeconfig": "a b"}, "kubernetes:a b"),
        ({"kubeconfig": "/hub", "store": "kubernetes:?namespace=n"}, "kubernetes:/hub?namespace=n"),
        ({"kubeconfig": "/hub", "store": "kubernetes:///other"}, "kubernetes:///other"),
    ],
)
def test_store_defaults_to_a_file_or_to_the_cluster_of_the_kubeconfig(texts, store):
    assert broker_kubernetes.resolved_store_url(parse(BrokerSettings, **texts)) == store


def test_zero_disables_a_listener():
    settings = parse(BrokerSettings, metrics_bind_address="0")
    assert settings.metrics_bind_address is None
    assert settings.health_probe_bind_address == Address("", 8081)


FREE_PORTS = {"http_port": "0", "metrics_bind_address": ":0", "health_probe_bind_address": ":0"}
UNLIMITED = {"rate_limit": "0", "max_wait": "0", "max_waiting": "0", "retention": "0"}
ELSEWHERE = {"http_host": "127.0.0.1", "metrics_bind_address": "127.0.0.2:8443"}
NO_BROKER = {"broker_transport": "", "broker_cert_path": "", "broker_url": "nonsense"}
NAMESPACES = {"broker_namespace": "", "request_namespace": "", "instruction_namespace": ""}
URLS = ("https://localhost:8443", "https://broker.example.org", "https://[::1]:1")


@pytest.mark.parametrize(
    "record, texts",
    [
        (BrokerSettings, FREE_PORTS),
        (BrokerSettings, UNLIMITED),
        (BrokerSettings, {"lost_after": "0"}),
        (BrokerSettings, {"leader_elect": "true"}),
        (BrokerSettings, ELSEWHERE),
        (BrokerSettings, {"enrol_port": "8443"}),
        (BrokerSettings, OBJECTS | {"http_cert_path": ""}),
        (AgentSettings, NO_BROKER),
        (AgentSettings, NO_BROKER | {"broker_transport": "kubernetes"}),
        (AgentSettings, NAMESPACES),
        (AgentSettings, {"broker_kubeconfig": "hub.yaml", "broker_cert_path": ""}),
        *((ClientSettings, {"broker_url": url}) for url in (*URLS, "https://a/prefix")),
    ],
    ids=str,
)
def test_valid_settings_are_accepted(record, texts):
    settings = parse(record, **texts)
    assert settings.problems() == []
    assert all(
        getattr(settings, name) == text
        for name, text in texts.items()
        if isinstance(getattr(settings, name), str)
    )


@pytest.mark.parametrize(
    "texts, problem",
    [
        ({"http_port": "65536"}, "--http-port: must be from 0 to 65535"),
        ({"http_port": "-1"}, "--http-port: must be from 0 to 65535"),
        (
            {"broker_interface": "kubernetes,http", "http_cert_path": ""},
            "--http-cert-path: required; set the flag or KUBELEND_HTTP_CERT_PATH",
        ),
        ({"http_namespace": "Not A Name"}, "--http-namespace: 'Not A Name' is not a valid"),
        (
            {"broker_interface": "kubernetes", "store": "kubelend.db"},
            "--store: kubelend.db cannot be used with --broker-interface=kubernetes, which requires"
            " kubernetes:",
        ),
        ({"broker_interface": "grpc"}, "--broker-interface: 'grpc' is not supported; use http"),
        (
            {"broker_interface": "kubernetes", "ca_path": "ca"},
            "--ca-path: enrolment requires http in --broker-interface",
        ),
        ({"stale_after": "0"}, "--stale-after: must be at least 1ms"),
        ({"max_wait": "-1s"}, "--max-wait: must be at least 0s"),
        ({"lost_after": "-1s"}, "--lost-after: must be at least 0s"),
        ({"agent_timeout": "0"}, "--agent-timeout: must be at least 1ms"),
        ({"rate_limit": "-1"}, "--rate-limit: must be at least 0"),
        ({"rate_burst": "0"}, "--rate-burst: must be at least 1"),
        ({"max_body_bytes": "1023"}, "--max-body-bytes: must be at least 1024"),
        ({"default_duration": "721h"}, "--default-duration: must not be above --max-duration"),
        (
            {"leader_elect_renew_deadline": "15s"},
            "--leader-elect-renew-deadline: must be above --leader-elect-retry-period and below",
        ),
        ({"leader_elect_retry_period": "10s"}, "--leader-elect-renew-deadline: must be above"),
        ({"metrics_bind_address": ":8081"}, ":8081 is already used by --health-probe-bind-address"),
        ({"metrics_bind_address": ":8443"}, "is already used by the REST interface"),
        ({"log_level": "loud"}, "--log-level: 'loud' is not supported"),
        ({"enrol_port": "65536"}, "--enrol-port: must be from 0 to 65535"),
        ({"ca_path": "ca", "enrol_port": "8443"}, "--enrol-port: must differ from --http-port"),
        ({"certificate_lifetime": "9s"}, "--certificate-lifetime: must be at least 10s"),
    ],
)
def test_invalid_settings_of_the_broker_are_reported(texts, problem):
    assert problem in problems_of(BrokerSettings, **texts)


@pytest.mark.parametrize(
    "texts, problem",
    [
        ({"broker_transport": "mqtt"}, "--broker-transport: 'mqtt' is not supported"),
        ({"broker_namespace": "A b"}, "--broker-namespace: 'A b' is not a valid namespace"),
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
        ({"storage_cost": "abc"}, "--storage-cost: price: 'abc' is not a price"),
        ({"currency": "euro!!"}, "--currency: currency: 'euro!!' is not a currency code"),
        ({"advertisement_name": "Bad_Name"}, "--advertisement-name: 'Bad_Name' is no"),
        ({"advertisement_namespace": "Bad"}, "--advertisement-namespace: 'Bad' is not a valid"),
        ({"advertisement_namespace": ""}, "--advertisement-namespace: '' is not a valid"),
        ({"request_namespace": "Bad_NS"}, "--request-namespace: 'Bad_NS' is not a valid"),
        ({"instruction_namespace": "Bad_NS"}, "--instruction-namespace: 'Bad_NS' is not a valid"),
        ({"advertisement_validity": "1ms"}, "--advertisement-validity: must be 0 or at least"),
        ({"hold": "placeholders"}, "--hold: placeholders is only valid with --source=kubernetes"),
        ({"hold": "placeholders", "hold_priority_class": "low"}, "must begin with kubelend-hold"),
    ],
)
def test_invalid_settings_of_the_agent_are_reported(texts, problem):
    assert problem in problems_of(AgentSettings, **texts)


@pytest.mark.parametrize(
    "texts, problem",
    [
        ({"cert_path": ""}, "--cert-path: required; set the flag or KUBELEND_CERT_PATH"),
        ({"timeout": "0"}, "--timeout: must be at least 1ms"),
        *(
            ({"broker_url": url}, f"--broker-url: {url!r} is not a broker URL")
            for url in (
                *("localhost:8443", "http://localhost", "https://", "https://a:99999"),
                *("https://a:0", "https://a?b", "https://a#b", "https://u@a", ""),
            )
        ),
    ],
)
def test_invalid_settings_of_a_client_are_reported(texts, problem):
    assert problems_of(ClientSettings, **texts).startswith(problem)
