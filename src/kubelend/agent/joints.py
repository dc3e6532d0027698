"""What a ReservationInstruction asks of the peering: with whom to be joined, and for how much. All pure.

`agent.peering` acts on it.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kubelend.agent.ports import Peer
from kubelend.agent.reservations import LIVE
from kubelend.core import resources
from kubelend.core.errors import InvalidInput
from kubelend.wire import bodies, quantities
from kubelend.wire.objects import ReservationInstruction

FINALIZER: Final = "reservationinstruction.rear.fluidos.eu/peering"
CONNECTING, READY, FINISHED = "Connecting", "Ready", "Finished"


class Joint(NamedTuple):
    """One object's connection with one provider."""

    key: str
    uid: str
    cluster: str

    def __str__(self) -> str:
        return f"{self.key} parting from {self.cluster}"


def target(found: ReservationInstruction, known: bodies.Reservation | None) -> str:
    """The provider to be joined with; empty if there is none now.

    `known` is the broker's newest word, which may be ahead of the object: what it takes away is gone.
    """
    if found.metadata.deletion_timestamp is not None or found.status.phase == FINISHED:
        return ""
    wanted = found.spec.target_cluster_id
    if known is None:
        return wanted
    is_so = known.status.phase in LIVE and known.target_cluster_id == wanted
    return wanted if is_so else ""


def peer(found: ReservationInstruction, cluster: str) -> Peer:
    """The other end, with what was reserved there; `InvalidInput` if the object does not say."""
    spec = found.spec
    return Peer(spec.reservation_name, cluster, quantities.asked(spec.amounts, "spec"))


def parted(found: ReservationInstruction, cluster: str) -> Peer:
    """The other end of what is to be undone, which needs its names alone."""
    try:
        return peer(found, cluster)
    except InvalidInput:
        return Peer(found.spec.reservation_name, cluster, resources.NOTHING)


def with_peered(found: ReservationInstruction, cluster: str) -> tuple[str, ...]:
    """All with whom it is joined once it is joined with this one too."""
    known = found.status.peered_cluster_ids
    return known if cluster in known else (*known, cluster)


def without_peered(found: ReservationInstruction, cluster: str) -> tuple[str, ...]:
    return tuple(other for other in found.status.peered_cluster_ids if other != cluster)


def cause(found: ReservationInstruction) -> tuple[object, ...]:
    """What of an object is a reason to look at it. What the peering itself writes is none."""
    known = found.metadata
    is_finished = found.status.phase == FINISHED
    return known.uid, known.generation, known.deletion_timestamp, is_finished
