"""Writes the objects of a cluster namespace. Each result is put into the cache as the API server returned it.

`NamespaceReconciler` decides what is written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import NamedTuple

from msgspec.structs import replace

from kubelend.broker import authorization
from kubelend.broker.agent_sessions import AgentSessions
from kubelend.broker.service import Broker
from kubelend.controllers import labels
from kubelend.controllers.cluster_namespaces import handlers, plan
from kubelend.controllers.cluster_namespaces.plan import (
    InstructionObject,
    NamespaceCache,
    WriteInstruction,
)
from kubelend.core.errors import InvalidInput, NotFound
from kubelend.core.models import ClusterId
from kubelend.core.models import Reservation as Record
from kubelend.kube import resources
from kubelend.kube.client import Client
from kubelend.kube.resources import Resource
from kubelend.stores.kubernetes import objects
from kubelend.stores.kubernetes.objects import StoredObject
from kubelend.wire import cluster_namespaces
from kubelend.wire.broker_objects import RESERVATION_FINALIZER, Reservation
from kubelend.wire.conversion import RequestLimits
from kubelend.wire.objects import BrokerResponse, Kind, ProviderInstruction

MAX_CONCURRENT_WRITES = 16
"""Concurrent writes in one namespace."""

SignGrant = Callable[[Record, ClusterId], Awaitable[str | None]]


class Dependencies(NamedTuple):
    """Dependencies of all cluster namespaces."""

    client: Client
    broker: Broker
    terms: RequestLimits
    sessions: AgentSessions | None = None
    """Without it every agent of a cluster may send requests."""
    sign_grant: SignGrant | None = None
    """Signs the grants for the two sides of a reservation."""
    session_timeout: timedelta = timedelta(minutes=15)
    """After which an agent session without requests expires."""


class NamespaceWriter:
    """Writes into one cluster namespace."""

    def __init__(
        self, dependencies: Dependencies, namespace: str, cluster: ClusterId, cache: NamespaceCache
    ) -> None:
        self._dependencies = dependencies
        self._namespace = namespace
        self._cluster = cluster
        self._cache = cache
        self._writes = asyncio.Semaphore(MAX_CONCURRENT_WRITES)

    async def write_requester_side(
        self, obj: InstructionObject | None, record: Record, request_id: str | None = None
    ) -> None:
        part = handlers.instruction_for_side(self._cluster, record, handlers.REQUESTER_SIDE)
        if part is None or isinstance(obj, ProviderInstruction):
            return
        target = await self._create_reservation(record) if obj is None else obj
        response = await self._response(WriteInstruction(part, obj), request_id)
        status = plan.reservation_status_patch(
            target, record, response, self._dependencies.broker.clock()
        )
        await self._patch(
            labels.RESERVATION_RESOURCE, target.metadata.name, {"status": status}, "status"
        )

    async def _create_reservation(self, record: Record) -> StoredObject:
        """With all fields, or the minimal ones if the server's CRD rejects them."""
        create, kind = self._dependencies.client.create, objects.STORED_RESERVATIONS
        async with self._writes:
            try:
                return await create(kind, plan.reservation_object(record, self._namespace))
            except InvalidInput:
                least = plan.reservation_object(record, self._namespace, in_full=False)
                return await create(kind, least)

    async def write_provider_side(
        self, step: WriteInstruction, request_id: str | None = None
    ) -> None:
        response = await self._response(step, request_id)
        if step.obj is None:
            made = plan.provider_instruction_object(step.instruction, response, self._namespace)
            async with self._writes:
                self._cache.handle(
                    await self._dependencies.client.create(
                        resources.resource_for(ProviderInstruction), made
                    )
                )
        elif isinstance(step.obj, ProviderInstruction):
            spec = plan.provider_instruction_patch(step.instruction, response)
            await self.patch(resources.resource_for(ProviderInstruction), step.obj, {"spec": spec})

    async def _response(self, step: WriteInstruction, request_id: str | None) -> BrokerResponse:
        """The response for an object; without a new request the request ID of the last one stays."""
        record, granting = step.instruction.reservation, self._dependencies.sign_grant
        grant = None if granting is None else await granting(record, self._cluster)
        body = cluster_namespaces.body_text(
            authorization.instruction_body(step.instruction, grant or "")
        )
        before = cluster_namespaces.NO_RESPONSE if step.obj is None else plan.response_of(step.obj)
        if request_id is not None:
            return BrokerResponse(request_id, body)
        return replace(before or cluster_namespaces.NO_RESPONSE, body=body)

    async def add_finalizer(self, obj: Reservation) -> Reservation | None:
        """None if the object no longer exists: then nothing is requested."""
        return await self.write_finalizers(obj, [*obj.metadata.finalizers, RESERVATION_FINALIZER])

    async def write_finalizers(self, obj: Reservation, finalizers: list[str]) -> Reservation | None:
        version = obj.metadata.resource_version
        change: dict[str, object] = {
            "metadata": {"finalizers": finalizers, "resourceVersion": version}
        }
        return await self.patch(labels.RESERVATION_RESOURCE, obj, change)

    async def delete(self, obj: InstructionObject) -> None:
        """If the object has changed meanwhile, it stays, and the watch reports it."""
        async with self._writes:
            await labels.delete_if_unchanged(
                self._dependencies.client, resources.resource_for(type(obj)), obj
            )

    async def patch_status(self, obj: Kind, status: dict[str, object]) -> None:
        await self.patch(resources.resource_for(type(obj)), obj, {"status": status}, "status")

    async def patch(
        self,
        resource: Resource[Kind],
        obj: Kind,
        change: dict[str, object],
        subresource: str = "",
    ) -> Kind | None:
        """None if the object no longer exists."""
        return await self._patch(resource, obj.metadata.name, change, subresource)

    async def _patch(
        self, resource: Resource[Kind], name: str, change: dict[str, object], subresource: str
    ) -> Kind | None:
        async with self._writes:
            try:
                found = await self._dependencies.client.patch(
                    resource, name, self._namespace, change, subresource=subresource
                )
            except NotFound:
                return None
        self._cache.handle(found)
        return found
