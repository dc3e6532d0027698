"""Wiring of the controllers and cluster namespaces, and the location of the broker's objects."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kubelend.apps.settings import KUBERNETES_PREFIX, BrokerSettings
from kubelend.broker.service import Broker
from kubelend.broker.speakers import AgentSessions
from kubelend.stores import kube_places
from kubelend.wire.conversion import RequestLimits

if TYPE_CHECKING:
    from kubelend.controllers.mailbox_pen import SignGrant
    from kubelend.controllers.mailboxes import ClusterNamespaces
    from kubelend.controllers.office import ControllerManager
    from kubelend.kube.access import KubeConfig

STREAM_TIMEOUT_FACTOR = 10
"""Multiple of `--agent-timeout` after which a silent agent's stream is closed. Its session can be claimed by
another agent much sooner, but an agent that only watches should not have to restart its stream often."""


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
    from kubelend.controllers.office import ControllerManager
    from kubelend.kube.client import Client

    access, namespace = _kubernetes_target(settings)
    async with Client.open(access) as client:
        yield ControllerManager(broker, client, namespace, terms)


@asynccontextmanager
async def open_cluster_namespaces(
    settings: BrokerSettings,
    broker: Broker,
    terms: RequestLimits,
    speakers: AgentSessions,
    granting: SignGrant | None,
) -> AsyncIterator[ClusterNamespaces]:
    """Opens the cluster namespaces, with their own connections. The store may be elsewhere."""
    silence = STREAM_TIMEOUT_FACTOR * settings.agent_timeout
    from kubelend.controllers.mailbox_pen import Dependencies
    from kubelend.controllers.mailboxes import ClusterNamespaces
    from kubelend.kube.client import Client

    access, namespace = _kubernetes_target(settings)
    async with Client.open(access) as client:
        means = Dependencies(client, broker, terms, speakers, granting, silence)
        yield ClusterNamespaces(means, namespace)


def _kubernetes_target(settings: BrokerSettings) -> tuple[KubeConfig, str]:
    text = resolved_store_url(settings)
    is_elsewhere = not text.startswith(KUBERNETES_PREFIX)
    place = kube_places.parse_kubernetes_url(
        settings.kubeconfig if is_elsewhere else text.removeprefix(KUBERNETES_PREFIX)
    )
    access = place.access()
    return access, place.namespace_for(access, settings.http_namespace)
