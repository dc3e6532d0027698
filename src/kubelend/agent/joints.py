"""What a ReservationInstruction wants of the peering: the provider and the resources. Pure."""

from __future__ import annotations

from typing import Final, NamedTuple

from kubelend.agent.ports import Peer
from kubelend.agent.reservations import LIVE_PHASES
from kubelend.core import resources
from kubelend.core.errors import InvalidInput
from kubelend.wire import bodies, quantities
from kubelend.wire.objects import ReservationInstruction

PEERING_FINALIZER: Final = "reservationinstruction.rear.fluidos.eu/peering"
CONNECTING, READY, FINISHED = "Connecting", "Ready", "Finished"


class PeeringKey(NamedTuple):
    """One object's connection to one provider."""

    key: str
    uid: str
    cluster: str

    def __str__(self) -> str:
        return f"{self.key} disconnecting from {self.cluster}"


def peering_target(found: ReservationInstruction, known: bodies.Reservation | None) -> str:
    """The provider to be connected with; empty if there is none now.

    `known` is the latest state of the reservation, which may be newer than the object: if it names
    another provider, the object's is outdated.
    """
    if found.metadata.deletion_timestamp is not None or found.status.phase == FINISHED:
        return ""
    wanted = found.spec.target_cluster_id
    if known is None:
        return wanted
    is_current = known.status.phase in LIVE_PHASES and known.target_cluster_id == wanted
    return wanted if is_current else ""


def peer_for(found: ReservationInstruction, cluster: str) -> Peer:
    """The provider with the reserved resources; `InvalidInput` if the spec is invalid."""
    spec = found.spec
    return Peer(spec.reservation_name, cluster, quantities.parse_requested(spec.amounts, "spec"))


def peer_to_disconnect(found: ReservationInstruction, cluster: str) -> Peer:
    """The provider to disconnect from, which needs the names only."""
    try:
        return peer_for(found, cluster)
    except InvalidInput:
        return Peer(found.spec.reservation_name, cluster, resources.NOTHING)


def with_peered_cluster(found: ReservationInstruction, cluster: str) -> tuple[str, ...]:
    """The recorded providers, with this one added."""
    known = found.status.peered_cluster_ids
    return known if cluster in known else (*known, cluster)


def without_peered_cluster(found: ReservationInstruction, cluster: str) -> tuple[str, ...]:
    return tuple(other for other in found.status.peered_cluster_ids if other != cluster)


def trigger_fields(found: ReservationInstruction) -> tuple[object, ...]:
    """The fields that trigger a reconcile. The peering's own status writes are not among them."""
    known = found.metadata
    is_finished = found.status.phase == FINISHED
    return known.uid, known.generation, known.deletion_timestamp, is_finished
