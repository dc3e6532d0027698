"""Watches the broker's objects and runs one reconciler for each kind.

`run` is a root task of the broker. The caches are kept current all the time; reconcilers act while this
broker leads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from kubelend.broker.service import Broker
from kubelend.controllers import labels, reconciler
from kubelend.controllers.advertisements import AdvertisementReconciler
from kubelend.controllers.events import COMPONENT
from kubelend.controllers.reconciler import Reconciler
from kubelend.controllers.reservations import ReservationReconciler
from kubelend.core.events import Change
from kubelend.kits import tasks
from kubelend.kube import informer
from kubelend.kube.client import Client
from kubelend.kube.events import EventRecorder
from kubelend.kube.informer import CachedKind, Listed, WatchHealth
from kubelend.wire.conversion import RequestLimits


class ControllerManager:
    def __init__(
        self, broker: Broker, client: Client, namespace: str, terms: RequestLimits
    ) -> None:
        self._broker = broker
        self._client = client
        self._namespace = namespace
        self._recorder = EventRecorder(client, broker.clock, COMPONENT)
        self._reservations = ReservationReconciler(broker, client, namespace, terms, self._recorder)
        self._advertisements = AdvertisementReconciler(broker, client, namespace, self._recorder)
        self._watch_health = WatchHealth(
            (labels.ADVERTISEMENT_RESOURCE.plural, labels.RESERVATION_RESOURCE.plural)
        )
        broker.listeners.append(self._on_change)

    @property
    def unready(self) -> str | None:
        """Why the objects cannot be watched, or None."""
        return self._watch_health.unready

    async def run(self) -> None:
        """Runs until cancelled."""
        reservations, advertisements = self._reservations, self._advertisements
        await tasks.run_all(
            {
                "events": self._recorder.run(),
                "reservations": reservations.queue.run(),
                "advertisements": advertisements.queue.run(),
                "time": self._tick(),
                "watch advertisements": self._watch(advertisements),
                "watch reservations": self._watch(reservations, labels.UNARCHIVED_SELECTOR),
            }
        )

    def _on_change(self, changes: Sequence[Change] | None) -> None:
        """Changes of reservations are not handled here: the store writes them into the objects."""
        if changes is None:
            self._reservations.enqueue_all()
            self._advertisements.enqueue_all()
        else:
            self._advertisements.on_change(changes)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(reconciler.TICK_SECONDS)
            self._reservations.tick()
            self._advertisements.tick()

    async def _watch(self, controller: Reconciler[CachedKind], selector: str = "") -> None:
        resource = controller.resource
        report = partial(self._watch_health.report, resource.plural)
        changes = informer.list_and_watch(
            self._client, resource, self._namespace, labels=selector, report=report
        )
        async for change in changes:
            controller.cache.handle(change)
            if isinstance(change, Listed):
                self._watch_health.listed(resource.plural)
                controller.enqueue_missing()
