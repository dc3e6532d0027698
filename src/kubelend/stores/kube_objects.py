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
from kubelend.wire.broker_objects import Kept, LedgerRecord
from kubelend.wire.objects import VERSION, Metadata, Part

MADE_BY: Final = "broker.fluidos.eu/managed-by"
"""Label of objects that the broker created: it owns their spec."""
BROKER: Final = "broker"
ARCHIVED: Final = "broker.fluidos.eu/archived"
FINISHED: Final = "broker.fluidos.eu/finished"
"""The hour in which an archived reservation finished, to select expired ones."""
HOLDS: Final = "broker.fluidos.eu/contents"
"""The contents of a LedgerRecord as a label, so that a load need not read the audit log."""

HEAD: Final = "head"
"""The name of the one object whose every write is a commit."""

RecordKind = Literal["cluster", "reservation", "member", "token", "limits"]
Spec = dict[str, object]


class Holder(Part, frozen=True):
    """The fields of a status that the store uses."""

    record: Kept | None = None
    phase: str = ""
    valid_until: str = ""
    """Of an advertisement."""


class Stored(Part, frozen=True):
    """A ClusterAdvertisement or a Reservation."""

    metadata: Metadata
    spec: Spec = {}  # noqa: RUF012  # a struct's own copy
    status: Holder = Holder()

    @property
    def record(self) -> Kept | None:
        return self.status.record

    @property
    def is_archived(self) -> bool:
        return self.metadata.labels.get(ARCHIVED) == "true"

    @property
    def is_robbed(self) -> bool:
        """Whether the broker wrote its status, and the record was removed since."""
        made_by = self.metadata.labels.get(MADE_BY)
        return self.record is None and self.status.phase != "" and made_by == BROKER

    @property
    def was_filled(self) -> bool:
        """Of an advertisement without a record: whether anything shows that it had one.

        After a restore without statuses, the controllers' sums in the spec do.
        """
        amounts = self.spec.get("resources")
        is_summed_up = isinstance(amounts, dict) and "reserved" in amounts
        return self.is_robbed or self.status.valid_until != "" or is_summed_up


Seen = Stored | LedgerRecord

ADVERTISEMENTS: Final = Resource(
    broker_objects.GROUP,
    VERSION,
    broker_objects.ClusterAdvertisement.plural,
    broker_objects.ClusterAdvertisement.kind,
    Stored,
)
RESERVATIONS: Final = Resource(
    broker_objects.GROUP,
    VERSION,
    broker_objects.Reservation.plural,
    broker_objects.Reservation.kind,
    Stored,
)
LEDGER: Final = resources.of(LedgerRecord)


def name_of(kind: RecordKind, id: str) -> str:
    """The name of the object with this record. IDs that are no DNS names are hashed."""
    match kind:
        case "cluster":
            return f"{names.safe(id)}-adv"
        case "reservation":
            return names.safe(id)
    return f"{kind}-{names.safe(id)}"


def key_of(uid: str) -> RequestKey:
    """The idempotency key of a request object. Another object of the same name has another key."""
    return RequestKey(f"{_ASKED_BY}{uid}")


def asked_by(record: Reservation) -> str:
    """The UID of the object that requested it; empty if it was requested otherwise."""
    key = record.request.key or ""
    return key.removeprefix(_ASKED_BY) if key.startswith(_ASKED_BY) else ""


def labels_of(holds: str) -> dict[str, str]:
    return {MADE_BY: BROKER, HOLDS: holds}


_ASKED_BY: Final = "object→"
"""No key of a client can begin like this: they are ASCII (`wire.route.checked_key`)."""
