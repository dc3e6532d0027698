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
from kubelend.lab.records import Home, Process, Record
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation

_ANSWERS_WITHIN = 5.0
_READY = "ready"


class Part(NamedTuple):
    """One process or API server."""

    name: str
    state: str
    """`ready`, or the error."""
    place: str
    """The name of its log file, or the URL of an API server."""

    @property
    def is_well(self) -> bool:
        return self.state == _READY


class Health(NamedTuple):
    """The state of the whole lab."""

    parts: list[Part]
    advertisements: list[ClusterAdvertisement]
    reservations: list[Reservation]

    @property
    def problems(self) -> list[str]:
        found = [f"{part.name}: {part.state}" for part in self.parts if not part.is_well]
        active = {one.spec.cluster_id for one in self.advertisements if one.status.active}
        return found + [f"{name} does not advertise" for name in hosts.AGENTS if name not in active]


async def look(home: Home, record: Record) -> Health:
    """Checks all components; a component that does not respond is reported, not raised."""
    parts = [Part("supervisor", _READY if home.is_locked() else "not running", home.log.name)]
    parts += await asyncio.gather(*(_api_server(*each) for each in record.clusters.items()))
    parts += await asyncio.gather(*(asyncio.to_thread(_process, one) for one in record.processes))
    advertisements, reservations = await _objects(record)
    return Health(parts, advertisements, reservations)


async def _api_server(name: str, kubeconfig: str) -> Part:
    found, name = access.from_kubeconfig(kubeconfig), f"API server of {name}"
    try:
        async with asyncio.timeout(_ANSWERS_WITHIN), Client.open(found) as client:
            await client.raw("GET", "/readyz")
    except KubelendError as error:
        return Part(name, str(error), found.server)
    except TimeoutError:
        return Part(name, "does not respond", found.server)
    return Part(name, _READY, found.server)


def _process(process: Process) -> Part:
    log = Path(process.log).name
    connection = http.client.HTTPConnection("127.0.0.1", process.probes, timeout=_ANSWERS_WITHIN)
    try:
        connection.request("GET", "/readyz")
        response = connection.getresponse()
        reason = response.read().decode(errors="replace").strip()
    except (OSError, http.client.HTTPException):
        return Part(process.name, "does not respond", log)
    finally:
        connection.close()
    return Part(process.name, _READY if response.status == http.HTTPStatus.OK else reason, log)


async def _objects(record: Record) -> tuple[list[ClusterAdvertisement], list[Reservation]]:
    """Returns the broker's objects; empty if they cannot be listed, which the API server's state explains."""
    kubeconfig = record.clusters.get(hosts.BROKER, "")
    if not kubeconfig:
        return [], []
    try:
        found = access.from_kubeconfig(kubeconfig)
        async with asyncio.timeout(_ANSWERS_WITHIN), Client.open(found) as client:
            advertisements = await client.list(resources.of(ClusterAdvertisement), rights.OBJECTS)
            reservations = await client.list(resources.of(Reservation), rights.OBJECTS)
    except (KubelendError, TimeoutError):
        return [], []
    return advertisements.objects, reservations.objects
