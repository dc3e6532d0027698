"""Borrowing by the objects of one namespace: made, waited for, looked at and deleted, as the user may.

It answers in the bodies of the REST interface, so commands need not know the difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Final, Generic

import msgspec
from msgspec.structs import replace

from kubelend.cli import exits, output
from kubelend.cli.object_sides import Side
from kubelend.communicators import kube_bodies
from kubelend.core import durations
from kubelend.core.errors import AlreadyExists, KeyReused, KubelendError, NotFound, Unavailable
from kubelend.kube import watching
from kubelend.kube.client import Client
from kubelend.wire import bodies
from kubelend.wire.objects import Kind, Metadata, Object

ASKED: Final = "kubelend.io/asked"
"""The annotation that tells whether a key came back with the same request."""

POLL_SECONDS: Final = 0.2

_NOBODYS: Final[Mapping[str, str]] = MappingProxyType({})


class Clerk(Generic[Kind]):
    """One kind of object in one namespace; without a namespace, in all of them."""

    def __init__(
        self,
        client: Client,
        side: Side[Kind],
        namespace: str,
        patience: timedelta,
        owners: Mapping[str, str] = _NOBODYS,
    ) -> None:
        """`owners` are the clusters whose mailboxes namespaces are: who asks there is the cluster."""
        self._client = client
        self.side = side
        self.namespace = namespace
        self._patience = patience
        self._owners = owners

    async def reserve(self, request: bodies.ReservationRequest, key: str) -> bodies.Reservation:
        """Make the object, and wait for its answer. Without one, or with a refusal, it is taken back."""
        kube_bodies.check(request)
        wanted = self.side.wanted(self._metadata(request, key), request)
        try:
            made = await self._client.create(self.side.resource, wanted)
        except AlreadyExists:
            return self._told(await self._answer(await self._same(wanted)))
        except (Unavailable, asyncio.CancelledError):
            if not key:  # it may have arrived, and nobody else's has this name
                await self._withdraw(wanted)
            raise
        found = self._told(await self._answer_or_withdraw(made))
        if found.status.phase == "Failed":
            await self._withdraw(made)
        return found

    async def find(self, name: str) -> bodies.Reservation:
        return self._told(await self._find(name))

    async def find_all(self, phase: str, role: str, cluster: str) -> list[bodies.Reservation]:
        found = await self._client.list(self.side.resource, self.namespace, labels=self.side.labels)
        told = [self._told(one) for one in found.objects if self.side.is_shown(one)]
        return [one for one in told if matches(one, phase, role, cluster)]

    async def release(self, name: str) -> bodies.Reservation:
        """Delete the object, and wait until what it held is given back."""
        found = await self._find(name)
        await self._delete(found)
        try:
            await self._until(lambda: self._is_gone(found))
        except TimeoutError:
            raise Unavailable(
                f"{name} is deleted, but was not given back within {self._waited}",
                hint=f"is there {self.side.answering}?",
            ) from None
        return _over(self._told(found))

    async def stream(self) -> AsyncGenerator[bodies.Instruction, None]:
        """All that is there, and then each change. Only the first look may fail."""
        place = self.side.resource, self.namespace
        await self._client.list(*place, labels=self.side.labels)
        changes = watching.follow(
            self._client, *place, labels=self.side.labels, report=_say_problem
        )
        async with contextlib.aclosing(changes) as seen:
            async for change in seen:
                for told in self._changed(change):
                    yield bodies.Instruction(0, "requester", "", told.status.message, told)

    def _changed(self, change: watching.Change[Kind]) -> list[bodies.Reservation]:
        match change:
            case watching.Listed():
                found = change.objects
            case watching.Deleted():
                return [_over(self._told(change.found))]
            case Object():
                found = [change]
            case _:
                return []
        return [self._told(one) for one in found if self.side.is_shown(one)]

    # -- one object

    def _metadata(self, request: bodies.ReservationRequest, key: str) -> Metadata:
        """The same key is the same name, and of one name there is one object."""
        part = _digest(key.encode())[:16] if key else secrets.token_hex(4)
        asked = _digest(msgspec.json.encode(request))
        return Metadata(f"lend-{part}", self.namespace, annotations={ASKED: asked})

    async def _same(self, wanted: Kind) -> Kind:
        found = await self._find(wanted.metadata.name)
        if found.metadata.annotations.get(ASKED) != wanted.metadata.annotations[ASKED]:
            raise KeyReused(
                f"this key belongs to {found.metadata.name}, which asks for something else",
                hint="use a new key for a new request",
            )
        return found

    async def _find(self, name: str) -> Kind:
        """By its own name, maybe with its namespace before it, or by the broker's."""
        place, slash, short = name.rpartition("/")
        namespace = place if slash else self.namespace
        found = await self._client.find(self.side.resource, short, namespace)
        if found is not None:
            return found
        for one in (await self._client.list(self.side.resource, namespace)).objects:
            if self.side.broker_name(one) == short:
                return one
        raise NotFound(
            f"no reservation {short!r} in namespace {namespace!r}",
            hint="--namespace names another one",
        )

    async def _answer_or_withdraw(self, made: Kind) -> Kind:
        """Whatever keeps the answer away: nobody would know of what comes of it."""
        try:
            return await self._answer(made)
        except NotFound:
            raise
        except asyncio.CancelledError:
            await self._withdraw(made)
            raise
        except KubelendError as error:
            raise exits.saying(error, await self._withdraw(made)) from None

    async def _answer(self, made: Kind) -> Kind:
        newest = made

        async def look() -> bool:
            nonlocal newest
            newest = await self._newest(made)
            return self.side.is_answered(newest)

        try:
            await self._until(look)
        except TimeoutError as problem:
            said = str(problem) or self.side.told(newest).status.message
            raise Unavailable(
                f"{made.metadata.name} got no answer within {self._waited}: {said}",
                hint=f"is there {self.side.answering}?",
            ) from None
        return newest

    async def _newest(self, made: Kind) -> Kind:
        known = made.metadata
        found = await self._client.find(self.side.resource, known.name, known.namespace)
        if found is None:
            raise NotFound(f"{known.name} was deleted by somebody else", hint="ask again")
        return found

    async def _withdraw(self, made: Kind) -> str:
        """What became of it, for people."""
        try:
            await self._delete(made)
        except KubelendError as error:
            return f"it is still there, because {error.message}"
        return "it was taken back"

    async def _delete(self, found: Kind) -> None:
        known = found.metadata
        await self._client.delete(self.side.resource, known.name, known.namespace, uid=known.uid)

    async def _is_gone(self, found: Kind) -> bool:
        known = found.metadata
        newest = await self._client.find(self.side.resource, known.name, known.namespace)
        return newest is None or newest.metadata.uid != known.uid

    async def _until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        """What passes is waited for, too; `TimeoutError` with the last of it, if it did not."""
        problem = ""
        try:
            async with asyncio.timeout(self._patience.total_seconds()):
                while True:
                    try:
                        if await condition():
                            return
                        problem = ""
                    except KubelendError as error:
                        if not error.retryable:
                            raise
                        problem = error.message
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            raise TimeoutError(problem) from None

    def _told(self, found: Kind) -> bodies.Reservation:
        told = self.side.told(found)
        if (owner := self._owners.get(found.metadata.namespace)) is not None:
            told = replace(told, requester_id=owner)
        return told if self.namespace else replace(told, id=found.key)

    @property
    def _waited(self) -> str:
        return durations.short(self._patience)


def matches(found: bodies.Reservation, phase: str, role: str, cluster: str) -> bool:
    """Whether it is one of those that were asked for; what is empty lets all through."""
    sides = {"requester": found.requester_id, "provider": found.target_cluster_id}
    wanted = [sides[role]] if role in sides and cluster else list(sides.values())
    is_phase = not phase or found.status.phase in phase.split(",")
    return is_phase and (not cluster or cluster in wanted)


def _over(found: bodies.Reservation) -> bodies.Reservation:
    """As it is once its object is gone."""
    if found.status.phase == "Failed":
        return found
    status = replace(found.status, phase="Released", message="given back", finished_at=output.now())
    return replace(found, status=status)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _say_problem(problem: str) -> None:
    if problem:
        output.note(f"cannot see what changes: {problem}")
