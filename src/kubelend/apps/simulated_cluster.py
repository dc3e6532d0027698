"""The agent environment for a simulated cluster with its own clock and network (`--source=simulated`)."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from kubelend.agent.ports import Clock
from kubelend.apps import surroundings
from kubelend.apps.agent_settings import AgentSettings
from kubelend.apps.surroundings import Offer, Surroundings
from kubelend.core import durations
from kubelend.kits import clock


def of(settings: AgentSettings) -> Surroundings:
    """Returns the environment; the caller must close it."""
    # Imported here: the agent of a real cluster does not need the simulation.
    from kubelend.sources import descriptions
    from kubelend.sources.files import FileObjects
    from kubelend.sources.memory import MemoryObjects
    from kubelend.sources.simulated import SimulatedSource

    described = descriptions.load(Path(settings.simulation))
    now = _clock(durations.parse(described.agent.clock_skew))
    described_offer = Offer(described.cost, described.labels, described.region, None)
    offered = surroundings.offer(settings, described_offer)
    around = Surroundings(
        source=SimulatedSource(described, clock.utc_now),
        objects=MemoryObjects(now),
        clock=now,
        namespace=settings.instruction_namespace or surroundings.pod_namespace(),
        policy=surroundings.lending(settings, offered),
        offer=offered,
        network_delay=durations.parse(described.agent.network_delay),
        dies_after=durations.parse(described.agent.dies_after or "0s"),
    )
    if not settings.objects_dir:
        return around
    files = FileObjects(Path(settings.objects_dir), now)
    return around._replace(objects=files, problem=lambda: files.problem, close=files.close)


def _clock(skew: timedelta) -> Clock:
    return (lambda: clock.utc_now() + skew) if skew else clock.utc_now
