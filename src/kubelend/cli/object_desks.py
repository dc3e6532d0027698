"""The cluster of a kubeconfig's context in the place of the broker: what `kubectl lend` asks.

What is defined in the cluster tells what it is: an agent's knows ResourceRequests, the broker's knows
Reservations. Where both are, a namespace with the broker's own records in it is the broker's. Everything is
done as the user of the context, so what somebody may do is what Kubernetes' roles let him do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any, Final

import msgspec

from kubelend.cli import object_bodies, object_clerks, object_sides
from kubelend.cli.object_clerks import Clerk
from kubelend.cli.places import Place
from kubelend.core.errors import (
    Forbidden,
    InvalidInput,
    InvalidSettings,
    NotFound,
    Unauthenticated,
)
from kubelend.kube import access, kubeconfig, resources
from kubelend.kube.access import Access
from kubelend.kube.client import Client
from kubelend.wire import bodies, mailboxes
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation
from kubelend.wire.objects import Object, ProviderInstruction, ResourceRequest

DEFAULT: Final = "default"

_ADVERTISEMENTS: Final = resources.of(ClusterAdvertisement)
_INSTRUCTIONS: Final = resources.of(ProviderInstruction)
_NAMESPACES: Final = resources.of(mailboxes.Namespace, namespaced=False)


@contextlib.asynccontextmanager
async def opened(place: Place) -> AsyncIterator[ObjectDesk]:
    """Errors within say what to do about them."""
    found = reached(place)
    with _advised():
        async with Client.open(found, timeout=place.timeout) as client:
            yield ObjectDesk(client, place, await _defined(client, found))


def reached(place: Place) -> Access:
    """By kubectl's rules: the flags, $KUBECONFIG, the home directory, and at last the pod's account."""
    is_named = bool(place.kubeconfig or place.context)
    is_pod = bool(os.environ.get(access.HOST))
    if is_pod and not is_named and not any(path.exists() for path in kubeconfig.files()):
        return access.in_cluster()
    return access.from_kubeconfig(place.kubeconfig, place.context)


class ObjectDesk:
    """Answers as the broker would, out of objects. What only the broker can do is not here."""

    def __init__(self, client: Client, place: Place, kinds: frozenset[type[Object]]) -> None:
        self._client = client
        self._place = place
        self._kinds = kinds
        self._said = place.namespace or _unless_default(client.access.namespace)
        self._known: Clerk[Any] | None = None

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
        with _advised():
            return await (await self._clerk()).release(reservation)

    async def all_reservations(
        self, *, role: str = "", phase: str = "", cluster: str = ""
    ) -> list[bodies.Reservation]:
        clerk = await self._clerk()
        if clerk.side is object_sides.BROKER and role and not cluster:
            raise InvalidInput(f"--role {role}: of which cluster?", hint="give --cluster as well")
        if clerk.side is object_sides.AGENT and role == "provider":
            listing = await self._client.list(_INSTRUCTIONS, clerk.namespace)
            told = [object_bodies.of_instruction(one) for one in listing.objects]
            return [one for one in told if object_clerks.matches(one, phase, "", cluster)]
        # What is borrowed here is borrowed by this cluster: the other one is meant.
        return await clerk.find_all(
            phase, role if clerk.side is object_sides.BROKER else "", cluster
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
        found.sort(key=lambda one: (one.spec.cluster_id, one.status.record is not None))
        by_cluster = {one.spec.cluster_id: one for one in found if one.spec.request is None}
        return [object_bodies.of_cluster(one) for one in by_cluster.values()]

    async def get_cluster(self, cluster: str) -> bodies.Cluster:
        for found in await self.all_clusters():
            if found.advertisement.cluster_id == cluster:
                return found
        raise NotFound(
            f"no cluster {cluster!r}{self.where}", hint="see `kubectl lend get clusters`"
        )

    # -- which side, and where

    async def _clerk(self) -> Clerk[Any]:
        if self._known is None:
            side, namespace = await self._side()
            if self._place.is_everywhere:
                namespace = ""
            owners = await self._owners(namespace) if side is object_sides.BROKER else {}
            self._known = Clerk(self._client, side, namespace, self._place.timeout, owners)
        return self._known

    async def _side(self) -> tuple[object_sides.Side[Any], str]:
        is_broker, is_agent = Reservation in self._kinds, ResourceRequest in self._kinds
        if is_broker and not is_agent:
            return object_sides.BROKER, self._said or await self._seat() or DEFAULT
        namespace = self._said or DEFAULT
        if is_broker and namespace in await self._seats(namespace):
            return object_sides.BROKER, namespace
        return object_sides.AGENT, namespace

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
        return {one.metadata.namespace for one in found if one.status.record is not None}


@contextlib.contextmanager
def _advised() -> Iterator[None]:
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


async def _defined(client: Client, found: Access) -> frozenset[type[Object]]:
    """Which of the kinds that matter here the API server knows; who is let in at all may ask that."""
    wanted = (ResourceRequest, Reservation, ClusterAdvertisement)
    groups = {kind.group: f"/apis/{kind.group}/{kind.version}" for kind in wanted}
    names = await asyncio.gather(*(_names(client, path) for path in groups.values()))
    by_group = dict(zip(groups, names, strict=True))
    kinds = frozenset(kind for kind in wanted if kind.plural in by_group[kind.group])
    if not kinds:
        named = "" if found.origin is None else f" of context {found.origin.context!r}"
        raise InvalidSettings(
            f"the cluster{named} knows no ResourceRequests and no Reservations",
            hint="install Kubelend there (docs/deploy.md), or choose another with --context",
        )
    return kinds


async def _names(client: Client, path: str) -> set[str]:
    try:
        content = await client.raw("GET", path)
    except NotFound:
        return set()
    return {one.name for one in msgspec.json.decode(content, type=_Kinds).resources}


def _unless_default(namespace: str) -> str:
    """What a context names: `default` is what it has if it names none."""
    return "" if namespace == DEFAULT else namespace
