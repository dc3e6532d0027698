"""`kubelend dev bench agent`: CPU and memory of an agent in a cluster with constant load.

A real agent measures a simulated cluster with 50 pod events per second and advertises it to a real broker.
That it has processed every event is verified by its metrics, with `SimulationReplay`.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from kubelend.agent.ports import Change, PodDeleted
from kubelend.bench import measure
from kubelend.bench.measure import UsageWindow
from kubelend.core.errors import KubelendError, Unavailable, UnexpectedAnswer
from kubelend.core.pod_requests import Pod
from kubelend.envtest import processes
from kubelend.envtest.processes import AgentProcess, TemporaryDeployment
from kubelend.sources import simulation_spec
from kubelend.sources.simulation import SimulatedCluster
from kubelend.sources.simulation_spec import SimulationSpec

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
    described = simulation_spec.steady_simulation_spec(nodes, pods, EVENTS_PER_S)
    with processes.temporary_deployment() as deployment, deployment.broker() as broker:
        measure.show_progress("agent: starting")
        broker.wait_until_ready()
        file = _write_description(deployment, described)
        with deployment.agent(
            _CLUSTER_NAME, broker, file, "--metrics-bind-address=127.0.0.1:0"
        ) as agent:
            agent.wait_until_ready()
            time.sleep(min(_WARM_UP_SECONDS, seconds))
            before = _AllocationSample(agent)
            window = _measure_usage(agent, seconds)
            after = _AllocationSample(agent)
    measure.clear_progress()
    events = after.events_since(before, described)
    return AgentResult(pods, nodes, round(events, 1), window.rss_mb, window.cpu_percent)


def _write_description(deployment: TemporaryDeployment, described: SimulationSpec) -> Path:
    path = deployment.directory / f"{_CLUSTER_NAME}.yaml"
    # JSON is valid YAML.
    path.write_bytes(msgspec.json.encode(described))
    return path


def _measure_usage(agent: AgentProcess, seconds: float) -> UsageWindow:
    window = UsageWindow(agent.pid)
    end = time.perf_counter() + seconds
    while (left := end - time.perf_counter()) > 0:
        measure.show_progress(f"agent: {seconds - left:.0f} of {seconds:.0f} s measured")
        time.sleep(min(measure.SAMPLE_SECONDS, left))
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


class SimulationReplay:
    """A simulated cluster that has been replayed up to some event."""

    def __init__(self, description: SimulationSpec) -> None:
        self._simulation = SimulatedCluster(description)
        self._memory_by_pod: dict[str, int] = {}
        """Memory by pod, for pods on a node."""
        self._memory = 0
        self._apply_changes(self._simulation.snapshot().pods)

    def events_until(self, memory: int, most: int) -> int:
        """Replays until `memory` is allocated; returns the number of pod events.

        Raises if that state is not reached within `most` events.
        """
        events = 0
        while self._memory != memory:
            if events >= most or self._simulation.next_at is None:
                raise KubelendError(
                    f"the agent reports {memory} allocated bytes, which the simulation never reached"
                )
            events += self._apply_changes(self._simulation.step().changes)
        return events

    def _apply_changes(self, changes: Iterable[Change]) -> int:
        pods = [change for change in changes if isinstance(change, Pod | PodDeleted)]
        for pod in pods:
            self._memory -= self._memory_by_pod.pop(pod.id, 0)
            if isinstance(pod, Pod) and pod.node:
                self._memory_by_pod[pod.id] = pod.requests.memory
                self._memory += pod.requests.memory
        return len(pods)
