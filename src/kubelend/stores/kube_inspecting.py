"""Verifies the signatures of stored records for the controllers.

The store verifies an object when it loads or writes it, and a corrupt record stops the start of a broker. So
the leader repairs it before that.
"""

from __future__ import annotations

from typing import Final, TypeVar

from msgspec.structs import replace

from kubelend.kube.client import Client
from kubelend.stores import kube_failures, kube_head, kube_seals
from kubelend.stores.kube_objects import HEAD_NAME, LEDGER_RECORDS, RecordKind
from kubelend.stores.kube_sights import TAMPERED
from kubelend.wire.broker_objects import ClusterAdvertisement, Reservation, StoredRecord
from kubelend.wire.objects import Object

VerifiedKind = TypeVar("VerifiedKind", bound=Object)


class RecordVerifier:
    """Verifies objects of one namespace. Reads the key when needed, and again before a mismatch counts."""

    def __init__(self, client: Client, namespace: str) -> None:
        self._client = client
        self._namespace = namespace
        self._key = ""

    async def verified(self, found: VerifiedKind) -> VerifiedKind:
        """The object; if its record was not written by the broker, with an empty record."""
        if not isinstance(found, ClusterAdvertisement | Reservation):
            return found
        record = found.status.record
        if record is None or await self._is_valid(
            _RECORD_KINDS[type(found)], found.metadata.name, record
        ):
            return found
        tampered = replace(record, revision=TAMPERED, data="")
        return replace(found, status=replace(found.status, record=tampered))

    async def _is_valid(self, kind: RecordKind, name: str, record: StoredRecord) -> bool:
        if self._key and kube_seals.verify(self._key, kind, name, record):
            return True
        head = await self._client.find(LEDGER_RECORDS, HEAD_NAME, self._namespace)
        if head is None:
            return True  # without the head nothing can be verified
        with kube_failures.translate_api_errors(self._client.config.server, self._namespace):
            self._key = kube_head.state_from_object(head).key
        return kube_seals.verify(self._key, kind, name, record)


_RECORD_KINDS: Final[dict[type[Object], RecordKind]] = {
    ClusterAdvertisement: "cluster",
    Reservation: "reservation",
}
