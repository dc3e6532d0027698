"""The provider's side of a peering with Liqo: admits requesters, and grants their ResourceSlices.

A root task of the agent, level-triggered by reservation. A requester is admitted by the handshake that its
agent sends through the broker, and only for a reservation that this cluster holds for it. Liqo leaves slices
of class `kubelend` to this controller. It accepts one, with exactly the reserved amounts, if this cluster
holds the reservation and the broker has signed a grant of it, and checks it again at every change: a
requester may write the status of its slices in this cluster. When the reservation has ended, no new pods are
accepted, and after a while those that are left are deleted.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import Final, NamedTuple

import structlog
from msgspec.structs import replace

from kubelend.agent.ports import Clock, HandshakeExchange
from kubelend.core import grants
from kubelend.core.errors import InvalidGrant, KubelendError, NotFound, WrongPhase
from kubelend.core.grants import Grant
from kubelend.kits import tasks
from kubelend.kits.workqueue import ReconcileQueue
from kubelend.kube import informer
from kubelend.kube.informer import Deleted, Listed
from kubelend.peerings import liqo_objects, liqo_removal, slice_decision
from kubelend.peerings.liqo_api import LiqoApi
from kubelend.peerings.liqo_objects import (
    CORDON_ANNOTATION,
    FOREIGN_CLUSTERS,
    GRANT_ANNOTATION,
    IDENTITIES,
    NAMESPACE_MAPS,
    NAMESPACES,
    REMOTE_LABEL,
    REQUESTER_ANNOTATION,
    SECRETS,
    SHADOW_PODS,
    SLICES,
    TENANT_NAMESPACES,
    TENANTS,
    LiqoResource,
)
from kubelend.peerings.liqo_removal import ObservedRequester
from kubelend.peerings.slice_decision import (
    ACCEPTED,
    DENIED,
    INVALID_GRANT,
    NO_GRANT,
    UNKNOWN_KEY,
    Denial,
    LentReservation,
    SliceDecision,
    is_granted,
    is_ours,
)
from kubelend.wire import bodies

CORDONED_ANNOTATION: Final = "kubelend.io/cordoned"
"""Marks a cordon of the agent."""
_CORDON_ANNOTATIONS: Final = (CORDON_ANNOTATION, CORDONED_ANNOTATION)
REPLICATED: Final = "liqo.io/replicated=true"
"""Selects the slices of other clusters, and not those with which this cluster borrows."""
REMOVAL_INTERVAL: Final = timedelta(seconds=1)
"""How often the removal of a requester is checked."""
REMOVAL_DELAY: Final = timedelta(seconds=5)
"""After the start: until then the broker has reported the reservations that are not held yet."""
UNUSED_DELAY: Final = timedelta(seconds=15)
"""How long a requester stays admitted after its last reservation. Its own side goes first, because Liqo needs
the Tenant for that; and the next reservation finds the peering as it was."""
_REMOVAL: Final = ""
"""The key in the queue for the removal of unused requesters, beside the IDs of reservations."""

RECLAIM_INTERVAL: Final = timedelta(seconds=5)
"""How often pods of an ended reservation are looked for, after they were deleted."""
KEYS_INTERVAL: Final = timedelta(seconds=30)
"""At least this long between two requests for the broker's keys."""
KEYS_MAX_AGE: Final = timedelta(hours=1)
"""After which the keys are fetched again, so that one that was withdrawn no longer counts."""
MAX_EARLY: Final = 256
MAX_VERIFIED: Final = 256
"""Grants of which the result is cached; the oldest is dropped."""

log = structlog.get_logger("kubelend.agent")


Lent = Callable[[], Mapping[str, LentReservation]]
"""Returns the reservations that this cluster holds now, by ID."""


VerifySignature = Callable[[str, bodies.KeySet], Awaitable[str]]
"""Verifies a grant with the key that it names; returns the problem, empty if its signature is valid."""


