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

import msgspec
import structlog

from kubelend.agent.ports import HandshakeExchange, Peering
from kubelend.agent.reservation_cache import LIVE_PHASES, ReservationCache
from kubelend.apps.agent_environment import AgentEnvironment
from kubelend.apps.agent_settings import AgentSettings
from kubelend.core.errors import InvalidSettings, KubelendError
from kubelend.core.inventory import Hold
from kubelend.kits import subprocesses
from kubelend.wire import bodies, quantities

if TYPE_CHECKING:
    from kubelend.peerings.liqo_provider import LiqoProvider
    from kubelend.peerings.slice_decision import LentReservation

CHILD_TIMEOUT: Final = timedelta(seconds=30)
"""Of a child process that uses `cryptography`."""
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
    grant_of: Callable[[str], str],
) -> AgentPeering:
    if mode == "liqo":
        return _liqo_peering(settings, cluster, environment, exchange, lent, grant_of)
    if mode == "liqoctl":
        from kubelend.peerings.liqoctl import LiqoctlPeering

        return AgentPeering(
            LiqoctlPeering(
                Path(settings.kubeconfigs_dir),
                cluster,
                exchange=exchange,
                liqoctl=settings.liqoctl,
                kubectl=settings.kubectl,
                timeout=settings.peering_timeout,
            )
        )
    return AgentPeering(None)


def _liqo_peering(
    settings: AgentSettings,
    cluster: str,
    environment: AgentEnvironment,
    exchange: HandshakeExchange,
    lent: Callable[[], Mapping[str, LentReservation]],
    grant_of: Callable[[str], str],
) -> AgentPeering:
    from kubelend.peerings.liqo import LiqoPeering
    from kubelend.peerings.liqo_api import LiqoApi
    from kubelend.peerings.liqo_provider import GrantVerifier, LiqoProvider, ProviderOptions
    from kubelend.peerings.liqo_removal import RemovalLimits

    if environment.client is None:
        raise InvalidSettings("--peering=liqo: only valid with --source=kubernetes")
    api = LiqoApi(environment.client, settings.liqo_namespace)
    options = ProviderOptions(cluster, settings.reclaim_after)
    verifier = GrantVerifier(exchange.grant_keys, verify_grant)
    provider = LiqoProvider(options, api, exchange, verifier, lent, environment.clock, grant_of)
    limits = RemovalLimits(settings.drain_timeout, settings.force_unpeer_after)
    requester = LiqoPeering(api, exchange, sign_request, limits, environment.clock, grant_of)
    return AgentPeering(requester, provider)


def lent_reservations(
    cluster: str, holds: Mapping[str, Hold], reservations: ReservationCache
) -> dict[str, LentReservation]:
    """Returns the live reservations that this cluster holds, by ID.

    A hold counts as long as the broker has not reported that it has ended, also after a restart.
    """
    from kubelend.peerings.slice_decision import LentReservation

    lent = {}
    for name, hold in holds.items():
        found = reservations.find(name)
        if found is None:
            lent[name] = LentReservation(hold.requester, hold.resources)
        elif found.target_cluster_id == cluster and found.status.phase in LIVE_PHASES:
            amounts = quantities.parse_requested(found.requested_resources, "requestedResources")
            lent[name] = LentReservation(found.requester_id, amounts, found.status.expires_at)
    return lent


async def sign_request(private_key: str, cluster_id: str) -> str:
    """Makes Liqo's certificate signing request; the key goes to a child process by its standard input."""
    output = await subprocesses.run_program(
        sys.executable,
        *("-P", "-m", "kubelend.pki.liqo_csr", cluster_id),
        name="signing of a certificate request",
        timeout=CHILD_TIMEOUT,
        stdin=private_key.encode(),
    )
    return output.decode().strip()


async def verify_grant(text: str, keys: bodies.KeySet) -> str:
    """Verifies the signature of a grant in a child process; returns the problem, empty if it is valid."""
    output = await subprocesses.run_program(
        sys.executable,
        *("-P", "-m", "kubelend.pki.grants"),
        name="verification of a grant",
        timeout=CHILD_TIMEOUT,
        stdin=msgspec.json.encode({"grant": text, "keys": keys.keys}),
    )
    return str(msgspec.json.decode(output)["error"])
