"""`kubelend dev bench restart`: start-up time of a broker with a large store."""

from __future__ import annotations

import msgspec

from kubelend.apps import trials
from kubelend.apps.trials import Trial
from kubelend.bench import fleets, histories, progress, timings
from kubelend.core.errors import KubelendError
from kubelend.kits import clock

_CLUSTERS = 1_000


class Result(msgspec.Struct, frozen=True):
    """The result; its keys are API."""

    reservations: int
    clusters: int
    seconds: float
    """From the start of the process until /readyz is ok; median of all starts."""
    starts: list[float]


def measure(reservations: int, starts: int) -> Result:
    """Fills the store once, and starts the broker several times."""
    with trials.trial() as trial:
        progress.say(f"restart: writing {reservations:,} reservations")
        now = clock.utc_now()
        known = fleets.clusters(_CLUSTERS, now)
        histories.write(trial.store, known, reservations, now)
        seconds = [_start(trial, reservations, number) for number in range(1, starts + 1)]
    progress.done()
    return Result(reservations, _CLUSTERS, round(timings.median(seconds), 3), seconds)


def _start(trial: Trial, reservations: int, number: int) -> float:
    progress.say(f"restart: start {number}")
    with trial.broker() as broker:
        seconds = broker.wait_until_ready()
        if broker.loaded() != reservations:
            raise KubelendError(f"the broker loaded {broker.loaded()} reservations")
    return round(seconds, 3)
