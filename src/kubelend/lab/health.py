"""How a set-up is doing: each part asked itself, and the broker's objects as its cluster has them."""

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
    """`ready`, or what is wrong."""
    place: str
    """Its log, a file in the directory, or its address."""

    @property
    def is_well(self) -> bool:
        return self.state == _READY


class Health(NamedTuple):
    """All that there is to know."""

    parts: list[Part]
    advertisements: list[ClusterAdvertisement]
    reservations: list[Reservation]

    @property
    def problems(self) -> list[str]:
        found = [f"{part.name}: {part.state}" for part in self.parts if not part.is_well]
        active = {one.spec.cluster_id for one in self.advertisements if one.status.active}
        return found + [f"{name} does not advertise" for name in hosts.AGENTS if name not in active]


async def look(home: Home, record: Record) -> Health:
    """What cannot be asked is a problem, and no error."""
    parts = [Part("supervisor", _READY if home.is_locked() else "has ended", home.log.name)]
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
        return Part(name, "does not answer", found.server)
    return Part(name, _READY, found.server)


def _process(process: Process) -> Part:
    log = Path(process.log).name
    connection = http.client.HTTPConnection("127.0.0.1", process.probes, timeout=_ANSWERS_WITHIN)
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        said = answer.read().decode(errors="replace").strip()
    except (OSError, http.client.HTTPException):
        return Part(process.name, "does not answer", log)
    finally:
        connection.close()
    return Part(process.name, _READY if answer.status == http.HTTPStatus.OK else said, log)


async def _objects(record: Record) -> tuple[list[ClusterAdvertisement], list[Reservation]]:
    """None if they cannot be read; the API server's line says why."""
    kubeconfig = record.clusters.get(hosts.BROKER, "")
    if not kubeconfig:
        return [], []
    try:
        found = access.from_kubeconfig(kubeconfig)
        async with asyncio.timeout(_ANSWERS_WITHIN), Client.open(found) as client:
            offers = await client.list(resources.of(ClusterAdvertisement), rights.OBJECTS)
            loans = await client.list(resources.of(Reservation), rights.OBJECTS)
    except (KubelendError, TimeoutError):
        return [], []
    return offers.objects, loans.objects
