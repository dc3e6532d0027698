"""Base of the reconcilers for the broker's own objects: queue, drift detection, record verification.

`controllers.reservations` and `controllers.advertisements` implement `Reconciler` for their kind.
Level-triggered: a reconcile compares the object with its record in the ledger, whatever event caused it, and
does what is missing. An object that cannot be decoded is skipped, so that it cannot stop the broker. Any
exception but a `KubelendError` is a bug and ends the task.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from typing import Generic

from kubelend.broker.service import Broker
from kubelend.broker.writer import ACTOR
from kubelend.controllers.happenings import Happening, Riddles, Teller
from kubelend.controllers.looking import Looks
from kubelend.controllers.mirrors import Kind, Mirror, Turn
from kubelend.controllers.suspicions import Suspicions
from kubelend.core.errors import Unavailable
from kubelend.core.journal import Actor
from kubelend.core.ledger import Ledger
from kubelend.kube.client import Client
from kubelend.kube.resources import Resource
from kubelend.stores.kube_inspecting import Inspector


class Controller(ABC, Generic[Kind]):
    """Pass watch events to `cache.handle`, run `queue`, and call `tick` regularly."""

    def __init__(
        self,
        resource: Resource[Kind],
        broker: Broker,
        client: Client,
        namespace: str,
        teller: Teller,
    ) -> None:
        self.looks = Looks(resource.plural, self._look)
        self.mirror: Mirror[Kind] = Mirror(self._notice, self._turned)
        self._resource = resource
        self._broker = broker
        self._client = client
        self._namespace = namespace
        self._teller = teller
        self._riddles = Riddles(resource.type, teller)
        self._suspicions = Suspicions(self.looks)
        self._inspector = Inspector(client, namespace)

    def look_at_all(self) -> None:
        """After the ledger was reloaded, or this broker became the leader."""
        self.mirror.look_at_all()
        self.look_for_orphans()

    def look_for_orphans(self) -> None:
        """Objects may have been deleted while nothing was watching, and their records are still there."""
        if not self.mirror.is_complete:
            return
        # A broker that has lost leadership without noticing yet enqueues everything again when it does.
        with suppress(Unavailable):
            ledger, _ = self._broker.present()
            for name in self._expected(ledger):
                if self.mirror.find(name) is None and self.mirror.unreadable(name) is None:
                    self.looks.add(name)

    @abstractmethod
    def tick(self) -> None:
        """Enqueue what only the passing of time affects."""

    # -- what a kind implements

    @abstractmethod
    def _notice(self, name: str) -> None:
        """Enqueue the object."""

    @abstractmethod
    def _happened(self, turn: Turn[Kind]) -> Iterable[Happening]:
        """The Events to emit for an update."""

    @abstractmethod
    def _expected(self, ledger: Ledger) -> Iterable[str]:
        """The names of the objects that must exist."""

    @abstractmethod
    async def _serve(self, found: Kind) -> None:
        """Bring object and record into agreement."""

    @abstractmethod
    async def _miss(self, name: str) -> None:
        """The object does not exist: check whether it should."""

    @abstractmethod
    async def _end(self, gone: Kind) -> None:
        """Handle the deletion of an object."""

    def _bury(self, gone: Kind) -> None:
        """Drop all state about a deleted object."""
        self._suspicions.clear(gone)
        self.mirror.bury(gone)

    # -- reconcile

    async def _look(self, name: str) -> None:
        if not self._broker.may_decide:
            for deleted in self.mirror.gone(name):  # the leader handles the deletion
                self._bury(deleted)
            return
        ACTOR.set(Actor(f"{self._namespace}/{name}", "object"))
        for deleted in self.mirror.gone(name):
            await self._end(deleted)
            self._bury(deleted)
        unreadable = self.mirror.unreadable(name)
        self._riddles.look(name, unreadable)
        if unreadable is not None:
            return  # it exists, whatever its content
        found = self.mirror.find(name)
        if found is not None:
            await self._serve(await self._inspector.judged(found))
        elif self.mirror.is_complete:
            await self._miss(name)

    def _turned(self, turn: Turn[Kind]) -> None:
        if self._broker.may_decide:
            for event in self._happened(turn):
                self._teller.tell(event)

    async def _found(self, name: str) -> Kind | None:
        """The object as it is on the server, after all decisions so far were written."""
        await self._broker.settled()
        found = await self._client.find(self._resource, name, self._namespace)
        return found and await self._inspector.judged(found)
