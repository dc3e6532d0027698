"""Wiring of the broker with Kubernetes: leader election, controllers and cluster namespaces."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol
from urllib.parse import urlsplit

import msgspec
import structlog

from kubelend.apps.settings import KUBERNETES_PREFIX, BrokerSettings
from kubelend.broker.agent_sessions import AgentSessions
from kubelend.broker.ports import NO_REPLICA, SINGLE_REPLICA, Clock, Leadership, Replica
from kubelend.broker.service import Broker
from kubelend.core.errors import KubelendError
from kubelend.pki.grants import GrantSigner
from kubelend.stores import factory
from kubelend.wire import bodies
from kubelend.wire.conversion import RequestLimits

if TYPE_CHECKING:
    from kubelend.controllers.cluster_namespaces.manager import ClusterNamespaces
    from kubelend.controllers.manager import ControllerManager
    from kubelend.kube.config import KubeConfig

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
    from kubelend.controllers.leader_label import LeaderLabel, OwnPod
    from kubelend.kube.client import Client
    from kubelend.kube.leader_election import LeaderElection, LeaseIdentity, LeaseTimings
    from kubelend.stores.kubernetes.store import KubernetesReplica

    access, namespace = _kubernetes_target(settings)
    async with Client.open(access) as client:
        times = LeaseTimings(
            settings.leader_elect_lease_duration,
            settings.leader_elect_renew_deadline,
            settings.leader_elect_retry_period,
        )
        # Unique even for two processes on one host.
        own_identity = f"{socket.gethostname()}_{secrets.token_hex(4)}"
        candidate = LeaseIdentity(settings.leader_elect_identity or own_identity, namespace)
        election = LeaderElection(client, candidate, times, clock, time.monotonic)
        tasks: dict[str, RootTask] = {"election": election}
        if settings.leader_label_pod:
            own = OwnPod(settings.leader_label_pod, os.environ.get("POD_NAMESPACE", namespace))
            tasks["leader label"] = LeaderLabel(client, own, election)
        try:
            yield LeadershipSetup(election, KubernetesReplica(access, namespace), tasks)
        finally:
            try:
                await election.release()
            except KubelendError as error:
                log.warning("Failed to release the lease; it will expire", error=str(error))


STREAM_TIMEOUT_FACTOR = 10
"""Multiple of `--agent-timeout` after which the stream of an agent without requests is closed. Its session
can be claimed by another agent much sooner, but an agent that only watches should not have to restart its
stream often."""


def resolved_store_url(settings: BrokerSettings) -> str:
    """Returns the store URL, with the path of `--kubeconfig` filled in if the URL has none."""
    text = settings.store_url
    if not settings.kubeconfig or not text.startswith(KUBERNETES_PREFIX):
        return text
    url = urlsplit(text.removeprefix(KUBERNETES_PREFIX))
    if url.path:
        return text
    return f"{KUBERNETES_PREFIX}{settings.kubeconfig}{f'?{url.query}' if url.query else ''}"


@asynccontextmanager
async def open_controllers(
    settings: BrokerSettings, broker: Broker, terms: RequestLimits
) -> AsyncIterator[ControllerManager]:
    """Opens the controller manager, for the namespace and cluster of the store."""
    # Imported here: a broker without custom resources does not load the Kubernetes client.
    from kubelend.controllers.manager import ControllerManager
    from kubelend.kube.client import Client

    access, namespace = _kubernetes_target(settings)
    async with Client.open(access) as client:
        yield ControllerManager(broker, client, namespace, terms)


@asynccontextmanager
async def open_cluster_namespaces(
    settings: BrokerSettings,
    broker: Broker,
    terms: RequestLimits,
    sessions: AgentSessions,
    signer: GrantSigner,
) -> AsyncIterator[ClusterNamespaces]:
    """Opens the cluster namespaces, with their own connections. The store may be elsewhere."""
    stream_timeout = STREAM_TIMEOUT_FACTOR * settings.agent_timeout
    from kubelend.controllers.cluster_namespaces.handlers import Dependencies
    from kubelend.controllers.cluster_namespaces.manager import ClusterNamespaces
    from kubelend.kube.client import Client

    access, namespace = _kubernetes_target(settings)
    async with Client.open(access) as client:
        keys = msgspec.convert(msgspec.to_builtins(signer.public), bodies.KeySet)
        dependencies = Dependencies(
            client, broker, terms, sessions, signer.grant, stream_timeout, keys
        )
        yield ClusterNamespaces(dependencies, namespace)


def _kubernetes_target(settings: BrokerSettings) -> tuple[KubeConfig, str]:
    text = resolved_store_url(settings)
    is_elsewhere = not text.startswith(KUBERNETES_PREFIX)
    store_url = factory.parse_kubernetes_url(
        settings.kubeconfig if is_elsewhere else text.removeprefix(KUBERNETES_PREFIX)
    )
    access = store_url.access()
    return access, store_url.namespace_for(access, settings.http_namespace)
