"""A problem is told when it begins and when it is over, and is there to be seen in between."""

import pytest
from structlog.testing import capture_logs

from kubelend.agent.health import ComponentHealth


@pytest.fixture
def standing():
    return ComponentHealth()


@pytest.fixture
def lines():
    with capture_logs() as captured:
        yield captured


def events(lines):
    return [(line["event"], line["component"], line.get("error", "")) for line in lines]


def test_a_problem_is_told_once_and_its_end_once(standing, lines):
    for _ in range(3):
        standing.report("publisher", "no broker")
    for _ in range(3):
        standing.report("publisher")
    assert events(lines) == [
        ("Component unhealthy", "publisher", "no broker"),
        ("Component healthy", "publisher", ""),
    ]
    assert [line["log_level"] for line in lines] == ["warning", "info"]


def test_another_problem_is_told_again(standing, lines):
    standing.report("publisher", "no broker")
    standing.report("publisher", "revoked")
    assert [problem for _, _, problem in events(lines)] == ["no broker", "revoked"]
    assert standing.errors == {"publisher": "revoked"}


def test_a_part_that_always_works_says_nothing(standing, lines):
    standing.report("publisher")
    assert lines == []
    assert standing.errors == {}
    assert standing.not_ready_reason == ""


def test_parts_do_not_hide_one_another(standing):
    standing.report("stream", "cut")
    standing.report("publisher", "no broker")
    assert standing.not_ready_reason == "publisher: no broker; stream: cut"
    standing.report("stream")
    assert standing.not_ready_reason == "publisher: no broker"


def test_it_is_unready_until_every_expected_part_has_reported(standing):
    standing.require("stream")
    standing.require("collector")
    assert standing.not_ready_reason == "collector: starting; stream: starting"
    standing.report("collector")
    standing.report("stream", "cut")
    assert standing.not_ready_reason == "stream: cut"
    standing.report("stream")
    assert standing.not_ready_reason == ""


def test_what_was_asked_for_can_be_changed_without_harm(standing):
    standing.report("stream", "cut")
    standing.errors.clear()
    assert standing.errors == {"stream": "cut"}


def test_partial_trouble_is_told_and_leaves_the_agent_ready():
    standing = ComponentHealth()
    standing.report("peering", "paris does not answer", is_partial=True)
    assert standing.errors == {"peering": "paris does not answer"}
    assert standing.not_ready_reason == ""
    standing.report("peering", "objects cannot be seen")
    assert standing.not_ready_reason == "peering: objects cannot be seen"
