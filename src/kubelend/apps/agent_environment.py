"""The environment of an agent, built from its settings: cluster source, objects and clock.

The cluster is a real or a simulated one. Each needs libraries that the other does not, which are therefore
imported where they are used.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from kubelend.agent.advertisement import AdvertisementConfig
from kubelend.agent.ports import Clock, ClusterSource, HoldPods, LocalObjects
from kubelend.apps.agent_settings import AgentSettings
from kubelend.core.errors import InvalidInput, InvalidSettings
from kubelend.core.lending import LendingPolicy
from kubelend.kits import clock
from kubelend.sources import object_semantics
from kubelend.wire import admin_conversion, bodies
from kubelend.wire.events import EmitEvent, discard_event
from kubelend.wire.objects import (
    Advertisement,
    Object,
    ProviderInstruction,
    ReservationInstruction,
    ResourceRequest,
)

if TYPE_CHECKING:
    from kubelend.kube.client import Client
    from kubelend.kube.events import EventRecorder

EVENT_COMPONENT: Final = "kubelend-agent"
MAX_REQUESTS: Final = 6
"""Concurrent requests to the API server, watches apart: each needs a connection, which takes memory."""


class AgentEnvironment(NamedTuple):
    """The dependencies of an agent on its cluster."""

    source: ClusterSource
    objects: LocalObjects
    clock: Clock
    namespace: str
    """Namespace of instruction objects."""
    policy: LendingPolicy | None
    offer: OfferSettings
    object_error: Callable[[], str] = lambda: ""
    """Returns why some objects cannot be used; empty if all can."""
    watch_error: Callable[[], str] = lambda: ""
    """Returns why objects cannot be watched at all, which makes the agent unready."""
    close: Callable[[], None] = lambda: None
    client: Client | None = None
    """Client of a real cluster's API server."""
    events: EventRecorder | None = None
    """Writes Events; None if objects are not in Kubernetes."""
    hold_pods: HoldPods | None = None
    """Without it, lent resources are not held by placeholders."""

    @property
    def emit(self) -> EmitEvent:
        return discard_event if self.events is None else self.events.emit


class OfferSettings(NamedTuple):
    """What a cluster advertises besides its measured resources."""

    cost: bodies.Cost | None
    labels: dict[str, str]
    region: str
    policy: bodies.LendingPolicy | None


NO_OFFER_SETTINGS = OfferSettings(None, {}, "", None)


@asynccontextmanager
async def open_environment(settings: AgentSettings) -> AsyncIterator[AgentEnvironment]:
    """Opens the environment that the settings select."""
    if settings.source == "kubernetes":
        async with open_kubernetes_environment(settings) as environment:
            yield environment
    else:
        environment = simulated_environment(settings)
        try:
            yield environment
        finally:
            environment.close()


def advertising_settings(
    settings: AgentSettings, environment: AgentEnvironment, cluster: str
) -> AdvertisementConfig:
    return AdvertisementConfig(
        cluster_id=cluster,
        cluster_name=settings.cluster_name,
        cost=environment.offer.cost,
        labels=environment.offer.labels,
        region=environment.offer.region,
        policy=environment.offer.policy,
        endpoint_url=settings.endpoint_url,
        interval=settings.advertisement_requeue_interval,
        align=settings.align_to_clock,
        damping=settings.advertisement_damping,
        valid_for=settings.advertisement_validity,
        name=settings.advertisement_name,
        namespace=settings.advertisement_namespace,
    )


def pod_namespace() -> str:
    """Returns the validated POD_NAMESPACE, or an empty string."""
    found = os.environ.get("POD_NAMESPACE", "")
    try:
        object_semantics.parse_object_key(f"{found or 'default'}/any")
    except InvalidInput as error:
        raise InvalidSettings(f"POD_NAMESPACE: {error}") from error
    return found


def offer_settings(
    settings: AgentSettings, default: OfferSettings = NO_OFFER_SETTINGS
) -> OfferSettings:
    """Returns the offer from the flags, with values of `default` where flags are not set."""
    pairs = (pair.partition("=") for pair in settings.labels.split(",") if pair)
    labels = {key.strip(): value.strip() for key, _, value in pairs}
    costs = (settings.cpu_cost, settings.memory_cost, settings.gpu_cost, settings.storage_cost)
    return OfferSettings(
        cost=bodies.Cost(*costs, currency=settings.currency) if any(costs) else default.cost,
        labels=default.labels | labels,
        region=settings.region or default.region,
        policy=_read_policy(settings.policy_file),
    )


