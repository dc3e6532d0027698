"""The objects of the Kubernetes store as it reads them, and what it finds them by.

Leaner than the types of `wire.broker_objects`: the store goes by the kept record and by the metadata, and a
spec that somebody filled in oddly must not keep a broker from starting.
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
"""On objects that the broker itself has made: their spec is its to write."""
BROKER: Final = "broker"
ARCHIVED: Final = "broker.fluidos.eu/archived"
FINISHED: Final = "broker.fluidos.eu/finished"
"""The hour in which an archived reservation finished: by it the old ones are found."""
HOLDS: Final = "broker.fluidos.eu/contents"
"""What a LedgerRecord holds, once more as a label: the journal must not be read at every start."""

HEAD: Final = "head"
"""The name of the one object whose every write is a commit."""

RecordKind = Literal["cluster", "reservation", "member", "token", "limits"]
Spec = dict[str, object]


class Holder(Part, frozen=True):
    """A status, as far as it is the store's."""

    record: Kept | None = None
    phase: str = ""
    valid_until: str = ""
    """Of an advertisement, as people see it."""


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
        """Whether it was filled by the broker, and somebody has taken the record out."""
        made_by = self.metadata.labels.get(MADE_BY)
        return self.record is None and self.status.phase != "" and made_by == BROKER

    @property
    def was_filled(self) -> bool:
        """Of an advertisement that keeps no record: whether anything tells that it has.

        Where the whole status is gone, as after a restore without it, the controllers' sums in the spec do.
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
    """The name of the object that keeps this record. Others than DNS names are hashed."""
    match kind:
        case "cluster":
            return f"{names.safe(id)}-adv"
        case "reservation":
            return names.safe(id)
    return f"{kind}-{names.safe(id)}"


def key_of(uid: str) -> RequestKey:
    """Under which the ledger knows what an object asks for. One made anew under its name is another."""
    return RequestKey(f"{_ASKED_BY}{uid}")


def asked_by(record: Reservation) -> str:
    """The UID of the object that asked for it; empty if it was asked for otherwise."""
    key = record.request.key or ""
    return key.removeprefix(_ASKED_BY) if key.startswith(_ASKED_BY) else ""


def labels_of(holds: str) -> dict[str, str]:
    return {MADE_BY: BROKER, HOLDS: holds}


_ASKED_BY: Final = "object→"
"""No key that somebody sends can begin like this: they are ASCII (`wire.route.checked_key`)."""
