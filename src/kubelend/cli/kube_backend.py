"""The backend of `kubectl lend`: reads and writes custom resources with the credentials of the kubeconfig.

It returns bodies of the REST interface, so that commands do not differ. Which resources the API server serves
decides the kind of object: ResourceRequests in an agent's cluster, Reservations in the broker's. Where both
are served, a namespace with the broker's own records is the broker's. Kubernetes' RBAC decides what a user
may do.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import secrets
from collections import defaultdict
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
)
from datetime import timedelta
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from kubelend.cli import calls, kube_objects, output
from kubelend.cli.kube_objects import InstructedBody, KindAdapter
from kubelend.cli.options import KubeTarget
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
from kubelend.core.pod_requests import VIRTUAL_NODE_LABEL
from kubelend.core.resources import NOTHING
from kubelend.kits.backoff import Backoff
from kubelend.kube import config, informer, resources
from kubelend.kube.client import Client
from kubelend.kube.config import KubeConfig
from kubelend.kube.resources import Resource
from kubelend.sources.kubernetes import PODS, UNFINISHED_PODS_SELECTOR, PodProjection
from kubelend.wire import bodies, cluster_namespaces, quantities
from kubelend.wire.broker_objects import (
    CORDON_ANNOTATION,
    DRAIN_ANNOTATION,
    UNCORDON_ANNOTATION,
    ClusterAdvertisement,
    PlacementReview,
    PlacementReviewSpec,
    Reservation,
)
from kubelend.wire.objects import (
    Kind,
    Metadata,
    Object,
    ProviderInstruction,
    ReservationInstruction,
    ResourceRequest,
)

REQUEST_HASH: Final = "kubelend.io/request-hash"
"""Annotation with the hash of the request, to detect a key that is reused for another one."""

WATCH_BACKOFF: Final = Backoff(
    retries=informer.UNLIMITED_RETRIES, first=timedelta(milliseconds=100)
)
DEFAULT: Final = "default"

_ADVERTISEMENTS: Final = resources.resource_for(ClusterAdvertisement)
_REVIEWS: Final = resources.resource_for(PlacementReview)
_INSTRUCTIONS: Final = resources.resource_for(ProviderInstruction)
_USES: Final = resources.resource_for(ReservationInstruction)
_NAMESPACES: Final = resources.resource_for(cluster_namespaces.Namespace, namespaced=False)


@contextlib.asynccontextmanager
async def open_backend(target: KubeTarget) -> AsyncIterator[KubeBackend]:
    """Connect to the cluster; errors within carry a hint on the roles that are needed."""
    found = kube_config(target)
    with _with_role_hint():
        async with Client.open(found, timeout=target.timeout) as client:
            yield KubeBackend(client, target, await _served_kinds(client, found))


def kube_config(target: KubeTarget) -> KubeConfig:
    """Load the client config by kubectl's rules: flags, $KUBECONFIG, home directory, service account."""
    is_named = bool(target.kubeconfig or target.context)
    is_pod = bool(os.environ.get(config.HOST_VARIABLE))
    if is_pod and not is_named and not any(path.exists() for path in config.kubeconfig_files()):
        return config.in_cluster_config()
    return config.config_from_kubeconfig(target.kubeconfig, target.context)


class _Selection(NamedTuple):
    """Which kind of object is used where."""

    adapter: KindAdapter[Any]
    namespace: str
    """Empty: all of them."""
    owners: Mapping[str, str]
    """The cluster of each cluster namespace, which is the requester of what is in it."""

    def body(self, found: Object) -> bodies.Reservation:
        body = self.adapter.to_body(found)
        if (owner := self.owners.get(found.metadata.namespace)) is not None:
            body = replace(body, requester_id=owner)
        return body if self.namespace else replace(body, id=found.key)

    def changed(self, change: informer.Change[Any]) -> list[bodies.Reservation]:
        match change:
            case informer.Listed():
                found = change.objects
            case informer.Deleted():
                return [_as_released(self.body(change.found))]
            case Object():
                found = [change]
            case _:
                return []
        return [self.body(one) for one in found if self.adapter.is_listed(one)]


