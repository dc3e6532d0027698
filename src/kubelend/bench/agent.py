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
from kubelend.apps.trials import TemporaryDeployment
from kubelend.bench import progress, windows
from kubelend.bench.replays import SimulationReplay
from kubelend.bench.windows import UsageWindow
from kubelend.core.errors import Unavailable, UnexpectedAnswer
from kubelend.sources import descriptions
from kubelend.sources.descriptions import SimulationSpec

EVENTS_PER_S = 50

_CLUSTER_NAME = "steady"
_WARM_UP_SECONDS = 10.0
"""Maximum seconds of warm-up before the window."""
_ALLOCATED_METRIC = "kubelend_agent_allocated"
_METRICS_TIMEOUT = 10.0


class AgentResult(msgspec.Struct, frozen=True):
    """The result; its keys are API."""

    pods: int
    nodes: int
    events_per_s: float
    """Pod events that the agent processed per second."""
    rss_mb: float
    """Peak resident memory in MB (10^6 bytes)."""
    cpu_percent: float
    """Percent of one core."""


def measure_agent(pods: int, nodes: int, seconds: float) -> AgentResult:
    """Measures the agent of such a cluster for `seconds`, after it is ready and warmed up."""
    described = descriptions.steady_simulation_spec(nodes, pods, EVENTS_PER_S)
    with trials.temporary_deployment() as trial, trial.broker() as broker:
        progress.show_progress("agent: starting")
        broker.wait_until_ready()
        file = _write_description(trial, described)
        with trial.agent(
            _CLUSTER_NAME, broker, file, "--metrics-bind-address=127.0.0.1:0"
        ) as agent:
            agent.wait_until_ready()
            time.sleep(min(_WARM_UP_SECONDS, seconds))
            before = _AllocationSample(agent)
            window = _measure_usage(agent, seconds)
            after = _AllocationSample(agent)
    progress.clear_progress()
    events = after.events_since(before, described)
    return AgentResult(pods, nodes, round(events, 1), window.rss_mb, window.cpu_percent)


def _write_description(trial: TemporaryDeployment, described: SimulationSpec) -> Path:
    path = trial.directory / f"{_CLUSTER_NAME}.yaml"
    # JSON is valid YAML.
    path.write_bytes(msgspec.json.encode(described))
    return path


def _measure_usage(agent: AgentProcess, seconds: float) -> UsageWindow:
    window = UsageWindow(agent.pid)
    end = time.perf_counter() + seconds
    while (left := end - time.perf_counter()) > 0:
        progress.show_progress(f"agent: {seconds - left:.0f} of {seconds:.0f} s measured")
        time.sleep(min(windows.SAMPLE_SECONDS, left))
        if not agent.is_running:
            raise Unavailable("the agent exited unexpectedly", hint=agent.log_tail())
        window.sample()
    return window


class _AllocationSample:
    """The allocated memory that the agent reports at a moment."""

    def __init__(self, agent: AgentProcess) -> None:
        self.at = time.perf_counter()
        self.age = self.at - agent.started_at
        self.memory = _allocated_memory(_scrape_metrics(agent.port_of("metrics")))

    def events_since(self, earlier: _AllocationSample, described: SimulationSpec) -> float:
        """Returns the events processed per second, found by replaying the simulation."""
        replay, most = SimulationReplay(described), 2 * EVENTS_PER_S
        replay.events_until(earlier.memory, int(most * (earlier.age + _METRICS_TIMEOUT)))
        seconds = self.at - earlier.at
        return replay.events_until(self.memory, int(most * (seconds + _METRICS_TIMEOUT))) / seconds


def _scrape_metrics(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_METRICS_TIMEOUT)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def _allocated_memory(metrics: str) -> int:
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name == _ALLOCATED_METRIC and sample.labels == {"resource": "memory"}:
                return int(sample.value)
    raise UnexpectedAnswer(f"the agent's metrics do not contain {_ALLOCATED_METRIC} for memory")
