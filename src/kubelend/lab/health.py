"""The walkthrough (`lab test`) and the health of the lab (`lab status`).

Health: the readiness of each process and API server, and the broker's objects in its cluster. Walkthrough:
the life of one ResourceRequest, observed only through watches on the three API servers.
"""

from __future__ import annotations

import asyncio
import http.client
from pathlib import Path
from typing import NamedTuple

from kubelend.core.errors import KubelendError
from kubelend.kube import access, resources
from kubelend.kube.client import Client
from kubelend.lab import hosts, rights
from kubelend.lab.records import LabDirectory, LabProcess, LabState
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation

_RESPONSE_TIMEOUT = 5.0
_READY = "ready"


class ComponentStatus(NamedTuple):
    """One process or API server."""

    name: str
    state: str
    """`ready`, or the error."""
    location: str
    """The name of its log file, or the URL of an API server."""

    @property
    def is_ready(self) -> bool:
        return self.state == _READY


class LabHealth(NamedTuple):
    """The state of the whole lab."""

    components: list[ComponentStatus]
    advertisements: list[ClusterAdvertisement]
    reservations: list[Reservation]

    @property
    def problems(self) -> list[str]:
        found = [f"{part.name}: {part.state}" for part in self.components if not part.is_ready]
        active = {one.spec.cluster_id for one in self.advertisements if one.status.active}
        return found + [
            f"{name} does not advertise" for name in hosts.AGENT_CLUSTERS if name not in active
        ]


async def check_health(home: LabDirectory, record: LabState) -> LabHealth:
    """Checks all components; a component that does not respond is reported, not raised."""
    parts = [
        ComponentStatus("supervisor", _READY if home.is_locked() else "not running", home.log.name)
    ]
    parts += await asyncio.gather(*(_api_server_status(*each) for each in record.clusters.items()))
    parts += await asyncio.gather(
        *(asyncio.to_thread(_process_status, one) for one in record.processes)
    )
    advertisements, reservations = await _broker_objects(record)
    return LabHealth(parts, advertisements, reservations)


async def _api_server_status(name: str, kubeconfig: str) -> ComponentStatus:
    found, name = access.config_from_kubeconfig(kubeconfig), f"API server of {name}"
    try:
        async with asyncio.timeout(_RESPONSE_TIMEOUT), Client.open(found) as client:
            await client.raw("GET", "/readyz")
    except KubelendError as error:
        return ComponentStatus(name, str(error), found.server)
    except TimeoutError:
        return ComponentStatus(name, "does not respond", found.server)
    return ComponentStatus(name, _READY, found.server)


def _process_status(process: LabProcess) -> ComponentStatus:
    log = Path(process.log).name
    connection = http.client.HTTPConnection("127.0.0.1", process.probes, timeout=_RESPONSE_TIMEOUT)
    try:
        connection.request("GET", "/readyz")
        response = connection.getresponse()
        reason = response.read().decode(errors="replace").strip()
    except (OSError, http.client.HTTPException):
        return ComponentStatus(process.name, "does not respond", log)
    finally:
        connection.close()
    return ComponentStatus(
        process.name, _READY if response.status == http.HTTPStatus.OK else reason, log
    )


async def _broker_objects(record: LabState) -> tuple[list[ClusterAdvertisement], list[Reservation]]:
    """Returns the broker's objects; empty if they cannot be listed, which the API server's state explains."""
    kubeconfig = record.clusters.get(hosts.BROKER_CLUSTER, "")
    if not kubeconfig:
        return [], []
    try:
        found = access.config_from_kubeconfig(kubeconfig)
        async with asyncio.timeout(_RESPONSE_TIMEOUT), Client.open(found) as client:
            advertisements = await client.list(
                resources.resource_for(ClusterAdvertisement), rights.OBJECT_NAMESPACE
            )
            reservations = await client.list(
                resources.resource_for(Reservation), rights.OBJECT_NAMESPACE
            )
    except (KubelendError, TimeoutError):
        return [], []
    return advertisements.objects, reservations.objects
