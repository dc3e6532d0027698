"""Watches the broker's objects and runs one reconciler for each kind.

`run` is a root task of the broker. The caches are kept current all the time; reconcilers act while this
broker leads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from kubelend.broker.service import Broker
from kubelend.controllers import labels, reconciler
from kubelend.controllers.advertisements import AdvertisementReconciler
from kubelend.controllers.events import COMPONENT
from kubelend.controllers.reconciler import Reconciler
from kubelend.controllers.reservations import PlacementReviewReconciler, ReservationReconciler
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
        reviews = PlacementReviewReconciler(broker, client, namespace, terms, self._recorder)
        self._reconcilers: tuple[Reconciler[Any], ...] = (
            self._reservations,
            self._advertisements,
            reviews,
        )
        self._watch_health = WatchHealth([one.resource.plural for one in self._reconcilers])
        broker.listeners.append(self._on_change)

    @property
    def unready(self) -> str | None:
        """Why the objects cannot be watched, or None."""
        return self._watch_health.unready

    async def run(self) -> None:
        """Runs until cancelled."""
        selectors = {self._reservations.resource.plural: labels.UNARCHIVED_SELECTOR}
        roots: dict[str, Coroutine[Any, Any, None]] = {
            "events": self._recorder.run(),
            "time": self._tick(),
        }
        for one in self._reconcilers:
            kind = one.resource.plural
            roots[kind] = one.queue.run()
            roots[f"watch {kind}"] = self._watch(one, selectors.get(kind, ""))
        await tasks.run_all(roots)

    def _on_change(self, changes: Sequence[Change] | None) -> None:
        """Changes of reservations are not handled here: the store writes them into the objects."""
        if changes is None:
            for one in self._reconcilers:
                one.enqueue_all()
        else:
            self._advertisements.on_change(changes)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(reconciler.TICK_SECONDS)
            for one in self._reconcilers:
                one.tick()

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
