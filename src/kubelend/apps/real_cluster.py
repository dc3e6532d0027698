"""The agent environment for a Kubernetes cluster (`--source=kubernetes`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kubelend.apps import surroundings
from kubelend.apps.agent_settings import AgentSettings
from kubelend.apps.surroundings import AgentEnvironment
from kubelend.kits import clock
from kubelend.wire.objects import (
    Advertisement,
    Object,
    ProviderInstruction,
    ReservationInstruction,
    ResourceRequest,
)


@asynccontextmanager
async def open_kubernetes_environment(settings: AgentSettings) -> AsyncIterator[AgentEnvironment]:
    """Opens the client without calling the API server: components report their own connection errors."""
    # Imported here: the agent of a simulated cluster does not need the Kubernetes client.
    from kubelend.kube import access
    from kubelend.kube.client import Client
    from kubelend.sources.kube_objects import KubernetesObjects
    from kubelend.sources.kubernetes import KubernetesSource

    namespace = _instruction_namespace(settings)
    offered = surroundings.offer_settings(settings)
    policy = surroundings.lending_policy(settings, offered)
    async with Client.open(access.load_config(settings.kubeconfig)) as client:
        objects = KubernetesObjects(client, _namespaces_by_kind(settings, namespace))
        yield AgentEnvironment(
            source=KubernetesSource(client),
            objects=objects,
            clock=clock.utc_now,
            namespace=namespace,
            policy=policy,
            offer=offered,
            object_error=lambda: objects.problem,
            watch_error=lambda: objects.watch_problem,
        )


def _instruction_namespace(settings: AgentSettings) -> str:
    """Namespace of instruction objects. Defaults to the only namespace that the agent watches."""
    given = settings.instruction_namespace or surroundings.pod_namespace()
    return given or settings.request_namespace


def _namespaces_by_kind(settings: AgentSettings, namespace: str) -> dict[type[Object], str]:
    """Returns the namespace to watch for each kind, so that RBAC can be limited to it."""
    return {
        Advertisement: settings.advertisement_namespace,
        ResourceRequest: settings.request_namespace,
        ReservationInstruction: namespace,
        ProviderInstruction: namespace or "default",
    }
