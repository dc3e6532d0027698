"""A cluster of Kubernetes for an agent to live in (`--source=kubernetes`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kubelend.apps import surroundings
from kubelend.apps.agent_settings import AgentSettings
from kubelend.apps.surroundings import Surroundings
from kubelend.kits import clock
from kubelend.kube import access
from kubelend.kube.client import Client
from kubelend.sources.kube_objects import KubernetesObjects
from kubelend.sources.kubernetes import KubernetesSource
from kubelend.wire.objects import (
    Advertisement,
    Object,
    ProviderInstruction,
    ReservationInstruction,
    ResourceRequest,
)


@asynccontextmanager
async def opened(settings: AgentSettings) -> AsyncIterator[Surroundings]:
    """Nothing is asked of the API server yet: that it is away is told by who needs it."""
    namespace = _namespace(settings)
    offered = surroundings.offer(settings)
    policy = surroundings.lending(settings, offered)
    async with Client.open(access.find(settings.kubeconfig)) as client:
        objects = KubernetesObjects(client, _places(settings, namespace))
        yield Surroundings(
            source=KubernetesSource(client),
            objects=objects,
            clock=clock.utc_now,
            namespace=namespace,
            policy=policy,
            offer=offered,
            problem=lambda: objects.problem,
            unseen=lambda: objects.unseen,
        )


def _namespace(settings: AgentSettings) -> str:
    """Of what instructions become. An agent that sees requests in one namespace only needs no other."""
    given = settings.instruction_namespace or surroundings.pod_namespace()
    return given or settings.request_namespace


def _places(settings: AgentSettings, namespace: str) -> dict[type[Object], str]:
    """Where each kind is looked for: roles can be as narrow as that."""
    return {
        Advertisement: settings.advertisement_namespace,
        ResourceRequest: settings.request_namespace,
        ReservationInstruction: namespace,
        ProviderInstruction: namespace or "default",
    }