class GrantVerifier:
    """Verifies grants with the broker's keys, which it fetches again when a grant names an unknown one."""

    def __init__(
        self, fetch_keys: Callable[[], Awaitable[bodies.KeySet]], verify: VerifySignature
    ) -> None:
        self._fetch_keys = fetch_keys
        self._verify = verify
        self._keys = bodies.KeySet([])
        self._fetched_at: float | None = None
        """In the event loop's time."""
        self._problems: OrderedDict[str, str] = OrderedDict()
        """Of each verified grant; empty if its signature is valid."""
        self._lock = asyncio.Lock()
        """One child process at a time: requesters can write any number of grants."""

    async def verify(self, text: str, trusted: str = "") -> Grant | Denial:
        """Returns the claims. `trusted` is the grant that the broker has sent to this cluster itself."""
        if not text:
            return Denial(NO_GRANT, "the slice has no grant of the broker")
        try:
            found = grants.parse_grant(text)
            claims = found.decode_claims()
        except (InvalidGrant, ValueError):
            return Denial(INVALID_GRANT, "its grant is not a valid grant")
        if text == trusted:
            return claims
        async with self._lock:
            if not await self._has_key(found.header.kid):
                return Denial(UNKNOWN_KEY, "its grant is signed by an unknown key")
            problem = await self._problem(text)
        return Denial(INVALID_GRANT, problem) if problem else claims

    async def _has_key(self, kid: str) -> bool:
        now, fetched_at = asyncio.get_running_loop().time(), self._fetched_at
        age = None if fetched_at is None else timedelta(seconds=now - fetched_at)
        is_known = any(key.kid == kid for key in self._keys.keys)
        if age is None or age > (KEYS_MAX_AGE if is_known else KEYS_INTERVAL):
            keys = await self._fetch_keys()
            self._fetched_at = now
            if keys != self._keys:
                self._keys = keys
                self._problems.clear()
        return any(key.kid == kid for key in self._keys.keys)

    async def _problem(self, text: str) -> str:
        if text not in self._problems:
            self._problems[text] = await self._verify(text, self._keys)
            if len(self._problems) > MAX_VERIFIED:
                self._problems.popitem(last=False)
        return self._problems[text]


class ProviderOptions(NamedTuple):
    """Identity and times of the provider."""

    cluster: str
    """This cluster's ID at the broker."""
    reclaim_after: timedelta
    """How long a requester may take to remove its slice after the end of a reservation."""


