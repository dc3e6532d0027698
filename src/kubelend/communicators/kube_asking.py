"""Calls over objects of an API server: a request is written into an object, and the broker's response
read from it.

Errors of the API server are not the broker's decisions: that it is down, or that an account lacks
permissions, can be fixed, and no request of a user may fail for it. So they become `BrokerUnreachable`,
except for those that a caller handles: an object that exists, one that does not, and one that is
invalid. The stream joins the watches of three kinds. The order between two watches is undefined, so the
revision is tracked per reservation and not as one number.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Final, Generic, NamedTuple

from kubelend.core.errors import (
    AlreadyExists,
    BrokerUnreachable,
    Conflict,
    Gone,
    InvalidInput,
    KubelendError,
    NotFound,
)
from kubelend.kube import answers, resources
from kubelend.kube.client import Client
from kubelend.kube.resources import Resource
from kubelend.wire import broker_objects, mailboxes, objects
from kubelend.wire.objects import AgentRequest, BrokerResponse, Kind


class CallSlot(NamedTuple, Generic[Kind]):
    """Where a kind of object has its request and its response. Each side writes only its own part."""

    resource: Resource[Kind]
    request: Callable[[Kind], AgentRequest | None]
    response: Callable[[Kind], BrokerResponse | None]

    def has_response(self, found: Kind) -> bool:
        """Whether the last request has its response, whoever sent it."""
        request, response = self.request(found), self.response(found)
        return response is not None and (request is None or request.id == response.request_id)

    def has_response_to(self, found: Kind, request_id: str) -> bool:
        response = self.response(found)
        return response is not None and response.request_id == request_id


ADVERTISEMENT_SLOT: Final = CallSlot(
    resources.resource_for(broker_objects.ClusterAdvertisement),
    lambda found: found.spec.request,
    lambda found: found.status.response,
)
RESERVATION_SLOT: Final = CallSlot(
    resources.resource_for(broker_objects.Reservation),
    lambda found: found.spec.request,
    lambda found: found.status.response,
)
INSTRUCTION_SLOT: Final = CallSlot(
    resources.resource_for(objects.ProviderInstruction),
    lambda found: found.status.request,
    lambda found: found.spec.response,
)
SESSION_SLOT: Final = CallSlot(
    resources.resource_for(broker_objects.ClusterSession),
    lambda found: found.spec.request,
    lambda found: found.status.response,
)


class ObjectCaller:
    """Makes calls in one cluster namespace, as one agent."""

    def __init__(self, client: Client, namespace: str, agent: str) -> None:
        self.client = client
        self.namespace = namespace
        self._agent = agent[:64]

    def new_request(self, verb: str, arguments: str = "") -> AgentRequest:
        return AgentRequest(uuid.uuid4().hex, verb, arguments, self._agent)

    async def call(
        self,
        slot: CallSlot[Kind],
        name: str,
        request: AgentRequest,
        extra_fields: dict[str, object],
    ) -> Kind:
        """The object with the response to a request; `extra_fields` is written in the same part of the
        object.

        If another caller uses the same object at the same time, its call finishes first and this one is
        repeated.
        """
        part = "status" if slot is INSTRUCTION_SLOT else "spec"
        change = {part: {**extra_fields, "request": mailboxes.request_fields(request)}}
        while True:
            with as_unreachable():
                found = await self.client.patch(
                    slot.resource,
                    name,
                    self.namespace,
                    change,
                    subresource="status" if part == "status" else "",
                )
            found = await self.wait_for_response(slot, found)
            if slot.has_response_to(found, request.id):
                return found

    async def wait_for_response(self, slot: CallSlot[Kind], found: Kind) -> Kind:
        """The object once its last request has a response."""
        while not slot.has_response(found):
            with as_unreachable():
                found = await self._wait_for_change(slot.resource, found)
        return found

    async def wait_deleted(self, slot: CallSlot[Kind], found: Kind) -> None:
        """Wait until an object that is being deleted is gone."""
        with as_unreachable():
            while (later := await self._get(slot.resource, found)) is not None:
                if later.metadata.uid != found.metadata.uid:
                    return
                await self._wait_for_change(slot.resource, later, is_being_deleted=True)

    async def find(self, slot: CallSlot[Kind], name: str) -> Kind | None:
        with as_unreachable():
            return await self.client.find(slot.resource, name, self.namespace)

    async def list(self, slot: CallSlot[Kind]) -> list[Kind]:
        with as_unreachable():
            return (await self.client.list(slot.resource, self.namespace)).objects

    async def _get(self, resource: Resource[Kind], found: Kind) -> Kind | None:
        return await self.client.find(resource, found.metadata.name, self.namespace)

    async def _wait_for_change(
        self, resource: Resource[Kind], found: Kind, *, is_being_deleted: bool = False
    ) -> Kind:
        """The object after its next change, or after the watch has timed out."""
        events = self.client.watch(
            resource,
            self.namespace,
            since=found.metadata.resource_version,
            fields=f"metadata.name={found.metadata.name}",
        )
        try:
            async with aclosing(events):
                async for event in events:
                    if event.found is not None:
                        return event.found
        except Gone:
            pass
        later = await self._get(resource, found)
        if later is None and not is_being_deleted:
            raise Conflict(
                f"{resource} {found.metadata.name} was deleted before the broker responded"
            )
        return later or found


@contextmanager
def as_unreachable(*handled: type[KubelendError]) -> Iterator[None]:
    """Around each use of the API server; `handled` are further errors that the caller handles."""
    passed: tuple[type[KubelendError], ...] = (AlreadyExists, InvalidInput, *handled)
    try:
        yield
    except passed:
        raise
    except NotFound as error:
        if answers.is_object_not_found(error):
            raise
        raise BrokerUnreachable(f"cannot use the cluster namespace: {error}") from error
    except KubelendError as error:
        raise BrokerUnreachable(f"cannot use the cluster namespace: {error}") from error


def raise_for_error(response: BrokerResponse | None) -> BrokerResponse:
    """The response; raises the broker's error if it is one."""
    if (refusal := mailboxes.error_from_response(response)) is not None:
        raise refusal
    return response or mailboxes.NO_RESPONSE
