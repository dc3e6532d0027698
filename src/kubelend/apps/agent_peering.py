"""Selects how the agent peers with other clusters, and builds both sides of it.

With Liqo installed in the agent's cluster its objects are used directly; liqoctl is for those who have the
kubeconfigs of their providers. The modules are imported where they are used, to save the agent's memory.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import structlog

from kubelend.agent.holds import HoldTable
from kubelend.agent.ports import HandshakeExchange, Peering
from kubelend.agent.reservation_cache import LIVE_PHASES, ReservationCache
from kubelend.apps.agent_environment import AgentEnvironment
from kubelend.apps.agent_settings import AgentSettings
from kubelend.core.errors import InvalidSettings, KubelendError
from kubelend.kits import subprocesses
from kubelend.wire import quantities

if TYPE_CHECKING:
    from kubelend.peerings.liqo_provider import LentReservation, LiqoProvider

CSR_TIMEOUT: Final = timedelta(seconds=30)
DETECTION_RETRY_SECONDS: Final = 2.0

log = structlog.get_logger("kubelend.agent")


class AgentPeering(NamedTuple):
    """Both sides of the peering: with providers, and of requesters with this cluster."""

    requester: Peering | None
    """None if no peering is configured."""
    provider: LiqoProvider | None = None


async def select_peering(settings: AgentSettings, environment: AgentEnvironment) -> str:
    """Returns the mode: `auto` is liqoctl with kubeconfigs, liqo if its kinds are installed, else none."""
    if settings.peering != "auto":
        return settings.peering
    if settings.kubeconfigs_dir:
        return "liqoctl"
    return "liqo" if await _is_liqo_installed(environment) else "none"


async def _is_liqo_installed(environment: AgentEnvironment) -> bool:
    if environment.client is None:
        return False
    from kubelend.peerings import liqo_api

    reported = ""
    while True:
        try:
            return await liqo_api.is_installed(environment.client)
        except KubelendError as error:
            if str(error) != reported:
                reported = str(error)
                log.warning("Detection of Liqo failed, will retry", error=reported)
        await asyncio.sleep(DETECTION_RETRY_SECONDS)


def make_peering(
    mode: str,
    settings: AgentSettings,
    cluster: str,
    environment: AgentEnvironment,
    exchange: HandshakeExchange,
    lent: Callable[[], Mapping[str, LentReservation]],
) -> AgentPeering:
    if mode == "liqo":
        return _liqo_peering(settings, environment, exchange, lent)
    if mode == "liqoctl":
        from kubelend.peerings.liqoctl import LiqoctlPeering

        return AgentPeering(
            LiqoctlPeering(
                Path(settings.kubeconfigs_dir),
                cluster,
                liqoctl=settings.liqoctl,
                kubectl=settings.kubectl,
                timeout=settings.peering_timeout,
            )
        )
    return AgentPeering(None)


def _liqo_peering(
    settings: AgentSettings,
    environment: AgentEnvironment,
    exchange: HandshakeExchange,
    lent: Callable[[], Mapping[str, LentReservation]],
) -> AgentPeering:
    from kubelend.peerings.liqo import LiqoPeering
    from kubelend.peerings.liqo_api import LiqoApi
    from kubelend.peerings.liqo_provider import LiqoProvider
    from kubelend.peerings.liqo_removal import RemovalLimits

    if environment.client is None:
        raise InvalidSettings("--peering=liqo: only valid with --source=kubernetes")
    api = LiqoApi(environment.client, settings.liqo_namespace)
    provider = LiqoProvider(api, exchange, lent, environment.clock)
    limits = RemovalLimits(settings.drain_timeout, settings.force_unpeer_after)
    requester = LiqoPeering(api, exchange, sign_request, limits, environment.clock)
    return AgentPeering(requester, provider)


def lent_reservations(
    cluster: str, holds: HoldTable, reservations: ReservationCache
) -> dict[str, LentReservation]:
    """Returns the live reservations that this cluster holds, by ID."""
    from kubelend.peerings.liqo_provider import LentReservation

    known = filter(None, map(reservations.find, holds))
    return {
        found.id: LentReservation(
            found.requester_id,
            quantities.parse_requested(found.requested_resources, "requestedResources"),
            found.status.reserved_at,
        )
        for found in known
        if found.target_cluster_id == cluster and found.status.phase in LIVE_PHASES
    }


async def sign_request(private_key: str, cluster_id: str) -> str:
    """Makes Liqo's certificate signing request; the key goes to a child process by its standard input."""
    output = await subprocesses.run_program(
        sys.executable,
        *("-P", "-m", "kubelend.pki.liqo_csr", cluster_id),
        name="signing of a certificate request",
        timeout=CSR_TIMEOUT,
        stdin=private_key.encode(),
    )
    return output.decode().strip()
