"""Wiring of the broker with Kubernetes: leader election, controllers and cluster namespaces."""

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
from kubelend.apps.settings import KUBERNETES_PREFIX, BrokerSettings
from kubelend.broker.leadership import NO_REPLICA, SINGLE_REPLICA
from kubelend.broker.ports import Clock, Leadership, Replica
from kubelend.core.errors import KubelendError
from kubelend.stores import kube_places

if TYPE_CHECKING:
    from kubelend.controllers.election import LeaderElection

log = structlog.get_logger("kubelend.election")


class RootTask(Protocol):
    async def run(self) -> None:
        """Runs until cancelled."""


class LeadershipSetup(NamedTuple):
    """How this broker determines whether it leads, and what it reads from while it follows."""

    leadership: Leadership = SINGLE_REPLICA
    replica: Replica = NO_REPLICA
    tasks: dict[str, RootTask] = {}  # noqa: RUF012  # never modified


@asynccontextmanager
async def open_leadership(settings: BrokerSettings, clock: Clock) -> AsyncIterator[LeadershipSetup]:
    """Sets up leader election for a Kubernetes store. A file store has a single broker, which always leads.

    At exit the lease is released, so that another broker need not wait until it expires.
    """
    if not settings.store_url.startswith(KUBERNETES_PREFIX):
        yield LeadershipSetup()
        return
    # Imported here: a broker with a file store does not load the Kubernetes client.
    from kubelend.controllers.badges import LeaderLabel, OwnPod
    from kubelend.controllers.election import LeaderElection, LeaseIdentity, LeaseTimings
    from kubelend.kube.client import Client
    from kubelend.stores.kube_replica import KubernetesReplica

    place = kube_places.parse_kubernetes_url(
        objects.resolved_store_url(settings).removeprefix(KUBERNETES_PREFIX)
    )
    access = place.access()
    namespace = place.namespace_for(access, settings.http_namespace)
    async with Client.open(access) as client:
        times = LeaseTimings(
            settings.leader_elect_lease_duration,
            settings.leader_elect_renew_deadline,
            settings.leader_elect_retry_period,
        )
        candidate = LeaseIdentity(settings.leader_elect_identity or _default_identity(), namespace)
        election = LeaderElection(client, candidate, times, clock, time.monotonic)
        tasks: dict[str, RootTask] = {"election": election}
        if settings.leader_label_pod:
            own = OwnPod(settings.leader_label_pod, os.environ.get("POD_NAMESPACE", namespace))
            tasks["badge"] = LeaderLabel(client, own, election)
        try:
            yield LeadershipSetup(election, KubernetesReplica(access, namespace), tasks)
        finally:
            await _release_lease(election)


async def _release_lease(election: LeaderElection) -> None:
    try:
        await election.release()
    except KubelendError as problem:
        log.warning("Failed to release the lease; it will expire", error=str(problem))


def _default_identity() -> str:
    """Returns an identity that is unique even for two processes on one host."""
    return f"{socket.gethostname()}_{secrets.token_hex(4)}"
