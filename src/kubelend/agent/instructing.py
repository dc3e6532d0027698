"""Keeps a ReservationInstruction for every reservation that this cluster has, whoever asked for it.

Part of the requester. It also watches over the end: by the broker's word, and when an end should have come
by asking for that word, for the clock here may be wrong.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from typing import Final, NamedTuple

from kubelend.agent import asking, directions, editing
from kubelend.agent.leases import Leases
from kubelend.agent.looking import Looks
from kubelend.agent.ports import BrokerCommunicator, Clock, Deleted, Listed, LocalObjects
from kubelend.agent.reservations import LIVE, OPEN, Reservations
from kubelend.wire import bodies
from kubelend.wire.objects import ReservationInstruction

DEFAULT_NAMESPACE: Final = "default"
SOON: Final = timedelta(milliseconds=250)
"""When to look again for whose it is."""

Place = Callable[[str], str | None]
"""The namespace of a reservation's instruction: empty if nobody here asked for it, None if that is not
known yet."""


class Outside(NamedTuple):
    """What it works with."""

    objects: LocalObjects
    communicator: BrokerCommunicator
    reservations: Reservations
    clock: Clock


class Instructor:
    """Tell it by `add` and `take` what to look at, and let `looks` run."""

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
        self.looks = Looks("instruction", self._look, chance)
        self._objects, self._communicator, self._reservations, self._clock = outside
        self._leases = leases
        self._place = place
        self._cluster_id = cluster_id
        self._finished_for = finished_for
        self._places: defaultdict[str, set[str]] = defaultdict(set)
        """The keys of the objects of each reservation: one, but for one that was misplaced."""
        self._over: dict[str, float] = {}
        """Since when those are over that have no object."""

    def add(self, reservation: str) -> None:
        """Something is new about it."""
        self.looks.add(reservation)

    def take(self, event: ReservationInstruction | Deleted | Listed) -> None:
        """Something has happened to an object."""
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

    # -- while it lives

    async def _write(self, body: bodies.Reservation) -> None:
        namespace = self._namespace(body.id)
        if namespace is None:
            self.looks.add_after(body.id, SOON)
            return
        found = await editing.put(self._objects, directions.instruction(body, namespace))
        await editing.state(
            self._objects,
            found,
            lambda newest: directions.delivered(newest.status, body),
            self._clock,
        )
        for misplaced in self._places[body.id] - {found.key}:
            await self._objects.delete(ReservationInstruction, misplaced)

    def _namespace(self, reservation: str) -> str | None:
        """Where somebody wants it; else where it is; else the default, if nobody can want it any more."""
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

    # -- afterwards

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
        told = await editing.state(
            self._objects,
            found,
            lambda newest: directions.finished(newest.status, body, now),
            self._clock,
        )
        finished_at = None if told is None else told.status.finished_at
        left = (finished_at or now) + self._finished_for - now
        if left > timedelta():
            self.looks.add_after(found.metadata.name, left)
        else:
            await self._objects.delete(ReservationInstruction, found.key)

    def _forget(self, reservation: str) -> None:
        """Kept for a while: an old word on it, heard late, must find the newer one here."""
        self._places.pop(reservation, None)  # a list of all may have come in the meantime
        now = asyncio.get_running_loop().time()
        over_since = self._over.setdefault(reservation, now)
        left = over_since + self._finished_for.total_seconds() - now
        if left > 0:
            self.looks.add_after(reservation, timedelta(seconds=left))
        else:
            del self._over[reservation]
            self._reservations.forget(reservation)
