"""Objects of the Kubernetes store as it reads them: types, labels, names, checksums and errors.

Leaner than the types of `wire.broker_objects`: the store uses the stored record and the metadata only, and an
unusual spec must not keep a broker from starting.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal

from kubelend.core.errors import Forbidden, KubelendError, NotFound, StoreFailed
from kubelend.core.models import RequestKey, Reservation
from kubelend.kube import codec, resources
from kubelend.kube.resources import Resource
from kubelend.stores import batch
from kubelend.stores.batch import CorruptRecord
from kubelend.wire import broker_objects, objects
from kubelend.wire.broker_objects import LedgerRecord, StoredRecord
from kubelend.wire.objects import Metadata, ObjectStruct

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


def _stored(kind: type[objects.Object]) -> Resource[StoredObject]:
    return Resource(kind.group, kind.version, kind.plural, kind.kind, StoredObject)


STORED_ADVERTISEMENTS: Final = _stored(broker_objects.ClusterAdvertisement)
STORED_RESERVATIONS: Final = _stored(broker_objects.Reservation)
LEDGER_RECORDS: Final = resources.resource_for(LedgerRecord)


def record_object_name(kind: RecordKind, id: str) -> str:
    """The name of the object with this record. IDs that are no DNS names are hashed."""
    match kind:
        case "cluster":
            return f"{objects.object_name(id)}-adv"
        case "reservation":
            return objects.object_name(id)
    return f"{kind}-{objects.object_name(id)}"


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
"""No key of a client can begin like this: they are ASCII (`wire.route.check_idempotency_key`)."""


def record_checksum(kind: RecordKind, name: str, revision: int, text: str) -> str:
    """Covers all of it, so that a record is valid only under its own name and commit."""
    return f"{batch.record_checksum(f'{kind} {name} {revision} '.encode(), text.encode()):08x}"


def has_valid_checksum(kind: RecordKind, name: str, record: StoredRecord) -> bool:
    """Whether the record of this object is as it was written. It detects accidents, not forgeries."""
    return record.checksum == record_checksum(kind, name, record.revision, record.data)


@contextmanager
def translate_api_errors(server: str, namespace: str) -> Iterator[None]:
    """Errors that mean "this store cannot be used" become `StoreFailed`."""
    try:
        yield
    except StoreFailed:
        raise
    except (CorruptRecord, KubelendError) as error:
        where, problem = f"namespace {namespace} of {server}", f"it is damaged: {error}"
        hint = RESTORE_OBJECT_HINT
        if isinstance(error, KubelendError):
            problem, hint = error.message, _error_hint(error, namespace)
        raise StoreFailed(f"the store in {where} cannot be used: {problem}", hint=hint) from error


def fenced_error() -> StoreFailed:
    return StoreFailed(
        "another broker has written to the store since",
        hint="another broker is the writer now; only one may use a store",
    )


def record_dropped_error(kind: str) -> StoreFailed:
    return StoreFailed(
        f"the CRD of {kind} has no status.record: it is another version's, or the Go broker's",
        hint="update the CRDs: kubectl apply -f deploy/crds",
    )


def head_deleted_error() -> StoreFailed:
    return StoreFailed("LedgerRecord head was deleted", hint=RESTORE_OBJECT_HINT)


RESTORE_OBJECT_HINT = "restore the object from a backup; only the broker may edit its records"


def _error_hint(error: KubelendError, namespace: str) -> str:
    match error:
        case NotFound() if not codec.is_object_not_found(error):
            return "install the CRDs: kubectl apply -f deploy/crds"
        case NotFound():
            return f"create the namespace: kubectl create namespace {namespace}"
        case Forbidden() if not error.hint:
            return "check the Role of the broker's account"
    return error.hint
