"""The settings of the processes: the flags that existing manifests use, their defaults and limits."""

import re
from datetime import timedelta
from pathlib import Path

import pytest

from kubelend.apps import flags
from kubelend.apps.flags import Address
from kubelend.apps.settings import BrokerSettings, ClientSettings
from kubelend.core.errors import InvalidSettings

CERTS = {"http_cert_path": "certs"}


def problems_of(record, **texts):
    with pytest.raises(InvalidSettings) as raised:
        flags.parse_settings(record, texts)
    return raised.value.message


@pytest.mark.parametrize(
    "name,default",
    [
        ("--broker-interface", "http"),
        ("--http-port", "8443"),
        ("--http-cert-path", ""),
        ("--http-namespace", "default"),
        ("--health-probe-bind-address", ":8081"),
        ("--metrics-bind-address", ":8080"),
        ("--leader-elect", "false"),
    ],
)
def test_the_published_flags_are_there_with_their_defaults(name, default):
    found = {flag.name: flag.default for flag in flags.flags_of(BrokerSettings)}
    assert found[name] == default


@pytest.mark.parametrize("record", [BrokerSettings, ClientSettings])
def test_every_flag_has_a_help_that_is_a_sentence(record):
    for flag in flags.flags_of(record):
        assert re.fullmatch(r"[A-Z].*\.", flag.help), flag


def test_the_defaults_are_valid():
    settings = flags.parse_settings(BrokerSettings, CERTS)
    assert settings == BrokerSettings(http_cert_path=Path("certs"))
    assert settings.problems() == []
    assert settings.stale_after == timedelta(minutes=10)


@pytest.mark.parametrize(
    "interface, serves",
    [
        ("http", (True, False)),
        ("kubernetes", (False, True)),
        ("http,kubernetes", (True, True)),
        ("kubernetes, http", (True, True)),
    ],
)
def test_interfaces_are_named_in_any_order(interface, serves):
    settings = flags.parse_settings(BrokerSettings, {**CERTS, "broker_interface": interface})
    assert (settings.serves_http, settings.serves_objects) == serves


def test_objects_need_no_certificates_and_are_the_store():
    settings = flags.parse_settings(BrokerSettings, {"broker_interface": "kubernetes"})
    assert settings.store_url == "kubernetes:"
    named = {"broker_interface": "kubernetes", "store": "kubernetes:?namespace=hub"}
    assert flags.parse_settings(BrokerSettings, named).store_url == "kubernetes:?namespace=hub"
    assert flags.parse_settings(BrokerSettings, CERTS).store_url == "kubelend.db"


def test_certificates_are_needed_for_http():
    told = problems_of(BrokerSettings, broker_interface="kubernetes,http")
    assert told == "--http-cert-path: required; set the flag or KUBELEND_HTTP_CERT_PATH"


def test_zero_turns_a_listener_off():
    settings = flags.parse_settings(BrokerSettings, {**CERTS, "metrics_bind_address": "0"})
    assert settings.metrics_bind_address is None
    assert settings.health_probe_bind_address == Address("", 8081)


@pytest.mark.parametrize(
    "texts,problem",
    [
        ({"http_port": "65536"}, "--http-port: must be from 0 to 65535"),
        ({"http_port": "-1"}, "--http-port: must be from 0 to 65535"),
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
        ({"metrics_bind_address": ":8081"}, ":8081 is already used by --health-probe-bind-address"),
        ({"metrics_bind_address": ":8443"}, "is already used by the REST interface"),
        ({"log_level": "loud"}, "--log-level: 'loud' is not supported"),
        ({"enrol_port": "65536"}, "--enrol-port: must be from 0 to 65535"),
        ({"ca_path": "ca", "enrol_port": "8443"}, "--enrol-port: must differ from --http-port"),
        ({"certificate_lifetime": "9s"}, "--certificate-lifetime: must be at least 10s"),
    ],
)
def test_what_cannot_run_is_told(texts, problem):
    assert problem in problems_of(BrokerSettings, **CERTS, **texts)


@pytest.mark.parametrize(
    "texts",
    [
        {"http_port": "0", "metrics_bind_address": ":0", "health_probe_bind_address": ":0"},
        {"rate_limit": "0", "max_wait": "0", "max_waiting": "0", "retention": "0"},
        {"lost_after": "0"},
        {"leader_elect": "true"},
        {"http_host": "127.0.0.1", "metrics_bind_address": "127.0.0.2:8443"},
        {"enrol_port": "8443"},
    ],
    ids=[
        "free ports",
        "no limits",
        "nobody is given up",
        "leader election",
        "another address",
        "no authority",
    ],
)
def test_what_can_run_is_taken(texts):
    assert flags.parse_settings(BrokerSettings, {**CERTS, **texts}).problems() == []


def test_a_client_needs_to_know_who_it_is():
    assert "--cert-path: required; set the flag or KUBELEND_CERT_PATH" in problems_of(
        ClientSettings
    )


@pytest.mark.parametrize(
    "url",
    ["https://localhost:8443", "https://broker.example.org", "https://[::1]:1", "https://a/prefix"],
)
def test_an_address_of_a_broker_is_taken(url):
    assert (
        flags.parse_settings(ClientSettings, {"cert_path": "c", "broker_url": url}).broker_url
        == url
    )


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8443",
        "http://localhost",
        "https://",
        "https://a:99999",
        "https://a?b",
        "https://u@a",
        "",
    ],
)
def test_what_is_no_address_of_a_broker_is_refused(url):
    told = problems_of(ClientSettings, cert_path="c", broker_url=url)
    assert told.startswith(f"--broker-url: {url!r} is not a broker URL")


def test_a_client_does_not_wait_for_no_time():
    told = problems_of(ClientSettings, cert_path="c", timeout="0")
    assert told == "--timeout: must be at least 1ms"
