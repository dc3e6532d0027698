"""Borrowing by the objects of one namespace: made, waited for, looked at and deleted, as the user may.

It answers in the bodies of the REST interface, so commands need not know the difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Final, Generic

import msgspec
from msgspec.structs import replace

from kubelend.cli import exit_codes, kube_objects, output
from kubelend.cli.kube_objects import KindAdapter
from kubelend.cli.options import KubeTarget
from kubelend.communicators import kube_bodies
from kubelend.core import durations
from kubelend.core.errors import (
    AlreadyExists,
    Forbidden,
    InvalidInput,
    InvalidSettings,
    KeyReused,
    KubelendError,
    NotFound,
    Unauthenticated,
    Unavailable,
)
from kubelend.kube import access, kubeconfig, resources, watching
from kubelend.kube.access import Access
from kubelend.kube.client import Client
from kubelend.wire import bodies, mailboxes
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation
from kubelend.wire.objects import Kind, Metadata, Object, ProviderInstruction, ResourceRequest

REQUEST_HASH: Final = "kubelend.io/asked"
"""The annotation that tells whether a key came back with the same request."""

POLL_SECONDS: Final = 0.2

_NO_OWNERS: Final[Mapping[str, str]] = MappingProxyType({})


class KindBackend(Generic[Kind]):
    """One kind of object in one namespace; without a namespace, in all of them."""

    def __init__(
        self,
        client: Client,
        side: KindAdapter[Kind],
        namespace: str,
        patience: timedelta,
        owners: Mapping[str, str] = _NO_OWNERS,
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
        return [one for one in told if matches_filter(one, phase, role, cluster)]

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
        return _as_released(self._told(found))

    async def stream(self) -> AsyncGenerator[bodies.Instruction, None]:
        """All that is there, and then each change. Only the first look may fail."""
        place = self.side.resource, self.namespace
        await self._client.list(*place, labels=self.side.labels)
        changes = watching.follow(
            self._client, *place, labels=self.side.labels, report=_note_watch_problem
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
                return [_as_released(self._told(change.found))]
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
        return Metadata(f"lend-{part}", self.namespace, annotations={REQUEST_HASH: asked})

    async def _same(self, wanted: Kind) -> Kind:
        found = await self._find(wanted.metadata.name)
        if (
            found.metadata.annotations.get(REQUEST_HASH)
            != wanted.metadata.annotations[REQUEST_HASH]
        ):
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
            raise exit_codes.with_detail(error, await self._withdraw(made)) from None

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


def matches_filter(found: bodies.Reservation, phase: str, role: str, cluster: str) -> bool:
    """Whether it is one of those that were asked for; what is empty lets all through."""
    sides = {"requester": found.requester_id, "provider": found.target_cluster_id}
    wanted = [sides[role]] if role in sides and cluster else list(sides.values())
    is_phase = not phase or found.status.phase in phase.split(",")
    return is_phase and (not cluster or cluster in wanted)


def _as_released(found: bodies.Reservation) -> bodies.Reservation:
    """As it is once its object is gone."""
    if found.status.phase == "Failed":
        return found
    status = replace(found.status, phase="Released", message="given back", finished_at=output.now())
    return replace(found, status=status)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _note_watch_problem(problem: str) -> None:
    if problem:
        output.note(f"cannot see what changes: {problem}")


DEFAULT: Final = "default"

_ADVERTISEMENTS: Final = resources.of(ClusterAdvertisement)
_INSTRUCTIONS: Final = resources.of(ProviderInstruction)
_NAMESPACES: Final = resources.of(mailboxes.Namespace, namespaced=False)


@contextlib.asynccontextmanager
async def open_backend(place: KubeTarget) -> AsyncIterator[KubeBackend]:
    """Errors within say what to do about them."""
    found = kube_config(place)
    with _with_role_hint():
        async with Client.open(found, timeout=place.timeout) as client:
            yield KubeBackend(client, place, await _served_kinds(client, found))


def kube_config(place: KubeTarget) -> Access:
    """By kubectl's rules: the flags, $KUBECONFIG, the home directory, and at last the pod's account."""
    is_named = bool(place.kubeconfig or place.context)
    is_pod = bool(os.environ.get(access.HOST))
    if is_pod and not is_named and not any(path.exists() for path in kubeconfig.files()):
        return access.in_cluster()
    return access.from_kubeconfig(place.kubeconfig, place.context)


class KubeBackend:
    """Answers as the broker would, out of objects. What only the broker can do is not here."""

    def __init__(self, client: Client, place: KubeTarget, kinds: frozenset[type[Object]]) -> None:
        self._client = client
        self._place = place
        self._kinds = kinds
        self._said = place.namespace or _unless_default(client.access.namespace)
        self._known: KindBackend[Any] | None = None

    @property
    def where(self) -> str:
        """Where was looked, for people."""
        namespace = self._said if self._known is None else self._known.namespace
        return f" in namespace {namespace}" if namespace else " in any namespace"

    async def reserve(
        self, request: bodies.ReservationRequest, *, key: str = ""
    ) -> bodies.Reservation:
        return await (await self._clerk()).reserve(request, key)

    async def get_reservation(self, reservation: str) -> bodies.Reservation:
        return await (await self._clerk()).find(reservation)

    async def release(self, reservation: str) -> bodies.Reservation:
        # Its error may be kept until others are released, too.
        with _with_role_hint():
            return await (await self._clerk()).release(reservation)

    async def all_reservations(
        self, *, role: str = "", phase: str = "", cluster: str = ""
    ) -> list[bodies.Reservation]:
        clerk = await self._clerk()
        if clerk.side is kube_objects.RESERVATIONS and role and not cluster:
            raise InvalidInput(f"--role {role}: of which cluster?", hint="give --cluster as well")
        if clerk.side is kube_objects.RESOURCE_REQUESTS and role == "provider":
            listing = await self._client.list(_INSTRUCTIONS, clerk.namespace)
            told = [kube_objects.body_from_instruction(one) for one in listing.objects]
            return [one for one in told if matches_filter(one, phase, "", cluster)]
        # What is borrowed here is borrowed by this cluster: the other one is meant.
        return await clerk.find_all(
            phase, role if clerk.side is kube_objects.RESERVATIONS else "", cluster
        )

    async def stream(self) -> AsyncGenerator[bodies.Instruction, None]:
        async with contextlib.aclosing((await self._clerk()).stream()) as changes:
            async for change in changes:
                yield change

    async def all_clusters(self) -> list[bodies.Cluster]:
        """One for each cluster: of several objects, the one with the broker's record."""
        if ClusterAdvertisement not in self._kinds:
            raise InvalidSettings(
                "this is an agent's cluster, and only the broker's knows all of them",
                hint="name it with --context; `kubectl get advertisements` shows what this one offers",
            )
        self._said = self._said or await self._seat() or DEFAULT
        namespace = "" if self._place.is_everywhere else self._said
        found = (await self._client.list(_ADVERTISEMENTS, namespace)).objects
        found.sort(key=lambda one: (one.spec.cluster_id, one.status.kept is not None))
        by_cluster = {one.spec.cluster_id: one for one in found if one.spec.question is None}
        return [kube_objects.body_from_advertisement(one) for one in by_cluster.values()]

    async def get_cluster(self, cluster: str) -> bodies.Cluster:
        for found in await self.all_clusters():
            if found.advertisement.cluster_id == cluster:
                return found
        raise NotFound(
            f"no cluster {cluster!r}{self.where}", hint="see `kubectl lend get clusters`"
        )

    # -- which side, and where

    async def _clerk(self) -> KindBackend[Any]:
        if self._known is None:
            side, namespace = await self._side()
            if self._place.is_everywhere:
                namespace = ""
            owners = await self._owners(namespace) if side is kube_objects.RESERVATIONS else {}
            self._known = KindBackend(self._client, side, namespace, self._place.timeout, owners)
        return self._known

    async def _side(self) -> tuple[kube_objects.KindAdapter[Any], str]:
        is_broker, is_agent = Reservation in self._kinds, ResourceRequest in self._kinds
        if is_broker and not is_agent:
            return kube_objects.RESERVATIONS, self._said or await self._seat() or DEFAULT
        namespace = self._said or DEFAULT
        if is_broker and namespace in await self._seats(namespace):
            return kube_objects.RESERVATIONS, namespace
        return kube_objects.RESOURCE_REQUESTS, namespace

    async def _owners(self, namespace: str) -> dict[str, str]:
        """Whose mailboxes there are, as far as the user may look; `view` lets him."""
        try:
            if namespace:
                one = await self._client.find(_NAMESPACES, namespace)
                found = [] if one is None else [one]
            else:
                found = (await self._client.list(_NAMESPACES, labels=mailboxes.OWNER)).objects
        except Forbidden:
            return {}
        return {one.metadata.name: one.owner for one in found if one.owner}

    async def _seat(self) -> str:
        """The one namespace in which there is a broker; empty if that cannot be told."""
        seats = await self._seats("")
        if len(seats) > 1 and DEFAULT not in seats:
            raise InvalidSettings(
                f"there are brokers in the namespaces {', '.join(sorted(seats))}",
                hint="say which with --namespace",
            )
        return DEFAULT if DEFAULT in seats else next(iter(seats), "")

    async def _seats(self, namespace: str) -> set[str]:
        """Namespaces with records that a broker keeps; none are seen by who may not look there."""
        try:
            found = (await self._client.list(_ADVERTISEMENTS, namespace)).objects
        except Forbidden:
            return set()
        return {one.metadata.namespace for one in found if one.status.kept is not None}