def lending_policy(settings: AgentSettings, offered: OfferSettings) -> LendingPolicy | None:
    """Returns the advertised lending policy in the form that the agent enforces."""
    if offered.policy is None:
        return None
    return admin_conversion.to_policy(offered.policy, settings.policy_file)


def _read_policy(path: str) -> bodies.LendingPolicy | None:
    if not path:
        return None
    from kubelend.wire import strict_yaml

    try:
        found = strict_yaml.load_yaml(Path(path).read_bytes()) or {}
        return strict_yaml.convert_strict(found, bodies.LendingPolicy)
    except OSError as error:
        reason = error.strerror
        raise InvalidSettings(f"--policy-file: {path} cannot be read: {reason}") from error
    except InvalidInput as error:
        hint = error.hint or "see docs/limits.md"
        raise InvalidSettings(f"--policy-file: {path}: {error.message}", hint=hint) from error


@asynccontextmanager
async def open_kubernetes_environment(settings: AgentSettings) -> AsyncIterator[AgentEnvironment]:
    """Opens the client without calling the API server: components report their own connection errors."""
    # Imported here: the agent of a simulated cluster does not need the Kubernetes client.
    from kubelend.kube import config
    from kubelend.kube.client import Client
    from kubelend.kube.events import EventRecorder
    from kubelend.sources.kubernetes import KubernetesSource
    from kubelend.sources.kubernetes_objects import KubernetesObjects

    namespace = settings.instruction_namespace or settings.advertisement_namespace
    offered = offer_settings(settings)
    policy = lending_policy(settings, offered)
    opened = Client.open(config.load_config(settings.kubeconfig), max_concurrent=MAX_REQUESTS)
    async with opened as client:
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
            client=client,
            events=EventRecorder(client, clock.utc_now, EVENT_COMPONENT),
            hold_pods=_hold_pods(settings, client, namespace),
        )


def _hold_pods(settings: AgentSettings, client: Client, namespace: str) -> HoldPods | None:
    if settings.hold == "none":
        return None
    from kubelend.sources.kubernetes_holds import KubernetesHoldPods

    return KubernetesHoldPods(
        client,
        namespace,
        os.environ.get("POD_NAME", "") or "kubelend-agent",
        clock.utc_now,
        image=settings.hold_image,
        priority_class=settings.hold_priority_class,
    )


def _namespaces_by_kind(settings: AgentSettings, namespace: str) -> dict[type[Object], str]:
    """Returns the namespace to watch for each kind, so that RBAC can be limited to it."""
    return {
        Advertisement: settings.advertisement_namespace,
        ResourceRequest: settings.request_namespace,
        ReservationInstruction: namespace,
        ProviderInstruction: namespace,
    }


def simulated_environment(settings: AgentSettings) -> AgentEnvironment:
    """Returns the environment; the caller must close it."""
    # Imported here: the agent of a real cluster does not need the simulation.
    from kubelend.sources import simulation_spec
    from kubelend.sources.file_objects import FileObjects
    from kubelend.sources.memory_objects import MemoryObjects
    from kubelend.sources.simulation import SimulatedSource

    described = simulation_spec.load_simulation_spec(Path(settings.simulation))
    described_offer = OfferSettings(described.cost, described.labels, described.region, None)
    offered = offer_settings(settings, described_offer)
    environment = AgentEnvironment(
        source=SimulatedSource(described, clock.utc_now),
        objects=MemoryObjects(clock.utc_now),
        clock=clock.utc_now,
        namespace=settings.instruction_namespace or settings.advertisement_namespace,
        policy=lending_policy(settings, offered),
        offer=offered,
    )
    if not settings.objects_dir:
        return environment
    files = FileObjects(Path(settings.objects_dir), clock.utc_now)
    return environment._replace(
        objects=files, object_error=lambda: files.problem, close=files.close
    )
