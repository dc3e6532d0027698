"""What the controllers of the broker's objects have in common: how one object is looked at, and which are.

`controllers.reservations` and `controllers.advertisements` say what follows for their kind. Level-triggered:
whatever happened, one look at an object compares it with its record in the ledger, and does what is missing.
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
    """Hand `mirror.take` what the watch says, call the others when it is time, and run `looks`."""

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
        """The ledger was read anew, or this broker leads from now on."""
        self.mirror.look_at_all()
        self.look_for_orphans()

    def look_for_orphans(self) -> None:
        """Objects may have gone while nobody was watching, and their records be there still."""
        if not self.mirror.is_complete:
            return
        # One that leads no more, and has not noticed yet, is told to look at all again when it does.
        with suppress(Unavailable):
            ledger, _ = self._broker.present()
            for name in self._expected(ledger):
                if self.mirror.find(name) is None and self.mirror.unreadable(name) is None:
                    self.looks.add(name)

    @abstractmethod
    def tick(self) -> None:
        """Look at that of which nothing tells but the time."""

    # -- what follows from an object

    @abstractmethod
    def _notice(self, name: str) -> None:
        """Have it looked at."""

    @abstractmethod
    def _happened(self, turn: Turn[Kind]) -> Iterable[Happening]:
        """What people are to be told of a change."""

    @abstractmethod
    def _expected(self, ledger: Ledger) -> Iterable[str]:
        """The names of the objects that have to be there."""

    @abstractmethod
    async def _serve(self, found: Kind) -> None:
        """Do what is missing."""

    @abstractmethod
    async def _miss(self, name: str) -> None:
        """There is no such object: is it one that has to be there?"""

    @abstractmethod
    async def _end(self, gone: Kind) -> None:
        """Draw the consequences."""

    def _bury(self, gone: Kind) -> None:
        """Remember nothing of it."""
        self._suspicions.clear(gone)
        self.mirror.bury(gone)

    # -- the look

    async def _look(self, name: str) -> None:
        if not self._broker.may_decide:
            for gone in self.mirror.gone(name):  # whoever leads sees to it
                self._bury(gone)
            return
        ACTOR.set(Actor(f"{self._namespace}/{name}", "object"))
        for gone in self.mirror.gone(name):
            await self._end(gone)
            self._bury(gone)
        unreadable = self.mirror.unreadable(name)
        self._riddles.look(name, unreadable)
        if unreadable is not None:
            return  # it is there, whatever it says
        found = self.mirror.find(name)
        if found is not None:
            await self._serve(await self._inspector.judged(found))
        elif self.mirror.is_complete:
            await self._miss(name)

    def _turned(self, turn: Turn[Kind]) -> None:
        if self._broker.may_decide:
            for happening in self._happened(turn):
                self._teller.tell(happening)

    async def _found(self, name: str) -> Kind | None:
        """The object as it is, with all that was decided written into it."""
        await self._broker.settled()
        found = await self._client.find(self._resource, name, self._namespace)
        return found and await self._inspector.judged(found)
