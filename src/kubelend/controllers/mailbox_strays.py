"""Reservations that a broker once held on to, in namespaces that are no mailboxes any more.

`controllers.mailboxes` shows it what is in no mailbox. Nothing is kept of it but where our finalizer is, and
that comes off: nobody is going to answer there, and a namespace that is deleted must not wait for it. What
they stand for is the ledger's alone, and stays (docs/adr/0020).
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from kubelend.controllers import marks
from kubelend.core.errors import Conflict, NotFound
from kubelend.kube.client import Client
from kubelend.wire import mailboxes
from kubelend.wire.broker_objects import RESERVATION_FINALIZER, Reservation
from kubelend.wire.objects import Object


class Stray(NamedTuple):
    """As much of an object as it takes to let it go."""

    uid: str
    version: str
    finalizers: tuple[str, ...]


class Strays:
    """By namespace and name."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._found: dict[str, dict[str, Stray]] = {}

    @property
    def namespaces(self) -> list[str]:
        """Where there are some."""
        return list(self._found)

    def see(self, found: Object) -> bool:
        """Whether it is one."""
        if not is_stray(found):
            self.miss(found)
            return False
        known = found.metadata
        stray = Stray(known.uid, known.resource_version, known.finalizers)
        self._found.setdefault(known.namespace, {})[known.name] = stray
        return True

    def miss(self, gone: Object) -> None:
        if isinstance(gone, Reservation):
            self._drop(gone.metadata.namespace, gone.metadata.name)

    def keep_only(self, uids: set[str]) -> None:
        """After a list: what is not in it has gone."""
        for namespace in self.namespaces:
            for name, stray in list(self._found[namespace].items()):
                if stray.uid not in uids:
                    self._drop(namespace, name)

    def forget(self, namespace: str) -> None:
        """It is a mailbox now."""
        self._found.pop(namespace, None)

    async def let_go(self, namespace: str) -> None:
        """All of a namespace. What somebody else changes meanwhile comes back by the watch."""
        for name in list(self._found.get(namespace, ())):
            stray = self._found.get(namespace, {}).get(name)
            if stray is None:
                continue
            with contextlib.suppress(NotFound, Conflict):
                await self._write(namespace, name, stray)
            if self._found.get(namespace, {}).get(name) is stray:
                self._drop(namespace, name)

    async def _write(self, namespace: str, name: str, stray: Stray) -> None:
        left = [one for one in stray.finalizers if one != RESERVATION_FINALIZER]
        change = {"metadata": {"finalizers": left, "resourceVersion": stray.version}}
        await self._client.patch(marks.RESERVATIONS, name, namespace, change)

    def _drop(self, namespace: str, name: str) -> None:
        place = self._found.get(namespace, {})
        place.pop(name, None)
        if not place:
            self._found.pop(namespace, None)


def is_stray(found: Object) -> bool:
    """Whether it was held on to in a mailbox. What another broker keeps as its state is none of ours."""
    if not isinstance(found, Reservation) or not marks.holds_on(found.metadata):
        return False
    was_mail = found.status.reply is not None or mailboxes.KEY in found.metadata.annotations
    return was_mail and found.status.kept is None
