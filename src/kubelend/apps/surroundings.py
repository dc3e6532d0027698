"""The environment of an agent, built from its settings: cluster source, objects, clock and peering.

The cluster is a real or a simulated one. Each needs libraries that the other does not, which are therefore
imported where they are used.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from kubelend.agent.advertising import AdvertisementConfig
from kubelend.agent.ports import Clock, ClusterSource, LocalObjects, Peering
from kubelend.apps.agent_settings import AgentSettings
from kubelend.core.errors import InvalidInput, InvalidSettings
from kubelend.core.lending import LendingPolicy
from kubelend.peerings.liqoctl import LiqoctlPeering
from kubelend.peerings.none import NoPeering
from kubelend.sources import names
from kubelend.wire import bodies, limit_conversion

Callback = Callable[[], None]


async def _no_close() -> None: ...


class AgentEnvironment(NamedTuple):
    """The dependencies of an agent on its cluster."""

    source: ClusterSource
    objects: LocalObjects
    clock: Clock
    namespace: str
    """Namespace of instruction objects; empty for the namespace of each ResourceRequest."""
    policy: LendingPolicy | None
    offer: OfferSettings
    object_error: Callable[[], str] = lambda: ""
    """Returns why some objects cannot be used; empty if all can."""
    watch_error: Callable[[], str] = lambda: ""
    """Returns why objects cannot be watched at all, which makes the agent unready."""
    close: Callable[[], Awaitable[None]] = _no_close
    network_delay: timedelta = timedelta()
    dies_after: timedelta = timedelta()


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
        from kubelend.apps import real_cluster

        async with real_cluster.open_kubernetes_environment(settings) as around:
            yield around
    else:
        from kubelend.apps import simulated_cluster

        around = simulated_cluster.simulated_environment(settings)
        try:
            yield around
        finally:
            await around.close()


def advertising_settings(
    settings: AgentSettings, around: AgentEnvironment, cluster: str
) -> AdvertisementConfig:
    return AdvertisementConfig(
        cluster_id=cluster,
        cluster_name=settings.cluster_name,
        cost=around.offer.cost,
        labels=around.offer.labels,
        region=around.offer.region,
        policy=around.offer.policy,
        endpoint_url=settings.endpoint_url,
        interval=settings.advertisement_requeue_interval,
        align=settings.align_to_clock,
        damping=settings.advertisement_damping,
        valid_for=settings.advertisement_validity,
        name=settings.advertisement_name,
        namespace=settings.advertisement_namespace,
    )


def make_peering(settings: AgentSettings, cluster: str) -> Peering:
    """Returns the peering implementation; `auto` selects liqoctl if there are kubeconfigs."""
    if settings.peering == "none" or not settings.kubeconfigs_dir:
        return NoPeering()
    return LiqoctlPeering(
        Path(settings.kubeconfigs_dir),
        cluster,
        liqoctl=settings.liqoctl,
        kubectl=settings.kubectl,
        timeout=settings.peering_timeout,
    )


def pod_namespace() -> str:
    """Returns the validated POD_NAMESPACE, or an empty string."""
    found = os.environ.get("POD_NAMESPACE", "")
    try:
        names.parse_object_key(f"{found or 'default'}/any")
    except InvalidInput as problem:
        raise InvalidSettings(f"POD_NAMESPACE: {problem}") from problem
    return found


def offer_settings(
    settings: AgentSettings, default: OfferSettings = NO_OFFER_SETTINGS
) -> OfferSettings:
    """Returns the offer from the flags, with values from `otherwise` where flags are not set."""
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
    return limit_conversion.to_policy(offered.policy, settings.policy_file)


def _read_policy(path: str) -> bodies.LendingPolicy | None:
    if not path:
        return None
    from kubelend.sources import documents

    try:
        found = documents.load_yaml(Path(path).read_bytes()) or {}
        return documents.convert_strict(found, bodies.LendingPolicy)
    except OSError as problem:
        reason = problem.strerror
        raise InvalidSettings(f"--policy-file: {path} cannot be read: {reason}") from problem
    except InvalidInput as problem:
        hint = problem.hint or "see docs/limits.md"
        raise InvalidSettings(f"--policy-file: {path}: {problem.message}", hint=hint) from problem
