"""Verifies the signatures of stored records for the controllers.

The store verifies an object when it loads or writes it, and a corrupt record stops the start of a broker. So
the leader repairs it before that.
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
    """Verifies objects of one namespace. Reads the key when needed, and again before a mismatch counts."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._key = ""

    async def judged(self, found: Kind) -> Kind:
        """The object; if its record was not written by the broker, with an empty record."""
        if not isinstance(found, ClusterAdvertisement | Reservation):
            return found
        record = found.status.record
        if record is None or await self._is_whole(_KINDS[type(found)], found.metadata.name, record):
            return found
        tampered = replace(record, revision=SPOILT, data="")
        return replace(found, status=replace(found.status, record=tampered))

    async def _is_whole(self, kind: RecordKind, name: str, kept: Kept) -> bool:
        if self._key and kube_seals.is_whole(self._key, kind, name, kept):
            return True
        head = await self._client.find(LEDGER, HEAD, self._namespace)
        if head is None:
            return True  # without the head nothing can be verified
        with kube_failures.translated(self._client.access.server, self._namespace):
            self._key = kube_head.state_of(head).key
        return kube_seals.is_whole(self._key, kind, name, kept)


_KINDS: Final[dict[type[Object], RecordKind]] = {
    ClusterAdvertisement: "cluster",
    Reservation: "reservation",
}
