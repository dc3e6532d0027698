"""`kubelend dev bench restart`: start-up time of a broker with a large store."""

from __future__ import annotations

import msgspec

from kubelend.apps import trials
from kubelend.apps.trials import TemporaryDeployment
from kubelend.bench import fleets, histories, progress, timings
from kubelend.core.errors import KubelendError
from kubelend.kits import clock

_CLUSTER_COUNT = 1_000


class RestartResult(msgspec.Struct, frozen=True):
    """The result; its keys are API."""

    reservations: int
    clusters: int
    seconds: float
    """From the start of the process until /readyz is ok; median of all starts."""
    starts: list[float]


def measure_restart(reservations: int, starts: int) -> RestartResult:
    """Fills the store once, and starts the broker several times."""
    with trials.temporary_deployment() as trial:
        progress.show_progress(f"restart: writing {reservations:,} reservations")
        now = clock.utc_now()
        known = fleets.make_clusters(_CLUSTER_COUNT, now)
        histories.fill_store(trial.store, known, reservations, now)
        seconds = [_measure_start(trial, reservations, number) for number in range(1, starts + 1)]
    progress.clear_progress()
    return RestartResult(reservations, _CLUSTER_COUNT, round(timings.median(seconds), 3), seconds)


def _measure_start(trial: TemporaryDeployment, reservations: int, number: int) -> float:
    progress.show_progress(f"restart: start {number}")
    with trial.broker() as broker:
        seconds = broker.wait_until_ready()
        if broker.loaded_reservations() != reservations:
            raise KubelendError(f"the broker loaded {broker.loaded_reservations()} reservations")
    return round(seconds, 3)
