"""Where an agent lives: its cluster, objects, clock and peering, as its settings say."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from kubelend.agent.advertising import Advertising
from kubelend.agent.ports import Clock, ClusterSource, LocalObjects, Peering
from kubelend.apps.agent_settings import AgentSettings
from kubelend.core import durations
from kubelend.core.errors import InvalidInput, InvalidSettings
from kubelend.core.lending import LendingPolicy
from kubelend.kits import clock
from kubelend.peerings.liqoctl import LiqoctlPeering
from kubelend.peerings.none import NoPeering
from kubelend.sources import descriptions, documents, names
from kubelend.sources.descriptions import Description
from kubelend.sources.files import FileObjects
from kubelend.sources.memory import MemoryObjects
from kubelend.sources.simulated import SimulatedSource
from kubelend.wire import bodies, limit_conversion

Callback = Callable[[], None]


async def _nothing() -> None: ...


class Surroundings(NamedTuple):
    """What the agent is put into."""

    source: ClusterSource
    objects: LocalObjects
    clock: Clock
    namespace: str
    """Of the objects that instructions become; empty for each request's own."""
    policy: LendingPolicy | None
    offer: Offer
    problem: Callable[[], str] = lambda: ""
    """Why not all of the objects can be used."""
    close: Callable[[], Awaitable[None]] = _nothing
    network_delay: timedelta = timedelta()
    dies_after: timedelta = timedelta()


class Offer(NamedTuple):
    """What the cluster says of itself besides what is measured."""

    cost: bodies.Cost | None
    labels: dict[str, str]
    region: str
    policy: bodies.LendingPolicy | None


def of(settings: AgentSettings) -> Surroundings:
    """A simulated cluster, with its own clock and network."""
    described = descriptions.load(Path(settings.simulation))
    now = _clock(durations.parse(described.agent.clock_skew))
    policy = _policy(settings.policy_file)
    around = Surroundings(
        source=SimulatedSource(described, clock.utc_now),
        objects=MemoryObjects(now),
        clock=now,
        namespace=settings.instruction_namespace or _pod_namespace(),
        policy=None if policy is None else limit_conversion.to_policy(policy, settings.policy_file),
        offer=_offer(settings, described, policy),
        network_delay=durations.parse(described.agent.network_delay),
        dies_after=durations.parse(described.agent.dies_after or "0s"),
    )
    if not settings.objects_dir:
        return around
    files = FileObjects(Path(settings.objects_dir), now)
    return around._replace(objects=files, problem=lambda: files.problem, close=files.close)


def advertising(settings: AgentSettings, around: Surroundings, cluster: str) -> Advertising:
    return Advertising(
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


def peering(settings: AgentSettings, cluster: str) -> Peering:
    """With `auto`, liqoctl where there are kubeconfigs for it."""
    if settings.peering == "none" or not settings.kubeconfigs_dir:
        return NoPeering()
    return LiqoctlPeering(
        Path(settings.kubeconfigs_dir),
        cluster,
        liqoctl=settings.liqoctl,
        kubectl=settings.kubectl,
        timeout=settings.peering_timeout,
    )


def _clock(skew: timedelta) -> Clock:
    return (lambda: clock.utc_now() + skew) if skew else clock.utc_now


def _pod_namespace() -> str:
    found = os.environ.get("POD_NAMESPACE", "")
    try:
        names.parse(f"{found or 'default'}/any")
    except InvalidInput as problem:
        raise InvalidSettings(f"POD_NAMESPACE: {problem}") from problem
    return found


def _offer(
    settings: AgentSettings, described: Description, policy: bodies.LendingPolicy | None
) -> Offer:
    """What the flags say, and where they say nothing, the description."""
    pairs = (pair.partition("=") for pair in settings.labels.split(",") if pair)
    labels = {key.strip(): value.strip() for key, _, value in pairs}
    costs = (settings.cpu_cost, settings.memory_cost, settings.gpu_cost, settings.storage_cost)
    return Offer(
        cost=bodies.Cost(*costs, currency=settings.currency) if any(costs) else described.cost,
        labels=described.labels | labels,
        region=settings.region or described.region,
        policy=policy,
    )


def _policy(path: str) -> bodies.LendingPolicy | None:
    if not path:
        return None
    try:
        found = documents.values(Path(path).read_bytes()) or {}
        return documents.written(found, bodies.LendingPolicy)
    except OSError as problem:
        why = problem.strerror
        raise InvalidSettings(f"--policy-file: {path} cannot be read: {why}") from problem
    except InvalidInput as problem:
        hint = problem.hint or "see docs/limits.md"
        raise InvalidSettings(f"--policy-file: {path}: {problem.message}", hint=hint) from problem