class LiqoProvider:
    """Use `run` as a root task; enqueue reservations that change with `on_change`."""

    def __init__(
        self,
        options: ProviderOptions,
        api: LiqoApi,
        exchange: HandshakeExchange,
        verifier: GrantVerifier,
        lent: Lent,
        clock: Clock,
        grant_of: Callable[[str], str] = lambda _: "",
    ) -> None:
        """`grant_of` returns the grant that the broker has sent with a reservation."""
        self._grant_of = grant_of
        self._options = options
        self._api = api
        self._exchange = exchange
        self._verifier = verifier
        self._lent = lent
        self._clock = clock
        self._cluster_id = ""
        self._slices: dict[str, LiqoResource] = {}
        """By namespace and name."""
        self._admitted: dict[str, bodies.Handshake] = {}
        """What requesters need for their identity here, by reservation. The broker does not store it."""
        self._asked: set[str] = set()
        """Reservations of which the requester's handshake was asked for. It notifies of a later one."""
        self._nonces: dict[str, str] = {}
        """What requesters have to sign, by reservation."""
        self._early: dict[str, None] = {}
        """Reservations of which a change or a handshake came before they were held; the latest ones."""
        self._senders: dict[str, str] = {}
        """Which cluster has sent a slice that Liqo has not authenticated yet, by the slice's UID."""
        self._ended: dict[str, float] = {}
        """When the reservation of a slice was found to have ended, in the event loop's time."""
        self._unused_since: dict[str, float] = {}
        """Since when a requester has no reservation, in the event loop's time."""
        self._queue = ReconcileQueue("ResourceSlice", self._reconcile, log)
        self._handshakes = ReconcileQueue("Handshake", self._admit, log)
        """By themselves: a slice need not wait until a handshake is done."""

    def on_change(self, reservation: str) -> None:
        """The reservation has changed."""
        if reservation not in self._asked:
            self.on_handshake(reservation)
        if reservation in {*self._lent(), *self._asked} or self._slices_of(reservation):
            self._queue.add(reservation)

    def on_handshake(self, reservation: str) -> None:
        """The requester has sent a part of its handshake, perhaps once more."""
        if reservation in self._lent():
            self._handshakes.add(reservation)
            return
        self._early[reservation] = None
        if len(self._early) > MAX_EARLY:
            del self._early[next(iter(self._early))]

    def on_hold(self) -> None:
        """Nodes, pods or holds have changed: reservations may be held now of which something came before."""
        for reservation in self._early.keys() & self._lent().keys() if self._early else ():
            del self._early[reservation]
            self._handshakes.add(reservation)

    async def run(self) -> None:
        await tasks.run_all(
            {
                "slices": self._watch_slices(),
                "handshakes": self._handshakes.run(),
                "reconcile": self._queue.run(),
            }
        )

    async def _watch_slices(self) -> None:
        async for change in informer.list_and_watch(self._api.client, SLICES, labels=REPLICATED):
            match change:
                case Listed(objects):
                    changed = [*self._slices.values(), *objects]
                    self._slices = {_key(one): one for one in objects}
                    self._ended = {
                        key: at for key, at in self._ended.items() if key in self._slices
                    }
                case Deleted(found):
                    self._slices.pop(_key(found), None)
                    self._ended.pop(_key(found), None)
                    self._senders.pop(found.metadata.uid, None)
                    changed = [found]
                    await self._delete_certificate(found)
                case LiqoResource():
                    self._slices[_key(change)] = change
                    changed = [change]
                case _:
                    changed = []
            for one in changed:
                self._queue.add(liqo_objects.reservation_of(one))
            if isinstance(change, Listed):
                self._queue.add_after(_REMOVAL, REMOVAL_DELAY)

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
        if reservation == _REMOVAL:
            await self._remove_unused_requesters()
            return
        lent = self._lent().get(reservation)
        slices = [one for one in self._slices_of(reservation) if is_ours(one)]
        unused = lent
        for found in slices:
            requester = self._senders.pop(found.metadata.uid, "") or await self._requester_of(found)
            if not slice_decision.is_accepted(found, "Authentication"):
                self._senders[found.metadata.uid] = requester
                continue
            is_own = lent is not None and requester == lent.requester
            await self._decide_slice(found, requester, unused if is_own else lent)
            # What is reserved is granted once, however many slices its requester makes for it.
            unused = None if is_own else unused
        if lent is None:
            self._admitted.pop(reservation, None)
            self._nonces.pop(reservation, None)
            self._asked.discard(reservation)
            self._early.pop(reservation, None)
            self._queue.add(_REMOVAL)

    # -- the handshake

    async def _admit(self, reservation: str) -> None:
        """Handles the requester's handshake as far as it has come."""
        lent = self._lent().get(reservation)
        if lent is None:
            return
        own = bodies.Handshake(await self._own_id())
        try:
            known = replace(own, nonce=self._nonces.get(reservation, ""))
            requester = await self._send(reservation, self._admitted.get(reservation, known))
            self._asked.add(reservation)
            while requester is not None and (
                requester.signed_nonce or reservation not in self._admitted
            ):
                response = await self._handle_handshake(reservation, own, requester, lent)
                newest = await self._send(reservation, response)
                if newest == requester:
                    return
                requester = newest
        except (NotFound, WrongPhase):
            return  # it has ended

    async def _send(self, reservation: str, own: bodies.Handshake) -> bodies.Handshake | None:
        return (await self._exchange.exchange_handshake(reservation, own)).peer

    async def _handle_handshake(
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
        nonce = self._nonces.get(reservation, "") if requester.signed_nonce else ""
        nonce = nonce or await self._nonce(remote, lent.requester)
        self._nonces[reservation] = nonce
        if not requester.signed_nonce:
            return replace(own, nonce=nonce)
        apply = self._api.ensure if tenant is None else self._api.apply
        await apply(TENANTS, liqo_objects.tenant_manifest(lent.requester, requester))
        issued = await self._api.complete(
            TENANTS,
            remote,
            liqo_objects.tenant_namespace(remote),
            liqo_objects.handshake_parameters,
        )
        if issued is None:
            del self._nonces[reservation]
            return replace(own, nonce=nonce, error="Liqo has not issued a certificate yet")
        response = replace(issued, cluster_id=own.cluster_id, nonce=nonce)
        if self._admitted.get(reservation) != response:
            self._admitted[reservation] = response
            log.info("Requester admitted", reservation=reservation, requester=lent.requester)
        return response

    async def _nonce(self, remote: str, requester: str) -> str:
        namespace = liqo_objects.namespace_manifest(remote, requester=requester)
        await self._api.ensure(NAMESPACES, namespace)
        wanted = liqo_objects.nonce_manifest(remote)
        await self._api.ensure(SECRETS, wanted)
        name, namespace = wanted["metadata"]["name"], wanted["metadata"]["namespace"]
        found = await self._api.complete(
            SECRETS, name, namespace, lambda secret: secret.data.get("nonce")
        )
        return found or ""

    async def _own_id(self) -> str:
        self._cluster_id = self._cluster_id or await self._api.cluster_id()
        return self._cluster_id

    # -- slices

    async def _decide_slice(
        self, found: LiqoResource, requester: str, lent: LentReservation | None
    ) -> None:
        unproven = None
        if lent is not None and requester == lent.requester:
            unproven = await self._grant_denial(found, lent)
        decision = slice_decision.decide_slice(found, requester, lent, unproven)
        if is_granted(found) and (lent is None or (decision and decision.status == DENIED)):
            await self._withdraw(found)
        elif decision is not None:
            self._ended.pop(_key(found), None)
            found = await self._set_cordon(found, is_cordoned=False)
            await self._write_status(found, decision)

    async def _grant_denial(self, found: LiqoResource, lent: LentReservation) -> Denial | None:
        name, now = liqo_objects.reservation_of(found), self._clock()
        text = found.metadata.annotations.get(GRANT_ANNOTATION, "")
        grant = await self._verifier.verify(text, self._grant_of(name))
        if isinstance(grant, Grant):
            denial = slice_decision.grant_denial(grant, name, lent, self._options.cluster, now)
        else:
            denial = grant
        if denial is not None and denial.reason in slice_decision.PASSING:
            self._queue.add_after(name, KEYS_INTERVAL)
        return denial

    async def _write_status(self, found: LiqoResource, decision: SliceDecision) -> None:
        patch = slice_decision.status_patch(found, decision, self._clock())
        if not patch:
            return
        name, namespace = found.metadata.name, found.metadata.namespace
        await self._api.client.patch(SLICES, name, namespace, patch, subresource="status")
        keys = {"reservation": name, "reason": decision.message}
        is_accepted = decision.status == ACCEPTED
        log.info("ResourceSlice accepted" if is_accepted else "ResourceSlice denied", **keys)

    async def _requester_of(self, found: LiqoResource) -> str:
        """The ID at the broker of the cluster that has sent a slice; empty if it is not admitted.

        A Tenant that liqoctl has created says nothing about the broker. There both IDs have to be the same.
        """
        remote = found.metadata.labels.get("liqo.io/originID", "")
        tenant = await self._api.find(TENANTS, remote, found.metadata.namespace) if remote else None
        if tenant is None:
            return ""
        return liqo_objects.kubelend_cluster(tenant) or ("" if tenant.is_managed else remote)

    async def _withdraw(self, found: LiqoResource) -> None:
        """Its reservation has ended: no new pods, and after a time none at all. Denying it undoes nothing."""
        name, now = liqo_objects.reservation_of(found), asyncio.get_running_loop().time()
        ended_at = self._ended.setdefault(_key(found), now)
        overdue_at = ended_at + self._options.reclaim_after.total_seconds()
        found = await self._set_cordon(found, is_cordoned=True)
        await self._write_status(
            found, slice_decision.ended_decision(found, is_overdue=now >= overdue_at)
        )
        if now < overdue_at:
            self._queue.add_after(name, timedelta(seconds=overdue_at - now))
        elif await self._delete_pods(found):
            self._queue.add_after(name, RECLAIM_INTERVAL)
        else:
            # A requester that is still there sends it again, and is denied.
            await self._api.delete(SLICES, found)

    async def _set_cordon(self, found: LiqoResource, *, is_cordoned: bool) -> LiqoResource:
        """Liqo refuses pods of a cordoned slice. A cordon of others stays."""
        known = found.metadata.annotations
        if (known.get(CORDONED_ANNOTATION) == "true") == is_cordoned:
            return found
        value = "true" if is_cordoned else None
        change = {"metadata": {"annotations": dict.fromkeys(_CORDON_ANNOTATIONS, value)}}
        name, namespace = found.metadata.name, found.metadata.namespace
        changed = await self._api.client.patch(SLICES, name, namespace, change)
        text = "ResourceSlice cordoned" if is_cordoned else "ResourceSlice uncordoned"
        log.info(text, reservation=name)
        return changed

    async def _delete_pods(self, found: LiqoResource) -> int:
        """Deletes what the requester has left. Liqo deletes the pod of each ShadowPod."""
        labels = f"{liqo_objects.ORIGIN_LABEL}={found.metadata.labels.get('liqo.io/originID', '')}"
        left = [
            one
            for one in await self._api.list(SHADOW_PODS, labels=labels)
            if liqo_objects.is_pod_of_slice(one, found.metadata.name)
        ]
        for one in left:
            await self._api.delete(SHADOW_PODS, one)
        if left:
            log.warning(
                "Pods of ended reservation deleted", reservation=found.metadata.name, pods=len(left)
            )
        return len(left)

    async def _delete_certificate(self, gone: LiqoResource) -> None:
        """Liqo leaves this Secret behind."""
        if not is_ours(gone):
            return
        name, namespace = gone.metadata.name, gone.metadata.namespace
        try:
            await self._api.client.delete(SECRETS, f"liqo-remote-certificate-{name}", namespace)
        except KubelendError as error:
            log.warning(
                "Failed to delete Secret of ResourceSlice", reservation=name, error=str(error)
            )

    async def _remove_unused_requesters(self) -> None:
        """After the last reservation of a requester: what its handshake has created here.

        The tenant namespace records the requester and goes last, so that an agent that is killed meanwhile
        finishes it after its restart.
        """
        used = {each.requester for each in self._lent().values()}
        now = asyncio.get_running_loop().time()
        known, self._unused_since = self._unused_since, {}
        for namespace in await self._api.list(NAMESPACES, labels=TENANT_NAMESPACES):
            requester = namespace.metadata.annotations.get(REQUESTER_ANNOTATION, "")
            if not requester or requester in used or self._has_slices(namespace):
                continue
            since = self._unused_since[requester] = known.get(requester, now)
            left = timedelta(seconds=since - now) + UNUSED_DELAY
            is_overdue = left + self._options.reclaim_after <= timedelta()
            if left > timedelta():
                self._queue.add_after(_REMOVAL, left)
            elif is_overdue or not await self._has_copies(namespace):
                await self._remove_requester(requester, namespace)
            else:
                self._queue.add_after(_REMOVAL, REMOVAL_INTERVAL)

    async def _remove_requester(self, requester: str, namespace: LiqoResource) -> None:
        name, remote = namespace.metadata.name, namespace.metadata.labels[REMOTE_LABEL]
        tenant, foreign, identities = await asyncio.gather(
            self._api.find(TENANTS, remote, name),
            self._api.find(FOREIGN_CLUSTERS, remote),
            self._api.list(IDENTITIES, name),
        )
        seen = ObservedRequester(requester, namespace, tenant, foreign, bool(identities))
        step = liqo_removal.plan_requester_removal(seen)
        for action in step.actions:
            await self._api.perform(action)
        if step.waits_for:
            self._queue.add_after(_REMOVAL, REMOVAL_INTERVAL)
        if tenant is not None and step.actions:
            log.info("Requester removed", requester=requester)

    async def _has_copies(self, namespace: LiqoResource) -> bool:
        """Whether Liqo has not removed all copies of the requester's namespaces yet. It needs the Tenant."""
        return bool(await self._api.list(NAMESPACE_MAPS, namespace.metadata.name, REPLICATED))

    def _has_slices(self, namespace: LiqoResource) -> bool:
        name = namespace.metadata.name
        return any(one.metadata.namespace == name for one in self._slices.values())


def _key(found: LiqoResource) -> str:
    """With the namespace: another requester can give its slices the same name."""
    return f"{found.metadata.namespace}/{found.metadata.name}"
