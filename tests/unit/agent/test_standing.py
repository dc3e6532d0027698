"""A problem is logged when it begins and when it is over, and is there to be seen in between."""

import pytest
from structlog.testing import capture_logs

from kubelend.agent.health import ComponentHealth


@pytest.fixture
def health():
    return ComponentHealth()


@pytest.fixture
def lines():
    with capture_logs() as captured:
        yield captured


def events(lines):
    return [(line["event"], line["component"], line.get("error", "")) for line in lines]


def test_a_problem_is_logged_once_and_its_end_once(health, lines):
    for _ in range(3):
        health.report("publisher", "no broker")
    for _ in range(3):
        health.report("publisher")
    assert events(lines) == [
        ("Component unhealthy", "publisher", "no broker"),
        ("Component healthy", "publisher", ""),
    ]
    assert [line["log_level"] for line in lines] == ["warning", "info"]


def test_another_problem_is_logged_again(health, lines):
    health.report("publisher", "no broker")
    health.report("publisher", "revoked")
    assert [problem for _, _, problem in events(lines)] == ["no broker", "revoked"]
    assert health.errors == {"publisher": "revoked"}


def test_a_part_that_always_works_says_nothing(health, lines):
    health.report("publisher")
    assert lines == []
    assert health.errors == {}
    assert health.not_ready_reason == ""


def test_parts_do_not_hide_one_another(health):
    health.report("stream", "cut")
    health.report("publisher", "no broker")
    assert health.not_ready_reason == "publisher: no broker; stream: cut"
    health.report("stream")
    assert health.not_ready_reason == "publisher: no broker"


def test_it_is_unready_until_every_expected_part_has_reported(health):
    health.require("stream")
    health.require("collector")
    assert health.not_ready_reason == "collector: starting; stream: starting"
    health.report("collector")
    health.report("stream", "cut")
    assert health.not_ready_reason == "stream: cut"
    health.report("stream")
    assert health.not_ready_reason == ""


def test_what_was_asked_for_can_be_changed_without_harm(health):
    health.report("stream", "cut")
    health.errors.clear()
    assert health.errors == {"stream": "cut"}


def test_partial_trouble_is_told_and_leaves_the_agent_ready():
    health = ComponentHealth()
    health.report("peering", "paris does not answer", is_partial=True)
    assert health.errors == {"peering": "paris does not answer"}
    assert health.not_ready_reason == ""
    health.report("peering", "objects cannot be seen")
    assert health.not_ready_reason == "peering: objects cannot be seen"
