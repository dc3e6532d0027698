"""Simulated clusters from a description's text, and all that happens in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kubelend.sources import simulation_spec
from kubelend.sources.simulation import SimulatedCluster

SECOND = 1_000_000
"""In microseconds, as a world counts."""


def world(text: str) -> SimulatedCluster:
    return SimulatedCluster(simulation_spec.parse_simulation_spec(text, "x.yaml"))


def events(found: SimulatedCluster) -> Iterator[tuple[float, Any]]:
    """Each change from here on, with its offset in seconds from the start."""
    while found.next_at is not None:
        at, changes = found.step()
        for change in changes:
            yield at / SECOND, change
