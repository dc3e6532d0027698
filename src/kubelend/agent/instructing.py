"""Reconciles a ReservationInstruction for every reservation of this requester, and tracks expiry and
renewal.

Reservations may have been requested by a ResourceRequest or by other means. When one should have
expired, the broker is asked, because the local clock may be wrong. (Not related to the Kubernetes
Lease.)
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Final, NamedTuple

import structlog

from kubelend.agent import asking, directions, editing
from kubelend.agent.leases import Leases
from kubelend.agent.looking import Looks
from kubelend.agent.ports import BrokerCommunicator, Clock, Deleted, Listed, LocalObjects
from kubelend.agent.reservations import LIVE, OPEN, Reservations
from kubelend.wire import bodies
from kubelend.wire.objects import ReservationInstruction

log = structlog.get_logger("kubelend.agent")

DEFAULT_NAMESPACE: Final = "default"
SOON: Final = timedelta(milliseconds=250)
"""When to look up the namespace again."""

Place = Callable[[str], str | None]
"""The namespace of a reservation's instruction: empty if no ResourceRequest asked for it, None if
that is not known yet."""


class Outside(NamedTuple):
    """What the reconciler works with."""

    objects: LocalObjects
    communicator: BrokerCommunicator
    reservations: Reservations
    clock: Clock


class Instructor:
    """Feed it with `enqueue` and `handle_event`, and run `queue` as a task."""

    def __init__(
        self,
        outside: Outside,
        leases: Leases,
        place: Place,
        *,
        cluster_id: str,
        finished_for: timedelta,
        chance: Callable[[], float],
    ) -> None:
        self.looks = Looks("ReservationInstruction", self._look, chance)
        self._objects, self._communicator, self._reservations, self._clock = outside
        self._leases = leases
        self._place = place
        self._cluster_id = cluster_id
        self._finished_for = finished_for
        self._places: defaultdict[str, set[str]] = defaultdict(set)
        """Keys of each reservation's objects: one, except for objects in a wrong namespace."""
        self._over: dict[str, float] = {}
        """Loop time at which reservations without an object finished."""
        self._targets: dict[str, str] = {}
        """The provider in each reservation's instruction, to notice a failover."""

    def add(self, reservation: str) -> None:
        """The reservation has changed."""
        self.looks.add(reservation)

    def take(self, event: ReservationInstruction | Deleted | Listed) -> None:
        """Handle a watch event."""
        match event:
            case Listed(objects):
                for known in self._places:
                    self.looks.add(known)
                self._places.clear()
                for found in objects:
                    self._see(found)
            case Deleted(found):
                if isinstance(found, ReservationInstruction):
                    self._places[found.metadata.name].discard(found.key)
                    self.looks.add(found.metadata.name)
            case found:
                self._see(found)

    def _see(self, found: object) -> None:
        if isinstance(found, ReservationInstruction):
            self._places[found.metadata.name].add(found.key)
            self.looks.add(found.metadata.name)

    async def _look(self, reservation: str) -> None:
        body = self._reservations.find(reservation)
        if body is None and self._places[reservation]:
            body = await self._ask(reservation)
        if body is not None and body.requester_id != self._cluster_id:
            return
        if body is None or body.status.phase not in OPEN:
            await self._finish(reservation, body)
            return
        if body.status.phase in LIVE:
            await self._write(body)
        await self._mind_the_end(body)

    # -- live reservations

    async def _write(self, body: bodies.Reservation) -> None:
        namespace = self._namespace(body.id)
        if namespace is None:
            self.looks.add_after(body.id, SOON)
            return
        found = await editing.put(self._objects, directions.instruction(body, namespace))
        was_delivered = found.status.delivered
        await editing.state(
            self._objects,
            found,
            lambda newest: directions.delivered(newest.status, body),
            self._clock,
        )
        known = self._targets.get(body.id)
        self._targets[body.id] = body.target_cluster_id
        if not was_delivered:
            log.info("ReservationInstruction delivered", **_instruction_keys(found))
        elif known not in (None, body.target_cluster_id):
            log.info(
                "ReservationInstruction moved", **_instruction_keys(found), previous_cluster=known
            )
        for misplaced in self._places[body.id] - {found.key}:
            await self._objects.delete(ReservationInstruction, misplaced)

    def _namespace(self, reservation: str) -> str | None:
        """The namespace of its request; else that of the existing object; else the default, if there
        is no request.
        """
        namespace = self._place(reservation)
        if namespace:
            return namespace
        for key in self._places[reservation]:
            return key.partition("/")[0]
        return None if namespace is None else DEFAULT_NAMESPACE

    async def _mind_the_end(self, body: bodies.Reservation) -> None:
        self._leases.hear(body)
        if self._leases.left(body.id) == timedelta():
            await self._ask(body.id)
            self._leases.doubt(body.id)
        left = self._leases.left(body.id)
        if left is not None:
            self.looks.add_after(body.id, left)

    async def _ask(self, reservation: str) -> bodies.Reservation | None:
        return await asking.newest(self._communicator, self._reservations, reservation)

    # -- finished reservations

    async def _finish(self, reservation: str, body: bodies.Reservation | None) -> None:
        self._leases.forget(reservation)
        objects = [
            await self._objects.find(ReservationInstruction, key)
            for key in sorted(self._places[reservation])
        ]
        left = [found for found in objects if found is not None]
        for found in left:
            await self._clean_up(found, body)
        if not left:
            self._forget(reservation)

    async def _clean_up(
        self, found: ReservationInstruction, body: bodies.Reservation | None
    ) -> None:
        now = self._clock()
        was_finished = found.status.finished_at is not None
        written = await editing.state(
            self._objects,
            found,
            lambda newest: directions.finished(newest.status, body, now),
            self._clock,
        )
        if written is not None and not was_finished:
            reason = written.status.message
            log.info("ReservationInstruction finished", **_instruction_keys(found), reason=reason)
        finished_at = None if written is None else written.status.finished_at
        left = (finished_at or now) + self._finished_for - now
        if left > timedelta():
            self.looks.add_after(found.metadata.name, left)
        else:
            await self._objects.delete(ReservationInstruction, found.key)
            log.debug("ReservationInstruction deleted", **_instruction_keys(found))

    def _forget(self, reservation: str) -> None:
        """Kept for a while, so that a late outdated update still finds the newer state in the cache."""
        self._places.pop(reservation, None)  # a new list may have arrived in the meantime
        now = asyncio.get_running_loop().time()
        over_since = self._over.setdefault(reservation, now)
        left = over_since + self._finished_for.total_seconds() - now
        if left > 0:
            self.looks.add_after(reservation, timedelta(seconds=left))
        else:
            del self._over[reservation]
            self._targets.pop(reservation, None)
            self._reservations.forget(reservation)


def _instruction_keys(found: ReservationInstruction) -> dict[str, str]:
    spec = found.spec
    return {
        "namespace": found.metadata.namespace,
        "name": found.metadata.name,
        "reservation": spec.reservation_name,
        "cluster": spec.target_cluster_id,
        "cpu": spec.requested_cpu,
        "memory": spec.requested_memory,
        "expires_at": "" if spec.expires_at is None else spec.expires_at.isoformat(),
    }