class KubeBackend:
    """The `Backend` on custom resources; what only the broker can do is not here."""

    def __init__(self, client: Client, target: KubeTarget, kinds: frozenset[type[Object]]) -> None:
        self._client = client
        self._target = target
        self._kinds = kinds
        # `default` is also the namespace of a context that names none, so it does not count.
        known = client.config.namespace
        self._namespace = target.namespace or ("" if known == DEFAULT else known)
        self._selection: _Selection | None = None

    @property
    def where(self) -> str:
        """Where objects were searched, as the end of a sentence."""
        namespace = self._namespace if self._selection is None else self._selection.namespace
        return f" in namespace {namespace}" if namespace else " in any namespace"

    async def reserve(
        self, request: bodies.ReservationRequest, *, key: str = ""
    ) -> bodies.Reservation:
        """Create the object and wait for the decision; delete it if there is none, or if it failed."""
        cluster_namespaces.check_request(request)
        selected = await self._select()
        wanted = selected.adapter.build(_metadata(request, key, selected.namespace), request)
        try:
            made = await self._client.create(selected.adapter.resource, wanted)
        except AlreadyExists:
            same = await self._same(wanted)
            return selected.body(await self._wait_until_decided(same))
        except (Unavailable, asyncio.CancelledError):
            if not key:  # it may have been created, under a name that only this call uses
                await self._withdraw(wanted)
            raise
        found = selected.body(await self._wait_or_withdraw(made))
        if found.status.phase == "Failed":
            await self._withdraw(made)
        return found

    async def get_reservation(self, reservation: str) -> bodies.Reservation:
        found = await self._find(reservation)
        return (await self._select()).body(found)

    async def all_reservations(
        self, *, role: str = "", phase: str = "", cluster: str = ""
    ) -> list[bodies.Reservation]:
        selected = await self._select()
        adapter, namespace = selected.adapter, selected.namespace
        is_broker = adapter is kube_objects.RESERVATIONS
        found: list[bodies.Reservation]
        if is_broker and role and not cluster:
            raise InvalidInput(f"--role {role} requires a cluster", hint="add --cluster")
        if not is_broker and role == "provider":
            lent = (await self._client.list(_INSTRUCTIONS, namespace)).objects
            found = [kube_objects.body_from_instruction(one) for one in lent]
        else:
            listing = await self._client.list(adapter.resource, namespace, labels=adapter.labels)
            found = [selected.body(one) for one in listing.objects if adapter.is_listed(one)]
        # In an agent's cluster that is one side of all: --cluster is the other one.
        side = role if is_broker else ""
        return [one for one in found if matches_filter(one, phase, side, cluster)]

    async def instructed_reservations(
        self, *, role: str, phase: str = "", cluster: str = ""
    ) -> list[bodies.Reservation]:
        """As `all_reservations`; in an agent's cluster with prices, nodes and what pods use, as far as the
        user may read them.
        """
        selected = await self._select()
        found = await self.all_reservations(role=role, phase=phase, cluster=cluster)
        if selected.adapter is kube_objects.RESERVATIONS:
            return found
        if role == "provider":
            return [*await self._with_offloaded(found)]
        uses = await self._uses(selected.namespace)
        listed = [kube_objects.with_use(one, uses.pop(_name_at_broker(one), None)) for one in found]
        others = [
            kube_objects.body_from_use(one)
            for one in uses.values()
            if selected.namespace in ("", one.metadata.namespace)
        ]
        listed += [one for one in others if matches_filter(one, phase, "", cluster)]
        return [await self._with_node_use(one) for one in listed]

    async def _uses(self, namespace: str) -> dict[str, ReservationInstruction]:
        """By reservation. The agent has them in a namespace of its own, or in that of each request."""
        for scope in dict.fromkeys(("", namespace)):
            with contextlib.suppress(Forbidden):
                found = (await self._client.list(_USES, scope)).objects
                return {one.spec.reservation_name: one for one in found}
        return {}

    async def _with_node_use(self, found: InstructedBody) -> InstructedBody:
        """With the requests of the pods on its node."""
        if not found.node_name:
            return found
        selector = f"spec.nodeName={found.node_name},{UNFINISHED_PODS_SELECTOR}"
        with contextlib.suppress(Forbidden):
            pods = (await self._client.list(PODS, fields=selector)).objects
            return replace(found, used=_sum_of_requests(pods))
        return found

    async def _with_offloaded(self, found: list[bodies.Reservation]) -> list[bodies.Reservation]:
        """With the requests of the pods that its requester has offloaded to this cluster."""
        try:
            listed = await self._client.list(PODS, labels=VIRTUAL_NODE_LABEL)
        except Forbidden:
            return found
        pods = defaultdict(list)
        for pod in listed.objects:
            if (origin := pod.projected.offloaded_from) is not None:
                pods[origin.virtual_node].append(pod)
        return [
            bodies.copy_fields(one, InstructedBody, used=_sum_of_requests(pods[one.id]))
            for one in found
        ]

    async def release(self, reservation: str) -> bodies.Reservation:
        """Delete the object, and wait until its finalizers are removed: then the resources are released."""
        # The caller may keep the error until others are released, outside `open_backend`.
        with _with_role_hint():
            found = await self._find(reservation)
            await self._delete(found)
            selected = await self._select()
            await self._wait_for(selected.adapter.resource, found, lambda _: False, "released")
            return _as_released(selected.body(found))

    async def stream(self) -> AsyncGenerator[bodies.Instruction, None]:
        """All objects, and then each change. Only the first list may fail."""
        selected = await self._select()
        labels = selected.adapter.labels
        scope = selected.adapter.resource, selected.namespace
        await self._client.list(*scope, labels=labels)
        changes = informer.list_and_watch(
            self._client, *scope, labels=labels, report=_note_watch_problem
        )
        async with contextlib.aclosing(changes) as stream:
            async for change in stream:
                for body in selected.changed(change):
                    yield bodies.Instruction(0, "requester", "", body.status.message, body)

    async def all_clusters(self) -> list[bodies.Cluster]:
        return list(map(kube_objects.body_from_advertisement, await self._advertisements()))

    async def _advertisements(self) -> Iterable[ClusterAdvertisement]:
        """One for each cluster: of several objects, the one with the broker's record."""
        self._check_is_broker("has the list of clusters")
        self._namespace = self._namespace or await self._broker_namespace()
        namespace = "" if self._target.is_everywhere else self._namespace
        found = (await self._client.list(_ADVERTISEMENTS, namespace)).objects
        found.sort(key=lambda one: (one.spec.cluster_id, one.status.record is not None))
        return {one.spec.cluster_id: one for one in found if one.spec.renew_time is None}.values()

    def _check_is_broker(self, what: str) -> None:
        if ClusterAdvertisement not in self._kinds:
            raise InvalidSettings(
                f"this is an agent's cluster; only the broker's cluster {what}",
                hint="select it with --kube-context; `kubectl get advertisements` shows this cluster's own",
            )

    async def get_cluster(self, cluster: str) -> bodies.Cluster:
        return kube_objects.body_from_advertisement(await self._advertisement(cluster))

    # -- what an administrator requests by an annotation

    async def cordon(self, cluster: str, reason: str = "") -> bodies.Cluster:
        return await self._annotate(cluster, CORDON_ANNOTATION, reason)

    async def uncordon(self, cluster: str) -> bodies.Cluster:
        return await self._annotate(cluster, UNCORDON_ANNOTATION)

    async def drain(self, cluster: str, reason: str = "") -> bodies.DrainResult:
        """Reservations that are made between the list and the drain are drained, and not in the result."""
        await self._advertisement(cluster)
        lent = await self.all_reservations(role="provider", phase=calls.LIVE, cluster=cluster)
        drained = await self._annotate(cluster, DRAIN_ANNOTATION, reason)
        selected, left = await self._select(), []
        for one in lent:  # the objects follow the commit
            found = await self._find(one.id)
            newest = await self._wait_for(
                selected.adapter.resource, found, lambda one: _has_left(one, cluster), "drained"
            )
            left.append(selected.body(newest or found))
        return bodies.DrainResult(drained, left)

    async def _annotate(self, cluster: str, annotation: str, reason: str = "") -> bodies.Cluster:
        """Wait until the broker has removed the annotation; on any error remove it here."""
        known = (await self._advertisement(cluster)).metadata
        patch = partial(self._client.patch, _ADVERTISEMENTS, known.name, known.namespace)
        annotated = await patch({"metadata": {"annotations": {annotation: reason}}})
        try:
            found = await self._wait_for(
                _ADVERTISEMENTS, annotated, lambda one: annotation not in one.metadata.annotations
            )
        except (KubelendError, asyncio.CancelledError):
            with contextlib.suppress(KubelendError):
                await patch({"metadata": {"annotations": {annotation: None}}})
            raise
        if found is None:
            raise NotFound(f"the advertisement of cluster {cluster!r} was deleted")
        return kube_objects.body_from_advertisement(found)

    async def _advertisement(self, cluster: str) -> ClusterAdvertisement:
        for found in await self._advertisements():
            if found.spec.cluster_id == cluster:
                return found
        raise NotFound(
            f"no cluster {cluster!r}{self.where}", hint="see `kubectl lend get clusters`"
        )

    # -- reviews

    async def explain(
        self, request: bodies.ReservationRequest, *, limit: int = 20
    ) -> bodies.Explanation:
        return await self._review(PlacementReviewSpec(request, limit=limit))

    async def explain_reservation(self, reservation: str, *, limit: int = 20) -> bodies.Explanation:
        return await self._review(PlacementReviewSpec(reservation_name=reservation, limit=limit))

    async def reserve_dry_run(self, request: bodies.ReservationRequest) -> bodies.Explanation:
        return await self.explain(request)

    async def _review(self, spec: PlacementReviewSpec) -> bodies.Explanation:
        """Create a review, wait for its result, and delete it."""
        self._check_is_broker("explains requests")
        selected = await self._select()
        metadata = Metadata(f"lend-{secrets.token_hex(4)}", selected.namespace)
        made = await self._client.create(_REVIEWS, PlacementReview(metadata, spec))
        try:
            found = await self._wait_for(_REVIEWS, made, lambda one: bool(one.status.conditions))
        finally:
            with contextlib.suppress(KubelendError):  # the broker deletes it later
                await self._client.delete(_REVIEWS, metadata.name, metadata.namespace)
        if found is None:
            raise NotFound(f"{metadata.name} was deleted by another client", hint="try again")
        accepted = cluster_namespaces.find_accepted(found.status.conditions)
        if (error := cluster_namespaces.error_from_condition(accepted)) is not None:
            raise error
        return found.status.explanation or bodies.Explanation("", 0, 0, {})

    # -- one object

    async def _same(self, wanted: Object) -> Object:
        found = await self._find(wanted.metadata.name)
        known, hashed = found.metadata, wanted.metadata.annotations[REQUEST_HASH]
        if known.annotations.get(REQUEST_HASH) != hashed:
            raise KeyReused(
                f"this key belongs to {known.name}, which requests something else",
                hint="use a new key for a new request",
            )
        return found

    async def _find(self, name: str) -> Object:
        """By the object's name, perhaps as `namespace/name`, or by the reservation's name at the broker."""
        adapter, own, _ = await self._select()
        prefix, slash, short = name.rpartition("/")
        namespace = prefix if slash else own
        found: Object | None = await self._client.find(adapter.resource, short, namespace)
        if found is not None:
            return found
        listed: list[Object] = (await self._client.list(adapter.resource, namespace)).objects
        for one in listed:
            if adapter.reservation_name(one) == short:
                return one
        raise NotFound(
            f"no reservation {short!r} in namespace {namespace!r}",
            hint="give another --namespace",
        )

    async def _wait_or_withdraw(self, made: Object) -> Object:
        """Wait for the decision; on any error delete the object, which would be orphaned."""
        try:
            return await self._wait_until_decided(made)
        except NotFound:
            raise
        except asyncio.CancelledError:
            await self._withdraw(made)
            raise
        except KubelendError as error:
            raise output.with_detail(error, await self._withdraw(made)) from None

    async def _wait_until_decided(self, made: Object) -> Object:
        adapter = (await self._select()).adapter
        found: Object | None = await self._wait_for(adapter.resource, made, adapter.is_decided)
        if found is None:
            raise NotFound(f"{made.metadata.name} was deleted by another client", hint="try again")
        return found

    async def _withdraw(self, made: Object) -> str:
        """Delete the object; returns the outcome as text."""
        try:
            await self._delete(made)
        except KubelendError as error:
            return f"it could not be deleted: {error.message}"
        return "it was deleted"

    async def _delete(self, found: Object) -> None:
        known, resource = found.metadata, (await self._select()).adapter.resource
        await self._client.delete(resource, known.name, known.namespace, uid=known.uid)

    async def _wait_for(
        self,
        resource: Resource[Kind],
        found: Kind,
        is_met: Callable[[Any], bool],
        outcome: str = "reconciled",
    ) -> Kind | None:
        """Watch an object until its state meets the condition; None when it is gone.

        Errors that may pass are retried; `Unavailable` after the timeout has the last one.
        """
        adapter, known, problems = (await self._select()).adapter, found.metadata, [""]
        changes = informer.list_and_watch(
            *(self._client, resource, known.namespace),
            fields=f"metadata.name={known.name}",
            report=problems.append,
            backoff=WATCH_BACKOFF,
            retries_all=False,
        )
        try:
            async with (
                asyncio.timeout(self._target.timeout.total_seconds()),
                contextlib.aclosing(changes),
            ):
                async for change in changes:
                    newest: Kind | None = _object_in(change, known.uid)
                    if newest is None or is_met(newest):
                        return newest
                    found = newest
        except TimeoutError:
            is_request = resource is adapter.resource
            last = problems[-1] or (
                adapter.to_body(found).status.message if is_request else "no answer"
            )
            raise Unavailable(
                f"{known.name} was not {outcome} within"
                f" {durations.format_duration_short(self._target.timeout)}: {last}",
                hint=f"check that there is {adapter.controller}",
            ) from None
        raise AssertionError  # it watches until it is cancelled

    # -- selection of kind and namespace

    async def _select(self) -> _Selection:
        if self._selection is None:
            adapter, namespace = await self._adapter()
            if self._target.is_everywhere:
                namespace = ""
            owners = await self._owners(namespace) if adapter is kube_objects.RESERVATIONS else {}
            self._selection = _Selection(adapter, namespace, owners)
        return self._selection

    async def _adapter(self) -> tuple[KindAdapter[Any], str]:
        is_broker, is_agent = Reservation in self._kinds, ResourceRequest in self._kinds
        if is_broker and not is_agent:
            return kube_objects.RESERVATIONS, self._namespace or await self._broker_namespace()
        namespace = self._namespace or DEFAULT
        if is_broker and namespace in await self._broker_namespaces(namespace):
            return kube_objects.RESERVATIONS, namespace
        return kube_objects.RESOURCE_REQUESTS, namespace

    async def _owners(self, namespace: str) -> dict[str, str]:
        """The cluster of each cluster namespace, as far as the user may read namespaces (role `view`)."""
        label = cluster_namespaces.CLUSTER_LABEL
        try:
            if namespace:
                found = [await self._client.find(_NAMESPACES, namespace)]
            else:
                found = [*(await self._client.list(_NAMESPACES, labels=label)).objects]
        except Forbidden:
            return {}
        return {one.metadata.name: one.cluster_id for one in found if one and one.cluster_id}

    async def _broker_namespace(self) -> str:
        """The one namespace in which there is a broker; the default one if there is none."""
        found = await self._broker_namespaces("")
        if len(found) > 1 and DEFAULT not in found:
            raise InvalidSettings(
                f"there are brokers in the namespaces {', '.join(sorted(found))}",
                hint="select one with --namespace",
            )
        return DEFAULT if DEFAULT in found else next(iter(found), DEFAULT)

    async def _broker_namespaces(self, namespace: str) -> set[str]:
        """Namespaces with records of a broker; none if the user may not list them."""
        try:
            found = (await self._client.list(_ADVERTISEMENTS, namespace)).objects
        except Forbidden:
            return set()
        return {one.metadata.namespace for one in found if one.status.record is not None}


