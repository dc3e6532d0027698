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
from kubelend.wire.objects import Kind, Question, Reply


class Slot(NamedTuple, Generic[Kind]):
    """Where a kind of object has its request and its response. Each side writes only its own part."""

    resource: Resource[Kind]
    question: Callable[[Kind], Question | None]
    reply: Callable[[Kind], Reply | None]

    def is_answered(self, found: Kind) -> bool:
        """Whether the last request has its response, whoever sent it."""
        request, response = self.question(found), self.reply(found)
        return response is not None and (request is None or request.id == response.request_id)

    def has_answered(self, found: Kind, question: str) -> bool:
        response = self.reply(found)
        return response is not None and response.request_id == question


ADVERTISEMENTS: Final = Slot(
    resources.of(broker_objects.ClusterAdvertisement),
    lambda found: found.spec.request,
    lambda found: found.status.response,
)
RESERVATIONS: Final = Slot(
    resources.of(broker_objects.Reservation),
    lambda found: found.spec.request,
    lambda found: found.status.response,
)
INSTRUCTIONS: Final = Slot(
    resources.of(objects.ProviderInstruction),
    lambda found: found.status.request,
    lambda found: found.spec.response,
)
MAILBOXES: Final = Slot(
    resources.of(broker_objects.Mailbox),
    lambda found: found.spec.request,
    lambda found: found.status.response,
)


class Asker:
    """Makes calls in one cluster namespace, as one agent."""

    def __init__(self, client: Client, namespace: str, agent: str) -> None:
        self.client = client
        self.namespace = namespace
        self._agent = agent[:64]

    def question(self, call: str, text: str = "") -> Question:
        return Question(uuid.uuid4().hex, call, text, self._agent)

    async def ask(
        self, slot: Slot[Kind], name: str, question: Question, beside: dict[str, object]
    ) -> Kind:
        """The object with the response to a request; `extra_fields` is written in the same part of the
        object.

        If another caller uses the same object at the same time, its call finishes first and this one is
        repeated.
        """
        part = "status" if slot is INSTRUCTIONS else "spec"
        change = {part: {**beside, "request": mailboxes.question(question)}}
        while True:
            with unreachable():
                found = await self.client.patch(
                    slot.resource,
                    name,
                    self.namespace,
                    change,
                    subresource="status" if part == "status" else "",
                )
            found = await self.settled(slot, found)
            if slot.has_answered(found, question.id):
                return found

    async def settled(self, slot: Slot[Kind], found: Kind) -> Kind:
        """The object once its last request has a response."""
        while not slot.is_answered(found):
            with unreachable():
                found = await self._next(slot.resource, found)
        return found

    async def gone(self, slot: Slot[Kind], found: Kind) -> None:
        """Wait until an object that is being deleted is gone."""
        with unreachable():
            while (later := await self._find(slot.resource, found)) is not None:
                if later.metadata.uid != found.metadata.uid:
                    return
                await self._next(slot.resource, later, is_leaving=True)

    async def find(self, slot: Slot[Kind], name: str) -> Kind | None:
        with unreachable():
            return await self.client.find(slot.resource, name, self.namespace)

    async def list(self, slot: Slot[Kind]) -> list[Kind]:
        with unreachable():
            return (await self.client.list(slot.resource, self.namespace)).objects

    async def _find(self, resource: Resource[Kind], found: Kind) -> Kind | None:
        return await self.client.find(resource, found.metadata.name, self.namespace)

    async def _next(
        self, resource: Resource[Kind], found: Kind, *, is_leaving: bool = False
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
        later = await self._find(resource, found)
        if later is None and not is_leaving:
            raise Conflict(
                f"{resource} {found.metadata.name} was deleted before the broker responded"
            )
        return later or found


@contextmanager
def unreachable(*acted_on: type[KubelendError]) -> Iterator[None]:
    """Around each use of the API server; `handled` are further errors that the caller handles."""
    passed: tuple[type[KubelendError], ...] = (AlreadyExists, InvalidInput, *acted_on)
    try:
        yield
    except passed:
        raise
    except NotFound as error:
        if answers.is_missing_object(error):
            raise
        raise BrokerUnreachable(f"cannot use the cluster namespace: {error}") from error
    except KubelendError as error:
        raise BrokerUnreachable(f"cannot use the cluster namespace: {error}") from error


def granted(reply: Reply | None) -> Reply:
    """The response; raises the broker's error if it is one."""
    if (refusal := mailboxes.refusal(reply)) is not None:
        raise refusal
    return reply or mailboxes.NOBODY
