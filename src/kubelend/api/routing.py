"""Which handler answers which route; a test says that each has one."""

from __future__ import annotations

from kubelend.api import about, advertisements, clusters, instructions, reservations
from kubelend.api.binding import Handler

HANDLERS: dict[str, Handler] = {
    "publish": advertisements.publish,
    "get_advertisement": advertisements.get_advertisement,
    "reserve": reservations.reserve,
    "list_reservations": reservations.list_reservations,
    "get_reservation": reservations.get_reservation,
    "release": reservations.release,
    "activate": reservations.activate,
    "renew": reservations.renew,
    "explain_reservation": reservations.explain_reservation,
    "explain": reservations.explain,
    "instructions": instructions.list_instructions,
    "stream": instructions.stream,
    "acknowledge": instructions.acknowledge,
    "refuse": instructions.refuse,
    "list_clusters": clusters.list_clusters,
    "get_cluster": clusters.get_cluster,
    "cordon": clusters.cordon,
    "uncordon": clusters.uncordon,
    "drain": clusters.drain,
    "remove_cluster": clusters.remove_cluster,
    "version": about.version,
    "openapi": about.description,
    "healthz": about.healthz,
    "readyz": about.readyz,
}