def _object_in(change: informer.Change[Any], uid: str) -> Any:
    """The object of this UID after a change of its name; None if it is gone."""
    found = change.objects if isinstance(change, informer.Listed) else [change]
    return next((one for one in found if isinstance(one, Object) and one.metadata.uid == uid), None)


def _has_left(found: Reservation, cluster: str) -> bool:
    is_live = found.status.phase in calls.LIVE.split(",")
    return not is_live or found.status.target_cluster_id != cluster


def _name_at_broker(found: bodies.Reservation) -> str:
    return str(getattr(found, "reservation_name", ""))


def _sum_of_requests(pods: Iterable[PodProjection]) -> bodies.Amounts:
    total = sum((pod.projected.requests for pod in pods), start=NOTHING)
    return quantities.to_quantities(total)


def _metadata(request: bodies.ReservationRequest, key: str, namespace: str) -> Metadata:
    """The name is made from the key, so that a second call with the same key finds the first object."""
    part = _digest(key.encode())[:16] if key else secrets.token_hex(4)
    request_hash = _digest(msgspec.json.encode(request))
    return Metadata(f"lend-{part}", namespace, annotations={REQUEST_HASH: request_hash})


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def matches_filter(found: bodies.Reservation, phase: str, role: str, cluster: str) -> bool:
    """Whether a reservation matches; an empty filter matches all."""
    sides = {"requester": found.requester_id, "provider": found.target_cluster_id}
    wanted = [sides[role]] if role in sides and cluster else list(sides.values())
    is_phase = not phase or found.status.phase in phase.split(",")
    return is_phase and (not cluster or cluster in wanted)


