"""Watches the broker's objects and runs one reconciler for each kind.

`run` is a root task of the broker. The caches are kept current all the time; reconcilers act while this
broker leads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Final

from kubelend.broker.service import Broker
from kubelend.controllers import alarms, marks
from kubelend.controllers.advertisements import Advertisements
from kubelend.controllers.controller import Controller
from kubelend.controllers.happenings import Teller
from kubelend.controllers.mirrors import Kind
from kubelend.controllers.reservations import Reservations
from kubelend.controllers.seeing import Seeing
from kubelend.core.events import Change
from kubelend.kits import tasks
from kubelend.kube import watching
from kubelend.kube.client import Client
from kubelend.kube.resources import Resource
from kubelend.kube.watching import Listed
from kubelend.wire.conversion import Terms


class Office:
    """Created by the composition root."""

    def __init__(self, broker: Broker, client: Client, namespace: str, terms: Terms) -> None:
        self._broker = broker
        self._client = client
        self._namespace = namespace
        self._teller = Teller(client, broker.clock)
        self._reservations = Reservations(broker, client, namespace, terms, self._teller)
        self._advertisements = Advertisements(broker, client, namespace, self._teller)
        self._seeing = Seeing(_KINDS)
        broker.listeners.append(self._hear)

    @property
    def unready(self) -> str | None:
        """Why the objects cannot be watched, or None."""
        return self._seeing.unready

    async def run(self) -> None:
        """Runs until cancelled."""
        reservations, advertisements = self._reservations, self._advertisements
        await tasks.run_all(
            {
                "events": self._teller.run(),
                "reservations": reservations.looks.run(),
                "advertisements": advertisements.looks.run(),
                "time": self._tick(),
                "watch advertisements": self._follow(marks.ADVERTISEMENTS, advertisements, ""),
                "watch reservations": self._follow(
                    marks.RESERVATIONS, reservations, marks.UNARCHIVED
                ),
            }
        )

    def _hear(self, changes: Sequence[Change] | None) -> None:
        """Changes of reservations are not handled here: the store writes them into the objects."""
        if changes is None:
            self._reservations.look_at_all()
            self._advertisements.look_at_all()
        else:
            self._advertisements.hear(changes)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(alarms.TICK)
            self._reservations.tick()
            self._advertisements.tick()

    async def _follow(
        self, resource: Resource[Kind], controller: Controller[Kind], labels: str
    ) -> None:
        report = partial(self._seeing.report, resource.plural)
        changes = watching.follow(
            self._client, resource, self._namespace, labels=labels, report=report
        )
        async for change in changes:
            controller.mirror.take(change)
            if isinstance(change, Listed):
                self._seeing.listed(resource.plural)
                controller.look_for_orphans()


_KINDS: Final = (marks.ADVERTISEMENTS.plural, marks.RESERVATIONS.plural)
