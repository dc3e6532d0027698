"""`kubelend dev bench agent`: what a steady agent costs the cluster that it works for.

A real agent measures a simulated cluster, in which 50 pods come or go each second, and advertises it to a
real broker. That it has taken in every one of them is seen by its metrics, see `replays`.
"""

from __future__ import annotations

import http.client
import time
from pathlib import Path

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from kubelend.apps import trials
from kubelend.apps.children import AgentProcess
from kubelend.apps.trials import Trial
from kubelend.bench import progress, windows
from kubelend.bench.replays import Replay
from kubelend.bench.windows import Window
from kubelend.core.errors import Unavailable, UnexpectedAnswer
from kubelend.sources import descriptions
from kubelend.sources.descriptions import Description

EVENTS_PER_S = 50

_CLUSTER = "steady"
_WARM_UP = 10.0
"""Seconds before the window, but no longer than it: what a process does once it does in the beginning."""
_IN_USE = "kubelend_agent_allocated"
_PATIENCE = 10.0


class Result(msgspec.Struct, frozen=True):
    """The keys are API."""

    pods: int
    nodes: int
    events_per_s: float
    """Pods that came or went in the agent's books, each second."""
    rss_mb: float
    """The most that was seen, in millions of bytes."""
    cpu_percent: float
    """Of one core."""


def measure(pods: int, nodes: int, seconds: float) -> Result:
    """Watch the agent of such a cluster for so long, once it is ready and warm."""
    described = descriptions.steady(nodes, pods, EVENTS_PER_S)
    with trials.trial() as trial, trial.broker() as broker:
        progress.say("agent: starting")
        broker.wait_until_ready()
        file = _written(trial, described)
        with trial.agent(_CLUSTER, broker, file, "--metrics-bind-address=127.0.0.1:0") as agent:
            agent.wait_until_ready()
            time.sleep(min(_WARM_UP, seconds))
            before = _Look(agent)
            window = _watched(agent, seconds)
            after = _Look(agent)
    progress.done()
    events = after.events_since(before, described)
    return Result(pods, nodes, round(events, 1), window.rss_mb, window.cpu_percent)


def _written(trial: Trial, described: Description) -> Path:
    path = trial.directory / f"{_CLUSTER}.yaml"
    # What is JSON is YAML.
    path.write_bytes(msgspec.json.encode(described))
    return path


def _watched(agent: AgentProcess, seconds: float) -> Window:
    window = Window(agent.pid)
    end = time.perf_counter() + seconds
    while (left := end - time.perf_counter()) > 0:
        progress.say(f"agent: {seconds - left:.0f} of {seconds:.0f} s measured")
        time.sleep(min(windows.SAMPLE_SECONDS, left))
        if not agent.is_running:
            raise Unavailable("the agent has ended", hint=agent.last_words())
        window.sample()
    return window


class _Look:
    """What the agent says is in use at a moment."""

    def __init__(self, agent: AgentProcess) -> None:
        self.at = time.perf_counter()
        self.age = self.at - agent.started_at
        self.memory = _memory_in_use(_metrics(agent.port_of("metrics")))

    def events_since(self, earlier: _Look, described: Description) -> float:
        """How many the agent has taken in per second, by playing them again."""
        replay, most = Replay(described), 2 * EVENTS_PER_S
        replay.events_until(earlier.memory, int(most * (earlier.age + _PATIENCE)))
        seconds = self.at - earlier.at
        return replay.events_until(self.memory, int(most * (seconds + _PATIENCE))) / seconds


def _metrics(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def _memory_in_use(metrics: str) -> int:
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == _IN_USE and sample.labels == {"resource": "memory"}:
                return int(sample.value)
    raise UnexpectedAnswer(f"the agent's metrics have no {_IN_USE} of memory")
