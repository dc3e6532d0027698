"""Writes by the API server's own count: what a broker writes counts, and nothing else does."""

import pytest

from kubelend.bench import kube


def line(
    value=1, verb="POST", group="broker.fluidos.eu", resource="reservations", part="", code=201
):
    labels = {
        "code": code,
        "component": "apiserver",
        "dry_run": "",
        "group": group,
        "resource": resource,
        "scope": "resource",
        "subresource": part,
        "verb": verb,
        "version": "v1alpha1",
    }
    said = ",".join(f'{name}="{text}"' for name, text in labels.items())
    return f"apiserver_request_total{{{said}}} {value}\n"


@pytest.mark.parametrize(
    "text, name",
    [
        pytest.param(line(), "POST reservations", id="made"),
        pytest.param(line(verb="PATCH", part="status"), "PATCH reservations/status", id="status"),
        pytest.param(line(verb="PUT", resource="ledgerrecords"), "PUT ledgerrecords", id="commit"),
        pytest.param(line(verb="DELETE"), "DELETE reservations", id="deleted"),
        pytest.param(line(group="", resource="events"), "POST events", id="event"),
        pytest.param(
            line(group="events.k8s.io", resource="events"), "POST events", id="newer event"
        ),
        pytest.param(
            line(group="rear.fluidos.eu", resource="providerinstructions"),
            "POST providerinstructions",
            id="instruction",
        ),
    ],
)
def test_writes_count_by_what_was_done_to_what(text, name):
    assert kube.count_writes(text) == {name: 1}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(line(verb="GET"), id="read"),
        pytest.param(line(verb="WATCH"), id="watched"),
        pytest.param(
            line(verb="PUT", group="coordination.k8s.io", resource="leases"), id="a lease"
        ),
        pytest.param(
            line(group="flowcontrol.apiserver.k8s.io", resource="flowschemas"),
            id="the server's own",
        ),
        pytest.param(line().replace("request_total", "request_terminations_total"), id="another"),
        pytest.param("# HELP apiserver_request_total Counter of requests.\n", id="a comment"),
        pytest.param("", id="nothing"),
    ],
)
def test_nothing_else_counts(text):
    assert kube.count_writes(text) == {}


def test_all_answers_to_one_kind_of_write_count_together():
    found = kube.count_writes(line(30) + line(2, code=409) + line("1e+03", verb="PATCH"))
    assert found == {"POST reservations": 32, "PATCH reservations": 1000}


def test_only_what_was_written_in_between_is_left():
    before, after = (
        kube.count_writes(line(30)),
        kube.count_writes(line(30) + line(5, verb="PUT")),
    )
    assert after - before == {"PUT reservations": 5}


def test_shares_come_largest_first():
    found = kube.count_writes(line(3, verb="PUT") + line(20))
    assert list(kube.writes_per_reservation(found, 20).items()) == [
        ("POST reservations", 1.0),
        ("PUT reservations", 0.15),
    ]
