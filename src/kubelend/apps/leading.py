"""Who decides, for the broker's composition root: this process alone, or whoever holds the Lease."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

import structlog

from kubelend.apps import objects
from kubelend.apps.settings import KUBERNETES, BrokerSettings
from kubelend.broker.leadership import ALONE, NOBODY
from kubelend.broker.ports import Clock, Leadership, Replica
from kubelend.core.errors import KubelendError
from kubelend.stores import kube_places

if TYPE_CHECKING:
    from kubelend.controllers.election import Election

log = structlog.get_logger("kubelend.election")


class RootTask(Protocol):
    async def run(self) -> None:
        """Never returns."""


class Seat(NamedTuple):
    """What tells whether this broker leads, and what it goes by while it does not."""

    leadership: Leadership = ALONE
    replica: Replica = NOBODY
    tasks: dict[str, RootTask] = {}  # noqa: RUF012  # nobody changes it


@asynccontextmanager
async def seat(settings: BrokerSettings, clock: Clock) -> AsyncIterator[Seat]:
    """A store in a file has one broker; one in Kubernetes may have several, and a Lease beside it.

    At the end the lease is given back, so that another broker need not wait until it runs out.
    """
    if not settings.ledger.startswith(KUBERNETES):
        yield Seat()
        return
    # Late: a broker on a file does not load a client for Kubernetes.
    from kubelend.controllers.badges import Badge, OwnPod
    from kubelend.controllers.election import Candidate, Election, Times
    from kubelend.kube.client import Client
    from kubelend.stores.kube_replica import KubernetesReplica

    place = kube_places.parse(objects.ledger(settings).removeprefix(KUBERNETES))
    access = place.access()
    namespace = place.namespace_for(access, settings.http_namespace)
    async with Client.open(access) as client:
        times = Times(
            settings.leader_elect_lease_duration,
            settings.leader_elect_renew_deadline,
            settings.leader_elect_retry_period,
        )
        candidate = Candidate(settings.leader_elect_identity or _identity(), namespace)
        election = Election(client, candidate, times, clock, time.monotonic)
        tasks: dict[str, RootTask] = {"election": election}
        if settings.leader_label_pod:
            own = OwnPod(settings.leader_label_pod, os.environ.get("POD_NAMESPACE", namespace))
            tasks["badge"] = Badge(client, own, election)
        try:
            yield Seat(election, KubernetesReplica(access, namespace), tasks)
        finally:
            await _resign(election)


async def _resign(election: Election) -> None:
    try:
        await election.resign()
    except KubelendError as problem:
        log.warning("the lease was not given back", problem=str(problem))


def _identity() -> str:
    """Of this process and no other, also where two of them run on one host."""
    return f"{socket.gethostname()}_{secrets.token_hex(4)}"
