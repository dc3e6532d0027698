"""Placeholders and requesters' pods in a real cluster: the calls of a hand-over, Events, and the lease.

The rights for them are those of the chart: pods of the namespace of ProviderInstructions are created and
deleted, pods of requesters get a nominated node and lose our gate, and nothing else.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from datetime import UTC, timedelta
from typing import Any, Final

import msgspec
import structlog
from msgspec.structs import replace

from kubelend.agent.ports import Clock, NewPlaceholder
from kubelend.core import resources
from kubelend.core.errors import InvalidInput, KubelendError, NotFound
from kubelend.core.pod_requests import HOLD_GATE, NODE_NAME_FIELD, RESERVATION_LABEL, Pod
from kubelend.core.resources import Resources
from kubelend.kube import client as kube_client
from kubelend.kube.client import Client
from kubelend.kube.leader_election import LEASES, Lease, LeaseSpec
from kubelend.sources.kubernetes import PODS, PodProjection
from kubelend.wire.events import EventRecord, event_body
from kubelend.wire.objects import Metadata, ProviderInstruction

COMPONENT: Final = "kubelend-agent"
LEASE_NAME: Final = "kubelend-agent-holds"
LEASE_DURATION: Final = timedelta(minutes=2)
"""After which new pods of held reservations are refused, because nobody would remove their gate. Longer than
the clocks of agent and API server may differ."""
HELD_CONDITION: Final = "kubelend.io/Held"
"""Condition of a requester's pod that gets no held room."""
MAX_MESSAGE_LENGTH: Final = 1024

_KUBERNETES_NAMES: Final = {"gpu": "nvidia.com/gpu", "storage": "ephemeral-storage"}
_DIVISIBLE: Final = ("cpu", "memory", "ephemeral-storage")

log = structlog.get_logger("kubelend.source")


class KubernetesHoldPods:
    """`agent.ports.HoldPods` of the cluster that a client is connected to."""

    def __init__(
        self,
        client: Client,
        namespace: str,
        identity: str,
        clock: Clock,
        *,
        image: str,
        priority_class: str,
    ) -> None:
        """`namespace`: of the ProviderInstructions, their placeholders, Events and the lease."""
        self._client = client
        self._namespace = namespace
        self._identity = identity
        self._clock = clock
        self._image = image
        self._priority_class = priority_class

    async def create(self, wanted: NewPlaceholder) -> Pod:
        body = placeholder_body(wanted, self._image, self._priority_class)
        content = await self._client.raw("POST", PODS.path(self._namespace), body)
        return msgspec.json.decode(content, type=PodProjection).projected

    async def delete(self, pod: Pod) -> None:
        namespace, name = _place(pod)
        await self._client.delete(PODS, name, namespace, uid=pod.id)

    async def delete_finished(self) -> None:
        for phase in ("Failed", "Succeeded"):
            found = await self._client.list(
                PODS, self._namespace, labels=RESERVATION_LABEL, fields=f"status.phase={phase}"
            )
            for one in found.objects:
                if one.projected.placeholder_for:
                    await self.delete(one.projected)

    async def nominate(self, pod: Pod, node: str) -> Pod | None:
        return await self._patch(pod, {"status": {"nominatedNodeName": node}}, "status")

    async def ungate(self, pod: Pod) -> Pod | None:
        change = [
            {"op": "test", "path": "/metadata/uid", "value": pod.id},
            {"op": "test", "path": "/spec/schedulingGates/0/name", "value": HOLD_GATE},
            {"op": "remove", "path": "/spec/schedulingGates/0"},
        ]
        namespace, name = _place(pod)
        try:
            found = await self._client.patch(
                PODS, name, namespace, change, content_type=kube_client.JSON_PATCH
            )
        except NotFound:
            return None
        except InvalidInput:  # a test failed: the gate is gone, or it is another pod
            current = await self._client.find(PODS, name, namespace)
            is_same = current is not None and current.projected.id == pod.id
            return current.projected if current is not None and is_same else None
        return found.projected

    async def set_condition(self, pod: Pod, reason: str, message: str) -> None:
        condition = {"type": HELD_CONDITION, "status": "False", "reason": reason}
        change = {"status": {"conditions": [condition | {"message": message}]}}
        content_type = kube_client.STRATEGIC_MERGE_PATCH
        await self._patch(pod, change, "status", content_type=content_type)

    async def _patch(
        self,
        pod: Pod,
        change: Mapping[str, Any],
        subresource: str,
        content_type: str = kube_client.MERGE_PATCH,
    ) -> Pod | None:
        """With its UID: `Conflict` if another pod has its name."""
        namespace, name = _place(pod)
        try:
            found = await self._client.patch(
                PODS,
                name,
                namespace,
                {**change, "metadata": {"uid": pod.id}},
                subresource=subresource,
                content_type=content_type,
            )
        except NotFound:
            return None
        return found.projected

    async def record_event(
        self, about: ProviderInstruction, reason: str, message: str, *, is_warning: bool
    ) -> None:
        event = EventRecord("Warning" if is_warning else "Normal", reason, message, about)
        body = event_body(event, self._clock(), secrets.token_hex(8), COMPONENT)
        try:
            await self._client.raw("POST", f"/api/v1/namespaces/{self._namespace}/events", body)
        except KubelendError as error:
            log.warning("Event dropped", event_reason=reason, error=str(error))

    async def renew_lease(self) -> None:
        found = await self._client.find(LEASES, LEASE_NAME, self._namespace)
        spec = LeaseSpec(
            holder_identity=self._identity,
            lease_duration_seconds=int(LEASE_DURATION.total_seconds()),
            renew_time=self._clock().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        )
        if found is None:
            await self._client.create(LEASES, Lease(Metadata(LEASE_NAME, self._namespace), spec))
        else:
            await self._client.update(LEASES, replace(found, spec=spec))


