"""Reconciles the ClusterAdvertisement objects of the broker's namespace.

A cluster whose object is deleted offers nothing until it advertises again. What was lent there stays
reserved, because every reservation names its provider; it counts again with the next advertisement.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from kubelend.broker import views
from kubelend.broker.service import Broker
from kubelend.broker.views import ClusterView
from kubelend.controllers import (
    advertisement_plans,
    ghosts,
    happenings,
    marks,
    showing,
    standings,
)
from kubelend.controllers.advertisement_plans import Advertise, Delete, PassOver, Rewrite
from kubelend.controllers.alarms import Alarm
from kubelend.controllers.controller import Controller
from kubelend.controllers.happenings import Happening, Teller
from kubelend.controllers.mirrors import Turn
from kubelend.core import models
from kubelend.core.errors import Conflict, InvalidInput, NotFound, Revoked, Unavailable
from kubelend.core.events import Change, Dropped, Erased
from kubelend.core.ledger import Ledger
from kubelend.core.members import Member, member_id
from kubelend.core.models import Cluster, ClusterId, Reservation
from kubelend.core.roles import Role
from kubelend.kube.client import Client
from kubelend.stores import kube_objects
from kubelend.wire.broker_objects import ClusterAdvertisement

SOON: Final = timedelta(milliseconds=100)
"""Delay of a reconcile after a change: further changes often follow, and the store is still writing."""
PAUSE: Final = timedelta(seconds=1)
"""Minimum time between two writes of an object: the status of a busy provider changes all the time."""

_SOME_TIME_AGO: Final = datetime.min.replace(tzinfo=UTC)


class Advertisements(Controller[ClusterAdvertisement]):
    """Call `on_change` as well, with committed changes."""

    def __init__(self, broker: Broker, client: Client, namespace: str, teller: Teller) -> None:
        super().__init__(marks.ADVERTISEMENTS, broker, client, namespace, teller)
        self._heard: dict[str, models.Advertisement] = {}
        """By object UID: the last advertisement processed since this broker leads."""
        self._aliases: dict[str, set[str]] = {}
        """Names of objects that are not named after their cluster, by cluster."""
        self._missing: dict[str, ClusterId] = {}
        """Clusters whose objects were missing in the last full check, by object name."""
        self._written_at: dict[str, float] = {}
        self._staleness = Alarm()
        """When the next cluster may become stale."""

    def look_at_all(self) -> None:
        self._staleness.set(_SOME_TIME_AGO)
        self._heard.clear()  # another leader may have processed more since
        super().look_at_all()

    def hear(self, changes: Sequence[Change]) -> None:
        """Enqueue the clusters that committed changes affect."""
        concerned: dict[str, None] = {}
        for change in changes:
            match change:
                case Reservation():
                    concerned.update(dict.fromkeys(filter(None, (change.target, *change.left))))
                case Cluster():
                    concerned[change.id] = None
                    self._staleness.set(change.valid_until)
                case Dropped():
                    concerned[change.cluster] = None
                case Member(role=Role.CLUSTER):
                    concerned[change.name] = None
                case Erased(kind="member"):  # it may advertise again
                    concerned[change.id.removeprefix(member_id(Role.CLUSTER, ""))] = None
        for cluster in concerned:
            self._look_at(cluster)

    def tick(self) -> None:
        """Enqueue clusters that have become stale; nothing else does."""
        now = self._broker.clock()
        if not self._staleness.rings(now) or not self._broker.may_decide:
            return
        try:
            ledger, _ = self._broker.present()
        except Unavailable:  # lost leadership a moment ago
            return
        self._staleness.turn_off()
        for cluster in ledger.clusters.values():
            if cluster.is_stale(now):
                self._look_at(cluster.id)
            else:
                self._staleness.set(cluster.valid_until)

    def _look_at(self, cluster: str) -> None:
        for name in (kube_objects.name_of("cluster", cluster), *self._aliases.get(cluster, ())):
            self._look_soon(name)

    def _look_soon(self, name: str) -> None:
        self.looks.add_after(name, SOON)

    def _notice(self, name: str) -> None:
        self._look_soon(name)

    def _happened(self, turn: Turn[ClusterAdvertisement]) -> Iterable[Happening]:
        return happenings.of_advertisement(turn.before, turn.after)

    # -- reconcile

    async def _serve(self, found: ClusterAdvertisement) -> None:
        self._missing.pop(found.metadata.name, None)
        if marks.is_leaving(found.metadata):
            return
        self._remember_alias(found)
        advertisement, error = self._offers(found)
        record, uid = self._record(found), found.metadata.uid
        action = advertisement_plans.plan(found, advertisement, self._heard.get(uid), record)
        if isinstance(action, Advertise):
            await self._broker.advertise(action.offer)
        if advertisement is not None:
            self._heard[uid] = advertisement
        match action:
            case Advertise():
                self._look_soon(found.metadata.name)
            case PassOver():
                self._teller.tell(happenings.of_outdated(found))
                self._look_soon(found.metadata.name)
            case Rewrite() | Delete():
                await self._correct(found, record)
            case None:
                self._suspicions.clear(found)
                await self._show(found, error)

    async def _correct(self, found: ClusterAdvertisement, record: Cluster | None) -> None:
        """Usually the store has not finished; else somebody has edited the object."""
        if not self._suspicions.is_grave(found):
            return
        current = await self._found(found.metadata.name)
        if current is None or self._record(current) is not record:
            return
        action = advertisement_plans.plan(current, None, None, record)
        if isinstance(action, Delete):
            await self._broker.confirm()
            if not await ghosts.remove(self._client, marks.ADVERTISEMENTS, current, self._teller):
                self._look_soon(current.metadata.name)
        elif (
            action is not None
            and record is not None
            and self._suspicions.may_write(current, action)
        ):
            await self._broker.rewrite(record)

    async def _end(self, gone: ClusterAdvertisement) -> None:
        record = self._record(gone)
        processed = self._heard.get(gone.metadata.uid) or self._offers(gone)[0]
        if record is not None and advertisement_plans.is_withdrawn(gone, processed, record):
            await self._broker.withdraw(record.id)

    def _expected(self, ledger: Ledger) -> Iterable[str]:
        known = {kube_objects.name_of("cluster", cluster): cluster for cluster in ledger.clusters}
        self._missing = {
            name: cluster for name, cluster in known.items() if self.mirror.find(name) is None
        }
        return self._missing

    async def _miss(self, name: str) -> None:
        """A new object is usually about to be created, so only those missing in a full check count."""
        cluster = self._missing.get(name)
        record = None if cluster is None else self._record_of(cluster)
        is_lost = record is not None and await self._found(name) is None
        # A cluster that has advertised meanwhile gets a new object.
        if record is not None and is_lost and self._record_of(record.id) is record:
            await self._broker.withdraw(record.id)
        self._missing.pop(name, None)

    def _bury(self, gone: ClusterAdvertisement) -> None:
        name, cluster = gone.metadata.name, gone.spec.cluster_id
        self._aliases.get(cluster, set()).discard(name)
        if not self._aliases.get(cluster):
            self._aliases.pop(cluster, None)
        self._written_at.pop(name, None)
        self._heard.pop(gone.metadata.uid, None)
        super()._bury(gone)

    def _record(self, found: ClusterAdvertisement) -> Cluster | None:
        return self._record_of(ClusterId(found.spec.cluster_id))

    def _record_of(self, cluster: ClusterId) -> Cluster | None:
        ledger, _ = self._broker.present()
        return ledger.clusters.get(cluster)

    def _offers(self, found: ClusterAdvertisement) -> tuple[models.Advertisement | None, str]:
        """The advertisement in the spec, and if it is rejected, why."""
        if marks.is_own(found.metadata):
            return None, ""
        try:
            standings.check(self._broker.registry, ClusterId(found.spec.cluster_id))
            return advertisement_plans.offer(found), ""
        except (InvalidInput, Revoked) as error:
            return None, f"{advertisement_plans.NOT_TAKEN_IN}{error}"

    def _remember_alias(self, found: ClusterAdvertisement) -> None:
        if not advertisement_plans.keeps_record(found):
            self._aliases.setdefault(found.spec.cluster_id, set()).add(found.metadata.name)

    # -- status

    async def _show(self, found: ClusterAdvertisement, problem: str) -> None:
        if not any(self._changes(found, problem)):
            return
        name = found.metadata.name
        since = time.monotonic() - self._written_at.get(name, float("-inf"))
        if since < PAUSE.total_seconds():
            self.looks.add_after(name, PAUSE - timedelta(seconds=since))
            return
        await self._broker.settled()
        current = await self._client.find(marks.ADVERTISEMENTS, name, self._namespace)
        if current is None or current.metadata.uid != found.metadata.uid:
            return
        # A spec that has not been processed yet must not be marked as observed.
        if self._offers(current) == self._offers(found):
            await self._write(current, problem)

    def _changes(
        self, found: ClusterAdvertisement, problem: str
    ) -> tuple[showing.Change, showing.Change]:
        view, now = self._view(found)
        spec = {} if view is None else showing.spec_change(found, view)
        return spec, showing.status_change(found, view, problem, now)

    async def _write(self, found: ClusterAdvertisement, problem: str) -> None:
        try:
            spec, _ = self._changes(found, problem)
            if spec:
                found = await self._patch(found, {"spec": spec})
            _, status = self._changes(found, problem)
            if status:
                await self._patch(found, {"status": status}, "status")
        except (Conflict, NotFound):
            self._look_soon(found.metadata.name)  # changed meanwhile

    async def _patch(
        self, found: ClusterAdvertisement, change: showing.Change, subresource: str = ""
    ) -> ClusterAdvertisement:
        name = found.metadata.name
        self._written_at[name] = time.monotonic()
        whole = {**change, "metadata": {"resourceVersion": found.metadata.resource_version}}
        return await self._client.patch(
            marks.ADVERTISEMENTS, name, self._namespace, whole, subresource=subresource
        )

    def _view(self, found: ClusterAdvertisement) -> tuple[ClusterView | None, datetime]:
        ledger, now = self._broker.present()
        cluster = ledger.clusters.get(ClusterId(found.spec.cluster_id))
        return None if cluster is None else views.of_cluster(ledger, cluster), now
