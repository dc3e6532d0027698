"""Whether the broker has sealed what an object keeps, for the controllers: they see it when it is spoilt.

The store judges an object when it writes it, and when it starts; and then what somebody has spoilt stops the
start. So whoever leads has it mended before.
"""

from __future__ import annotations

from typing import Final, TypeVar

from msgspec.structs import replace

from kubelend.kube.client import Client
from kubelend.stores import kube_failures, kube_head, kube_seals
from kubelend.stores.kube_objects import HEAD, LEDGER, RecordKind
from kubelend.stores.kube_sights import SPOILT
from kubelend.wire.broker_objects import ClusterAdvertisement, Kept, Reservation
from kubelend.wire.objects import Object

Kind = TypeVar("Kind", bound=Object)


class Inspector:
    """Of the objects of one namespace. It reads the key when it needs it, and again before it suspects."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._key = ""

    async def judged(self, found: Kind) -> Kind:
        """The object; if somebody else has written what it keeps, then as one that keeps nothing of use."""
        if not isinstance(found, ClusterAdvertisement | Reservation):
            return found
        kept = found.status.record
        if kept is None or await self._is_whole(_KINDS[type(found)], found.metadata.name, kept):
            return found
        spoilt = replace(kept, revision=SPOILT, data="")
        return replace(found, status=replace(found.status, record=spoilt))

    async def _is_whole(self, kind: RecordKind, name: str, kept: Kept) -> bool:
        if self._key and kube_seals.is_whole(self._key, kind, name, kept):
            return True
        head = await self._client.find(LEDGER, HEAD, self._namespace)
        if head is None:
            return True  # nobody can tell
        with kube_failures.translated(self._client.access.server, self._namespace):
            self._key = kube_head.state_of(head).key
        return kube_seals.is_whole(self._key, kind, name, kept)


_KINDS: Final[dict[type[Object], RecordKind]] = {
    ClusterAdvertisement: "cluster",
    Reservation: "reservation",
}