def _place(pod: Pod) -> tuple[str, str]:
    if pod.scheduling is None:
        raise InvalidInput(f"pod {pod.id}: is neither a placeholder nor an offloaded pod")
    return pod.scheduling.namespace, pod.scheduling.name


def placeholder_body(wanted: NewPlaceholder, image: str, priority_class: str) -> dict[str, Any]:
    """The Pod: it requests the amounts, runs nothing, and passes the restricted pod security standard."""
    owner = wanted.owner
    reservation = owner.spec.reservation_name
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "generateName": f"{reservation}-hold-",
            "namespace": owner.metadata.namespace,
            "labels": {RESERVATION_LABEL: reservation, "app.kubernetes.io/part-of": "kubelend"},
            "ownerReferences": [_owner_reference(owner)],
        },
        "spec": {
            "priorityClassName": priority_class,
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "schedulingGates": [{"name": HOLD_GATE}] if wanted.is_gated else [],
            "affinity": {"nodeAffinity": _only_on(wanted.node)},
            "securityContext": _POD_SECURITY,
            "containers": [_container(wanted.amounts, image)],
        },
    }


_POD_SECURITY: Final = {
    "runAsNonRoot": True,
    "runAsUser": 65535,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def _owner_reference(owner: ProviderInstruction) -> dict[str, Any]:
    return {
        "apiVersion": f"{owner.group}/{owner.version}",
        "kind": owner.kind,
        "name": owner.metadata.name,
        "uid": owner.metadata.uid,
        "controller": True,
    }


def _only_on(node: str) -> dict[str, Any]:
    """By the name of the node, as a DaemonSet does: the label of the host name may differ from it."""
    field = {"key": NODE_NAME_FIELD, "operator": "In", "values": [node]}
    terms = {"nodeSelectorTerms": [{"matchFields": [field]}]}
    return {"requiredDuringSchedulingIgnoredDuringExecution": terms}


def _container(amounts: Resources, image: str) -> dict[str, Any]:
    requests = {
        _KUBERNETES_NAMES.get(name, name): resources.format_amount(name, amount)
        for name, amount in amounts.items()
    }
    # Kubernetes requires a limit for extended resources.
    limits = {name: text for name, text in requests.items() if name not in _DIVISIBLE}
    return {
        "name": "placeholder",
        "image": image,
        "resources": {"requests": requests, "limits": limits},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
