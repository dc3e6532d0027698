"""The objects and CRDs of the published Go broker, by the fields that its contract names and no others.

    published = PublishedObjects(place)
    published.advertise("paris", reserved="3")
    published.reserve("rsv-rome-1", "paris", cpu="3")

Its CRDs are ours without the fields and rules that we have added; a server drops what they do not know.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import yaml

import charts
from kube_stores import Place
from kubelend.core import durations
from kubelend.kube import resources
from kubelend.kube.client import Client
from kubelend.kube.resources import Resource
from kubelend.wire import broker_objects
from kubelend.wire.broker_objects import RESERVATION_FINALIZER

Json = dict[str, Any]

RESERVATIONS = resources.resource_for(broker_objects.Reservation)
ADVERTISEMENTS = resources.resource_for(broker_objects.ClusterAdvertisement)
HOUR = timedelta(hours=1)

AMOUNTS = ("cpu", "memory", "gpu", "storage")
METRICS = ("capacity", "allocatable", "allocated", "reserved", "available")
FIELDS = {
    "clusteradvertisements": (
        ("clusterID", "clusterName", "resources", "cost", "timestamp", "endpointURL"),
        ("phase", "lastUpdateTime", "active", "message", "score", "conditions"),
    ),
    "reservations": (
        ("targetClusterID", "requestedResources", "duration", "priority", "requesterID"),
        ("phase", "message", "reservedAt", "expiresAt", "lastUpdateTime", "conditions"),
    ),
}
"""Of spec and status, by kind."""


class PublishedObjects:
    """In a namespace that no broker uses yet."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.now = datetime.now(UTC).replace(microsecond=0)

    def advertise(
        self,
        cluster: str,
        cpu: str = "10",
        ago: timedelta = timedelta(),
        name: str = "",
        counted: str = "0",
    ) -> str:
        """Offers `cpu` and 64Gi, of which pods use 1 CPU and 1Gi; `counted` is the Go broker's counter."""
        at = self.now - ago
        whole, used = {"cpu": cpu, "memory": "64Gi"}, {"cpu": "1", "memory": "1Gi"}
        amounts = {"capacity": whole, "allocatable": whole, "allocated": used, "available": whole}
        counter = {"reserved": {"cpu": counted, "memory": "0"}}
        spec = {"clusterID": cluster, "clusterName": "cluster-advertisement", "timestamp": text(at)}
        status = {"phase": "Active", "active": True, "score": "66.67", "lastUpdateTime": text(at)}
        body = {"spec": {**spec, "resources": amounts | counter}, "status": status}
        return self.apply(ADVERTISEMENTS, name or f"{cluster}-adv", body)

    def reserve(
        self,
        name: str,
        target: str = "paris",
        phase: str = "Reserved",
        *,
        cpu: str = "3",
        ago: timedelta = timedelta(),
        duration: str = "1h",
        requester: str = "rome",
        **status: Any,
    ) -> str:
        """As it is after the writes of a reservation: spec, finalizer and status."""
        since = self.now - ago
        spec: Json = {"requestedResources": {"cpu": cpu, "memory": "1Gi"}, "priority": 10}
        spec |= {"targetClusterID": target} if target else {}
        spec |= {"requesterID": requester} if requester else {}
        shown: Json = {"phase": phase, "message": f"Resources locked in cluster {target}"}
        shown |= {"reservedAt": text(since), "lastUpdateTime": text(since)}
        if duration:
            spec["duration"] = duration
            shown["expiresAt"] = text(since + durations.parse_duration(duration))
        body = {"spec": spec, "status": (shown | status) if phase else {}}
        return self.apply(RESERVATIONS, name, body, [RESERVATION_FINALIZER])

    def apply(
        self, kind: Resource[Any], name: str, body: Json, finalizers: list[str] | None = None
    ) -> str:
        namespace = self.place.namespace
        metadata = {"name": name, "namespace": namespace, "finalizers": finalizers or []}
        head = {"apiVersion": f"{kind.group}/{kind.version}", "kind": kind.kind}
        made, status = {**head, "metadata": metadata, "spec": body["spec"]}, body.get("status")

        async def write(client: Client) -> None:
            await client.raw("POST", kind.path(namespace), made)
            if status:
                await client.patch(kind, name, namespace, {"status": status}, subresource="status")

        self.run(write)
        return name

    def run(self, work: Callable[[Client], Coroutine[Any, Any, Any]]) -> Any:
        """In a thread, as tests have event loops of their own."""
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(self.place.run, work).result()

    def find(self, kind: Resource[Any], name: str) -> Any:
        return self.run(lambda client: client.find(kind, name, self.place.namespace))

    def list(self, kind: Resource[Any]) -> list[Json]:
        """All of them, with every field."""
        path = kind.path(self.place.namespace)
        content = self.run(lambda client: client.raw("GET", path))
        return list(json.loads(content)["items"])

    def edit(self, kind: Resource[Any], name: str, change: Json, subresource: str = "") -> None:
        namespace = self.place.namespace
        self.run(
            lambda client: client.patch(kind, name, namespace, change, subresource=subresource)
        )


def text(at: datetime) -> str:
    """As Go writes a time into an object: without fractions."""
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def crds() -> list[Json]:
    """The two definitions that the Go broker's `make install` applies."""
    return [_crd(plural) for plural in FIELDS]


def _crd(plural: str) -> Json:
    path = charts.DEPLOY / "crds" / f"broker.fluidos.eu_{plural}.yaml"
    [definition] = yaml.safe_load_all(path.read_text())
    [version] = definition["spec"]["versions"]
    whole = version["schema"]["openAPIV3Schema"]["properties"]
    for name, fields in zip(("spec", "status"), FIELDS[plural], strict=True):
        whole[name] = _only(whole[name], fields)
    amounts = whole["spec"]["properties"]
    if plural == "reservations":
        amounts["requestedResources"] = _only(amounts["requestedResources"], AMOUNTS)
    else:
        metrics = _only(amounts["resources"], METRICS)["properties"]
        kept = {name: _only(one, AMOUNTS) for name, one in metrics.items()}
        required = [one for one in METRICS if one != "reserved"]
        amounts["resources"] = {"type": "object", "properties": kept, "required": required}
    return dict(definition)


def _only(schema: Json, fields: tuple[str, ...]) -> Json:
    kept = {one: value for one, value in schema["properties"].items() if one in fields}
    required = [one for one in schema.get("required", ()) if one in fields]
    return {"type": "object", "properties": kept} | ({"required": required} if required else {})
