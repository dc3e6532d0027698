"""The provider's side of a peering with Liqo: admits requesters, and grants their ResourceSlices.

A root task of the agent, level-triggered by reservation. A requester is admitted by the handshake that its
agent sends through the broker, and only for a reservation that this cluster holds for it. Liqo leaves slices
of class `kubelend` to this controller, which grants exactly the reserved amounts, and checks them again at
every change: a requester may write the status of its slices in this cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Final, NamedTuple

import structlog
from msgspec.structs import replace

from kubelend.agent.ports import Clock, HandshakeExchange
from kubelend.core.errors import InvalidInput, KubelendError, NotFound, WrongPhase
from kubelend.core.resources import Resources
from kubelend.kits import tasks
from kubelend.kits.workqueue import ReconcileQueue
from kubelend.kube import informer
from kubelend.kube.informer import Deleted, Listed
from kubelend.peerings import liqo_objects
from kubelend.peerings.liqo_api import LiqoApi
from kubelend.peerings.liqo_objects import (
    CORDON_ANNOTATION,
    NAMESPACES,
    RESERVATION_LABEL,
    SECRETS,
    SLICE_CLASS,
    SLICES,
    TENANTS,
    LiqoResource,
    Manifest,
)
from kubelend.wire import bodies

ACCEPTED, DENIED = "Accepted", "Denied"
REPLICATED: Final = "liqo.io/replicated=true"
"""Selects the slices of other clusters, and not those with which this cluster borrows."""
HANDSHAKE_INTERVAL: Final = timedelta(seconds=2)
HANDSHAKE_PERIOD: Final = timedelta(minutes=2)
"""How long a new reservation is checked for a handshake, for transports that do not notify of one."""

REMOVAL_INTERVAL: Final = timedelta(seconds=1)
"""How often the removal of a requester is checked."""

log = structlog.get_logger("kubelend.agent")


class LentReservation(NamedTuple):
    """A reservation that this cluster holds."""

    requester: str
    resources: Resources
    reserved_at: datetime | None = None


Lent = Callable[[], Mapping[str, LentReservation]]
"""Returns the reservations that this cluster holds now, by ID."""


class SliceDecision(NamedTuple):
    """What the provider answers to a slice."""

    status: str
    reason: str
    message: str
    amounts: dict[str, str] = {}  # noqa: RUF012 - never changed


def decide_slice(
    found: LiqoResource, requester: str, lent: LentReservation | None
) -> SliceDecision | None:
    """Returns the answer to a slice; None if it is not for us, or not authenticated by Liqo yet."""
    if found.spec.get("class") != SLICE_CLASS or not _is_accepted(found, "Authentication"):
        return None
    name = liqo_objects.reservation_of(found)
    if lent is None:
        return SliceDecision(DENIED, "NotReserved", f"this cluster holds no reservation {name}")
    if requester != lent.requester:
        return SliceDecision(DENIED, "OtherRequester", f"reservation {name} is not yours")
    try:
        wanted = liqo_objects.parse_amounts(found.spec.get("resources") or {})
    except InvalidInput as error:
        return SliceDecision(DENIED, "InvalidQuantity", error.message)
    if not wanted.fits_in(lent.resources):
        message = f"only {lent.resources.describe()} is reserved"
        return SliceDecision(DENIED, "MoreThanReserved", message)
    amounts = liqo_objects.slice_amounts(lent.resources)
    return SliceDecision(ACCEPTED, "Reserved", f"reservation {name}", amounts)


def status_patch(found: LiqoResource, decision: SliceDecision, now: datetime) -> Manifest:
    """Returns the change of a slice's status; empty if it says that already.

    The list of conditions is replaced as a whole, because Liqo's CRD gives it no keys: with another list the
    condition of Liqo itself would be lost.
    """
    known = _condition(found, "Resources")
    is_same = (known.get("status"), known.get("message")) == (decision.status, decision.message)
    amounts = found.status.get("resources") or {}
    if is_same and (decision.status == DENIED or amounts == decision.amounts):
        return {}
    others = [one for one in found.status["conditions"] if one.get("type") != "Resources"]
    condition = {
        "type": "Resources",
        "status": decision.status,
        "reason": decision.reason,
        "message": decision.message,
        "lastTransitionTime": f"{now:%Y-%m-%dT%H:%M:%SZ}",
    }
    status: Manifest = {"conditions": [*others, condition]}
    if decision.status == ACCEPTED:
        stale = dict.fromkeys(amounts.keys() - decision.amounts.keys())
        status["resources"] = {**stale, **decision.amounts}
        status["nodeLabels"] = {RESERVATION_LABEL: liqo_objects.reservation_of(found)}
    return {"metadata": {"resourceVersion": found.metadata.resource_version}, "status": status}


class LiqoProvider:
    """Use `run` as a root task; enqueue reservations that change with `on_change`."""

    def __init__(self, api: LiqoApi, exchange: HandshakeExchange, lent: Lent, clock: Clock) -> None:
        self._api = api
        self._exchange = exchange
        self._lent = lent
        self._clock = clock
        self._cluster_id = ""
        self._slices: dict[str, LiqoResource] = {}
        self._admitted: set[str] = set()
        """Reservations whose requester has what it needs for its identity here."""
        self._removing: set[str] = set()
        """Liqo IDs of requesters whose Tenant is being removed."""
        self._queue = ReconcileQueue("ResourceSlice", self._reconcile, log)

    def on_change(self, reservation: str) -> None:
        """The reservation, or its handshake, has changed."""
        if reservation in {*self._lent(), *self._admitted} or self._slices_of(reservation):
            self._queue.add(reservation)

    async def run(self) -> None:
        await tasks.run_all({"slices": self._watch_slices(), "reconcile": self._queue.run()})

    async def _watch_slices(self) -> None:
        async for change in informer.list_and_watch(self._api.client, SLICES, labels=REPLICATED):
            match change:
                case Listed(objects):
                    changed = [*self._slices.values(), *objects]
                    self._slices = {one.metadata.name: one for one in objects}
                case Deleted(found):
                    self._slices.pop(found.metadata.name, None)
                    changed = [found]
                    await self._delete_certificate(found)
                case LiqoResource():
                    self._slices[change.metadata.name] = change
                    changed = [change]
                case _:
                    changed = []
            for one in changed:
                self._queue.add(liqo_objects.reservation_of(one))

    def _slices_of(self, reservation: str) -> list[LiqoResource]:
        """The slices of a reservation that are not being deleted, the oldest first."""
        found = [
            one
            for one in self._slices.values()
            if liqo_objects.reservation_of(one) == reservation and not one.is_being_deleted
        ]
        return sorted(
            found, key=lambda one: (str(one.metadata.creation_timestamp), one.metadata.name)
        )

    async def _reconcile(self, reservation: str) -> None:
        lent = self._lent().get(reservation)
        if lent is not None and reservation not in self._admitted:
            await self._admit(reservation, lent)
        for number, found in enumerate(self._slices_of(reservation)):
            # What is reserved is granted once, however many slices a requester makes for it.
            await self._answer(found, None if number else lent)
        if lent is None:
            self._admitted.discard(reservation)
            await self._remove_unused_tenants()
            if self._removing:
                self._queue.add_after(reservation, REMOVAL_INTERVAL)

    # -- the handshake

    async def _admit(self, reservation: str, lent: LentReservation) -> None:
        """Answers the requester's handshake as far as it has come."""
        own = bodies.Handshake(await self._own_id())
        try:
            requester = (await self._exchange.exchange_handshake(reservation, own)).peer
            while requester is not None and reservation not in self._admitted:
                answer = await self._answer_handshake(reservation, own, requester, lent)
                newest = (await self._exchange.exchange_handshake(reservation, answer)).peer
                if newest == requester:
                    return
                requester = newest
        except (NotFound, WrongPhase):
            return  # it has ended
        began = lent.reserved_at
        if requester is None and began is not None and self._clock() - began < HANDSHAKE_PERIOD:
            self._queue.add_after(reservation, HANDSHAKE_INTERVAL)

    async def _answer_handshake(
        self,
        reservation: str,
        own: bodies.Handshake,
        requester: bodies.Handshake,
        lent: LentReservation,
    ) -> bodies.Handshake:
        remote = requester.cluster_id
        tenant = await self._api.find(TENANTS, remote, liqo_objects.tenant_namespace(remote))
        if tenant is not None and liqo_objects.kubelend_cluster(tenant) != lent.requester:
            return replace(own, error=f"Liqo cluster ID {remote} belongs to another cluster")
        nonce = await self._nonce(remote)
        if not requester.signed_nonce:
            return replace(own, nonce=nonce)
        await self._api.apply(TENANTS, liqo_objects.tenant_manifest(lent.requester, requester))
        issued = await self._api.complete(
            TENANTS,
            remote,
            liqo_objects.tenant_namespace(remote),
            liqo_objects.handshake_parameters,
        )
        if issued is None:
            return replace(own, nonce=nonce, error="Liqo has not issued a certificate yet")
        self._admitted.add(reservation)
        log.info("Requester admitted", reservation=reservation, requester=lent.requester)
        return replace(issued, cluster_id=own.cluster_id, nonce=nonce)

    async def _nonce(self, remote: str) -> str:
        await self._api.apply(NAMESPACES, liqo_objects.namespace_manifest(remote))
        wanted = liqo_objects.nonce_manifest(remote)
        await self._api.apply(SECRETS, wanted)
        name, namespace = wanted["metadata"]["name"], wanted["metadata"]["namespace"]
        found = await self._api.complete(
            SECRETS, name, namespace, lambda secret: secret.data.get("nonce")
        )
        return found or ""

    async def _own_id(self) -> str:
        self._cluster_id = self._cluster_id or await self._api.cluster_id()
        return self._cluster_id

    # -- slices

    async def _answer(self, found: LiqoResource, lent: LentReservation | None) -> None:
        if lent is None and _is_accepted(found, "Resources"):
            await self._cordon(found)
            return
        decision = decide_slice(found, await self._requester_of(found), lent)
        if decision is None:
            return
        patch = status_patch(found, decision, self._clock())
        if not patch:
            return
        name, namespace = found.metadata.name, found.metadata.namespace
        await self._api.client.patch(SLICES, name, namespace, patch, subresource="status")
        keys = {"reservation": name, "reason": decision.message}
        log.info(f"ResourceSlice {decision.status.lower()}", **keys)

    async def _requester_of(self, found: LiqoResource) -> str:
        """The ID at the broker of the cluster that has sent a slice; empty if we have not admitted it."""
        remote = found.metadata.labels.get("liqo.io/originID", "")
        tenant = await self._api.find(TENANTS, remote, found.metadata.namespace) if remote else None
        return "" if tenant is None else liqo_objects.kubelend_cluster(tenant)

    async def _cordon(self, found: LiqoResource) -> None:
        """Its reservation has ended: no new pods. Denying it would undo nothing."""
        if found.metadata.annotations.get(CORDON_ANNOTATION) == "true":
            return
        change = {"metadata": {"annotations": {CORDON_ANNOTATION: "true"}}}
        name, namespace = found.metadata.name, found.metadata.namespace
        await self._api.client.patch(SLICES, name, namespace, change)
        log.info("ResourceSlice cordoned", reservation=name)

    async def _delete_certificate(self, gone: LiqoResource) -> None:
        """Liqo leaves this Secret behind."""
        name, namespace = gone.metadata.name, gone.metadata.namespace
        try:
            await self._api.client.delete(SECRETS, f"liqo-remote-certificate-{name}", namespace)
        except KubelendError as error:
            log.warning(
                "Failed to delete Secret of ResourceSlice", reservation=name, error=str(error)
            )

    async def _remove_unused_tenants(self) -> None:
        """After the last reservation of a requester: what its handshake has created here."""
        requesters = {each.requester for each in self._lent().values()}
        tenants = await self._api.list(TENANTS)
        # Liqo creates a ForeignCluster again as long as the Tenant is there.
        for remote in self._removing - {one.spec["clusterID"] for one in tenants}:
            if not await self._api.delete_unused_foreign_cluster(remote):
                self._removing.discard(remote)
        for tenant in tenants:
            namespace = tenant.metadata.namespace
            is_used = liqo_objects.kubelend_cluster(tenant) in requesters
            if tenant.is_managed and not is_used and not self._has_slices(namespace):
                await self._remove_tenant(tenant)

    async def _remove_tenant(self, tenant: LiqoResource) -> None:
        self._removing.add(tenant.spec["clusterID"])
        if not tenant.is_being_deleted:
            await self._api.delete(TENANTS, tenant)
            await self._api.delete_unused_namespace(tenant.metadata.namespace)
            log.info("Requester removed", requester=liqo_objects.kubelend_cluster(tenant))

    def _has_slices(self, namespace: str) -> bool:
        return any(one.metadata.namespace == namespace for one in self._slices.values())


def _condition(found: LiqoResource, kind: str) -> Manifest:
    conditions = found.status.get("conditions") or []
    return next((one for one in conditions if one.get("type") == kind), {})


def _is_accepted(found: LiqoResource, kind: str) -> bool:
    return _condition(found, kind).get("status") == ACCEPTED
