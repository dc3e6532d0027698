"""Objects of the Kubernetes store as it reads them: types, labels, names, signatures and errors.

Leaner than the types of `wire.broker_objects`: the store uses the stored record and the metadata only, and an
unusual spec must not keep a broker from starting.
"""

from __future__ import annotations

from typing import Final, Literal

from kubelend.core.models import RequestKey, Reservation
from kubelend.kube import resources
from kubelend.kube.resources import Resource
from kubelend.wire import broker_objects, names
from kubelend.wire.broker_objects import LedgerRecord, StoredRecord
from kubelend.wire.objects import VERSION, Metadata, ObjectStruct

MANAGED_BY: Final = "broker.fluidos.eu/managed-by"
"""Label of objects that the broker created: it owns their spec."""
MANAGED_BY_BROKER: Final = "broker"
ARCHIVED_LABEL: Final = "broker.fluidos.eu/archived"
FINISHED_LABEL: Final = "broker.fluidos.eu/finished"
"""The hour in which an archived reservation finished, to select expired ones."""
CONTENTS_LABEL: Final = "broker.fluidos.eu/contents"
"""The contents of a LedgerRecord as a label, so that a load need not read the audit log."""

HEAD_NAME: Final = "head"
"""The name of the one object whose every write is a commit."""

RecordKind = Literal["cluster", "reservation", "member", "token", "limits"]
Spec = dict[str, object]


class StoredStatus(ObjectStruct, frozen=True):
    """The fields of a status that the store uses."""

    record: StoredRecord | None = None
    phase: str = ""
    valid_until: str = ""
    """Of an advertisement."""


class StoredObject(ObjectStruct, frozen=True):
    """A ClusterAdvertisement or a Reservation."""

    metadata: Metadata
    spec: Spec = {}  # noqa: RUF012  # a struct's own copy
    status: StoredStatus = StoredStatus()

    @property
    def record(self) -> StoredRecord | None:
        return self.status.record

    @property
    def is_archived(self) -> bool:
        return self.metadata.labels.get(ARCHIVED_LABEL) == "true"

    @property
    def lost_record(self) -> bool:
        """Whether the broker wrote its status, and the record was removed since."""
        made_by = self.metadata.labels.get(MANAGED_BY)
        return self.record is None and self.status.phase != "" and made_by == MANAGED_BY_BROKER

    @property
    def had_record(self) -> bool:
        """Of an advertisement without a record: whether anything shows that it had one.

        After a restore without statuses, the controllers' sums in the spec do.
        """
        amounts = self.spec.get("resources")
        is_summed_up = isinstance(amounts, dict) and "reserved" in amounts
        return self.lost_record or self.status.valid_until != "" or is_summed_up


AnyStoredObject = StoredObject | LedgerRecord

STORED_ADVERTISEMENTS: Final = Resource(
    broker_objects.GROUP,
    VERSION,
    broker_objects.ClusterAdvertisement.plural,
    broker_objects.ClusterAdvertisement.kind,
    StoredObject,
)
STORED_RESERVATIONS: Final = Resource(
    broker_objects.GROUP,
    VERSION,
    broker_objects.Reservation.plural,
    broker_objects.Reservation.kind,
    StoredObject,
)
LEDGER_RECORDS: Final = resources.resource_for(LedgerRecord)


def record_object_name(kind: RecordKind, id: str) -> str:
    """The name of the object with this record. IDs that are no DNS names are hashed."""
    match kind:
        case "cluster":
            return f"{names.object_name(id)}-adv"
        case "reservation":
            return names.object_name(id)
    return f"{kind}-{names.object_name(id)}"


def request_key_for_uid(uid: str) -> RequestKey:
    """The idempotency key of a request object. Another object of the same name has another key."""
    return RequestKey(f"{_OBJECT_KEY_PREFIX}{uid}")


def requesting_uid(record: Reservation) -> str:
    """The UID of the object that requested it; empty if it was requested otherwise."""
    key = record.request.key or ""
    return key.removeprefix(_OBJECT_KEY_PREFIX) if key.startswith(_OBJECT_KEY_PREFIX) else ""


def ledger_record_labels(contents: str) -> dict[str, str]:
    return {MANAGED_BY: MANAGED_BY_BROKER, CONTENTS_LABEL: contents}


_OBJECT_KEY_PREFIX: Final = "object→"
"""No key of a client can begin like this: they are ASCII (`wire.route.checked_key`)."""
