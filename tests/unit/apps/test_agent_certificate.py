"""The agent's certificate: children are started when it is time, and errors of a child are reported."""

import asyncio
import json
import sys
from contextlib import asynccontextmanager
from datetime import timedelta

import pytest

import make
from kubelend.agent.health import ComponentHealth
from kubelend.apps.agent_launcher import CERTIFICATE_COMPONENT, AgentCertificateRenewer
from waiting import PATIENCE

LATER = make.T0 + timedelta(days=200)
SHOWN = json.dumps({"name": "berlin", "renewAt": LATER.isoformat()})


class Reported(ComponentHealth):
    """Says when something was reported."""

    def __init__(self):
        super().__init__()
        self.reported = asyncio.Event()

    def report(self, component, error="", **details):
        assert component == CERTIFICATE_COMPONENT
        super().report(component, error, **details)
        self.reported.set()


class Children:
    """Stands for the interpreter: notes what it is started with, and answers as set."""

    def __init__(self, directory, monkeypatch):
        self.directory = directory
        self.notes = directory / "notes"
        self.script = directory / "python"
        monkeypatch.setattr(sys, "executable", str(self.script))
        self.answer(f"echo '{SHOWN}'")
        (directory / "tls.crt").write_text("a certificate")

    def answer(self, command):
        self.script.write_text(f'#!/bin/sh\necho "$4" >> {self.notes}\n{command}\n')
        self.script.chmod(0o755)

    @property
    def started(self):
        return self.notes.read_text().split() if self.notes.exists() else []


@pytest.fixture
def children(tmp_path, monkeypatch):
    return Children(tmp_path, monkeypatch)


@asynccontextmanager
async def renewing(children, renew_at=None, now=make.T0):
    health = Reported()
    renewer = AgentCertificateRenewer(
        children.directory, "https://localhost:1", health, lambda: now, renew_at
    )
    task = asyncio.create_task(renewer.run())
    try:
        async with asyncio.timeout(PATIENCE):
            await health.reported.wait()
        yield health
        assert not task.done()
    finally:
        task.cancel()


async def test_a_certificate_whose_time_is_known_and_far_starts_nothing(children):
    async with renewing(children, renew_at=LATER) as health:
        assert health.not_ready_reason == ""
    assert children.started == []


async def test_a_certificate_of_which_nothing_is_known_is_looked_at_once(children):
    async with renewing(children) as health:
        assert health.not_ready_reason == ""
    assert children.started == ["show"]


async def test_a_certificate_that_is_due_is_renewed_and_looked_at(children):
    async with renewing(children, renew_at=make.T0) as health:
        assert health.not_ready_reason == ""
    assert children.started == ["renew", "show"]


@pytest.mark.parametrize(
    "command, problem",
    [
        ("echo 'error: the broker is away' >&2; exit 6", "show`: the broker is away"),
        ("echo nonsense", "certificate show`: JSON is malformed"),
    ],
    ids=["failed", "unreadable"],
)
async def test_what_goes_wrong_in_a_child_is_reported_and_tried_again(children, command, problem):
    children.answer(command)
    async with renewing(children) as health:
        assert problem in health.not_ready_reason


async def test_a_child_that_cannot_be_started_does_not_end_the_agent(children):
    children.script.unlink()
    async with renewing(children) as health:
        assert "cannot be started: No such file" in health.not_ready_reason
