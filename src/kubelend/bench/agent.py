"""`kubelend dev bench agent`: CPU and memory of an agent in a cluster with constant load.

A real agent measures a simulated cluster with 50 pod events per second and advertises it to a real broker.
That it has processed every event is verified by its metrics, with `Replay`.
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
"""Maximum seconds of warm-up before the window."""
_IN_USE = "kubelend_agent_allocated"
_PATIENCE = 10.0


class Result(msgspec.Struct, frozen=True):
    """The result; its keys are API."""

    pods: int
    nodes: int
    events_per_s: float
    """Pod events that the agent processed per second."""
    rss_mb: float
    """Peak resident memory in MB (10^6 bytes)."""
    cpu_percent: float
    """Percent of one core."""


def measure(pods: int, nodes: int, seconds: float) -> Result:
    """Measures the agent of such a cluster for `seconds`, after it is ready and warmed up."""
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
    # JSON is valid YAML.
    path.write_bytes(msgspec.json.encode(described))
    return path


def _watched(agent: AgentProcess, seconds: float) -> Window:
    window = Window(agent.pid)
    end = time.perf_counter() + seconds
    while (left := end - time.perf_counter()) > 0:
        progress.say(f"agent: {seconds - left:.0f} of {seconds:.0f} s measured")
        time.sleep(min(windows.SAMPLE_SECONDS, left))
        if not agent.is_running:
            raise Unavailable("the agent exited unexpectedly", hint=agent.last_words())
        window.sample()
    return window


class _Look:
    """The allocated memory that the agent reports at a moment."""

    def __init__(self, agent: AgentProcess) -> None:
        self.at = time.perf_counter()
        self.age = self.at - agent.started_at
        self.memory = _memory_in_use(_metrics(agent.port_of("metrics")))

    def events_since(self, earlier: _Look, described: Description) -> float:
        """Returns the events processed per second, found by replaying the simulation."""
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
    raise UnexpectedAnswer(f"the agent's metrics do not contain {_IN_USE} for memory")
