"""The agent environment for a simulated cluster with its own clock and network (`--source=simulated`)."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from kubelend.agent.ports import Clock
from kubelend.apps import surroundings
from kubelend.apps.agent_settings import AgentSettings
from kubelend.apps.surroundings import AgentEnvironment, OfferSettings
from kubelend.core import durations
from kubelend.kits import clock


def simulated_environment(settings: AgentSettings) -> AgentEnvironment:
    """Returns the environment; the caller must close it."""
    # Imported here: the agent of a real cluster does not need the simulation.
    from kubelend.sources import descriptions
    from kubelend.sources.files import FileObjects
    from kubelend.sources.memory import MemoryObjects
    from kubelend.sources.simulated import SimulatedSource

    described = descriptions.load_simulation_spec(Path(settings.simulation))
    now = _skewed_clock(durations.parse_duration(described.agent.clock_skew))
    described_offer = OfferSettings(described.cost, described.labels, described.region, None)
    offered = surroundings.offer_settings(settings, described_offer)
    around = AgentEnvironment(
        source=SimulatedSource(described, clock.utc_now),
        objects=MemoryObjects(now),
        clock=now,
        namespace=settings.instruction_namespace or surroundings.pod_namespace(),
        policy=surroundings.lending_policy(settings, offered),
        offer=offered,
        network_delay=durations.parse_duration(described.agent.network_delay),
        dies_after=durations.parse_duration(described.agent.dies_after or "0s"),
    )
    if not settings.objects_dir:
        return around
    files = FileObjects(Path(settings.objects_dir), now)
    return around._replace(objects=files, object_error=lambda: files.problem, close=files.close)


def _skewed_clock(skew: timedelta) -> Clock:
    return (lambda: clock.utc_now() + skew) if skew else clock.utc_now
