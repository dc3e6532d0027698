"""Fills a store through the same port as the broker does.

So a benchmark can start with a thousand clusters or a hundred thousand reservations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from random import Random

from kubelend.bench import fleets
from kubelend.core.events import Change
from kubelend.core.lifecycle import Phase, Reason
from kubelend.core.models import Cluster, Request, RequestKey, Reservation, ReservationId
from kubelend.core.resources import Resources
from kubelend.stores import opening

_COMMIT_SIZE = 2_000
_LIVE_SHARE = 5
"""One reservation in this many is live; the others have ended, but are still within their retention."""


def fill_store(
    store: Path | str, clusters: Sequence[Cluster], reservations: int, now: datetime
) -> None:
    """Creates a store with these clusters and a number of reservations."""
    changes = _make_changes(clusters, reservations, now)
    opened = opening.open_store(str(store))
    try:
        revision = 0
        while group := list(islice(changes, _COMMIT_SIZE)):
            revision += len(group)
            opened.commit(group, revision)
    finally:
        opened.close()


def _make_changes(
    clusters: Sequence[Cluster], reservations: int, now: datetime
) -> Iterator[Change]:
    random = Random(4)  # noqa: S311 - must be reproducible
    yield from clusters
    for number in range(reservations):
        yield _make_reservation(
            number, random.choice(clusters), len(clusters) + number + 1, now, random
        )


def _make_reservation(
    number: int, provider: Cluster, revision: int, now: datetime, random: Random
) -> Reservation:
    live = number % _LIVE_SHARE == 0
    age = timedelta(seconds=random.uniform(60, 1800))
    active = random.random() < 0.7
    return Reservation(
        id=ReservationId(f"rsv-{fleets.REQUESTER}-{number:013d}"),
        request=Request(
            requester=fleets.REQUESTER,
            resources=Resources(
                cpu=random.randint(1, 8) * 10, memory=random.randint(1, 64) * 2**20
            ),
            duration=fleets.DURATION,
            key=RequestKey(f"request-{number}"),
        ),
        created_at=now - age,
        phase=(Phase.ACTIVE if active else Phase.RESERVED) if live else Phase.RELEASED,
        reason=(Reason.IN_USE if active else Reason.LOCKED) if live else Reason.BY_REQUESTER,
        message=f"Locked on {provider.id}" if live else f"Released by requester {fleets.REQUESTER}",
        target=provider.id,
        ticket=revision,
        reserved_at=now - age,
        expires_at=now - age + fleets.DURATION,
        acknowledged_at=now - age + timedelta(milliseconds=80),
        activated_at=now - age + timedelta(seconds=5) if active else None,
        finished_at=None if live else now - age + timedelta(seconds=40),
        revision=revision,
    )
