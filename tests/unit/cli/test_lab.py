"""How a lab looks to people."""

import pytest

from kubelend.cli import lab
from kubelend.lab import state
from kubelend.lab.state import LabDirectory, LabState
from kubelend.lab.walkthrough import ComponentStatus, LabHealth

RECORD = LabState(7, broker="https://localhost:1", kubectl="/opt/kubectl", store="kubernetes:///k")


def test_empty_tables_are_sentences():
    text = lab.health_text(LabHealth([ComponentStatus("broker", "ready", "broker.log")], [], []))
    assert text == (
        "COMPONENT  STATE  LOCATION\nbroker     ready  broker.log\n\n"
        "No advertisements.\n\nNo reservations."
    )


def test_problem_stands_beside_the_table_and_not_in_it():
    health = LabHealth([ComponentStatus("broker", "a long story about why", "broker.log")], [], [])
    assert lab.health_text(health).splitlines()[1] == "broker     NotReady  broker.log"
    assert health.problems[0] == "broker: a long story about why"


def test_agents_that_are_not_heard_are_a_problem():
    assert LabHealth([], [], []).problems == [
        "agent-cluster-1 does not advertise",
        "agent-cluster-2 does not advertise",
    ]


def test_directory_is_told_where_it_is_not_the_usual_one(tmp_path):
    there = lab.next_commands(LabDirectory(tmp_path / "a b"), RECORD)
    assert there[0] == f"export KUBELEND_LAB_DIRECTORY='{tmp_path}/a b'"
    usual = lab.next_commands(LabDirectory(state.default_directory()), RECORD)
    assert usual[0].startswith("export KUBECONFIG=")


@pytest.mark.parametrize("has_kubectl", [True, False])
def test_kubectl_is_named_so_that_it_is_found(tmp_path, monkeypatch, has_kubectl):
    if has_kubectl:
        (tmp_path / "kubectl").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = [
        line for line in lab.next_commands(LabDirectory(tmp_path), RECORD) if "get reserv" in line
    ]
    program = "kubectl" if has_kubectl else "/opt/kubectl"
    assert found == [f"{program} --context broker-cluster get reservations"]