@contextlib.contextmanager
def _with_role_hint() -> Iterator[None]:
    """What somebody may not do comes with whom to ask for what."""
    try:
        yield
    except Unauthenticated:
        raise
    except Forbidden as error:
        raise Forbidden(error.message, hint=_ROLES) from error


_ROLES: Final = "the role `view` there lets you look, and `edit` borrow"


class _Kind(msgspec.Struct):
    name: str


class _Kinds(msgspec.Struct):
    resources: list[_Kind]


async def _served_kinds(client: Client, found: Access) -> frozenset[type[Object]]:
    """Which of the kinds that matter here the API server knows; who is let in at all may ask that."""
    wanted = (ResourceRequest, Reservation, ClusterAdvertisement)
    groups = {kind.group: f"/apis/{kind.group}/{kind.version}" for kind in wanted}
    names = await asyncio.gather(*(_served_resources(client, path) for path in groups.values()))
    by_group = dict(zip(groups, names, strict=True))
    kinds = frozenset(kind for kind in wanted if kind.plural in by_group[kind.group])
    if not kinds:
        named = "" if found.origin is None else f" of context {found.origin.context!r}"
        raise InvalidSettings(
            f"the cluster{named} knows no ResourceRequests and no Reservations",
            hint="install Kubelend there (docs/deploy.md), or choose another with --context",
        )
    return kinds


async def _served_resources(client: Client, path: str) -> set[str]:
    try:
        content = await client.raw("GET", path)
    except NotFound:
        return set()
    return {one.name for one in msgspec.json.decode(content, type=_Kinds).resources}


def _unless_default(namespace: str) -> str:
    """What a context names: `default` is what it has if it names none."""
    return "" if namespace == DEFAULT else namespace