def _as_released(found: bodies.Reservation) -> bodies.Reservation:
    """The state after the object was deleted."""
    if found.status.phase == "Failed":
        return found
    status = replace(found.status, phase="Released", message="released", finished_at=output.now())
    return replace(found, status=status)


def _note_watch_problem(problem: str) -> None:
    if problem:
        output.note(f"watch failed, retrying: {problem}")


@contextlib.contextmanager
def _with_role_hint() -> Iterator[None]:
    """Add the needed roles to errors of missing permission."""
    try:
        yield
    except Unauthenticated:
        raise
    except Forbidden as error:
        raise Forbidden(error.message, hint=_ROLES) from error


_ROLES: Final = (
    "the role `view` in the namespace allows reading, `edit` borrowing, and `admin` draining"
)


class _Kind(msgspec.Struct):
    name: str


class _Kinds(msgspec.Struct):
    resources: list[_Kind]


async def _served_kinds(client: Client, found: KubeConfig) -> frozenset[type[Object]]:
    """Which of our kinds the API server serves; every authenticated user may ask that."""
    wanted = (ResourceRequest, Reservation, ClusterAdvertisement)
    groups = {kind.group: f"/apis/{kind.group}/{kind.version}" for kind in wanted}
    names = await asyncio.gather(*(_served_resources(client, path) for path in groups.values()))
    by_group = dict(zip(groups, names, strict=True))
    kinds = frozenset(kind for kind in wanted if kind.plural in by_group[kind.group])
    if not kinds:
        named = "" if found.origin is None else f" of context {found.origin.context!r}"
        raise InvalidSettings(
            f"the cluster{named} serves neither ResourceRequests nor Reservations",
            hint="install Kubelend there (docs/deploy.md), or select another with --kube-context",
        )
    return kinds


async def _served_resources(client: Client, path: str) -> set[str]:
    try:
        content = await client.raw("GET", path)
    except NotFound:
        return set()
    return {one.name for one in msgspec.json.decode(content, type=_Kinds).resources}
