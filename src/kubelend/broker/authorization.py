"""Authorization per reservation: which cluster may read or change it.

Used by the REST handlers for callers that are clusters, and by the Kubernetes transport.
"""

from __future__ import annotations

from kubelend.broker import streams
from kubelend.broker.service import Broker
from kubelend.broker.streams import Instruction
from kubelend.core import commands, transitions
from kubelend.core.errors import Forbidden, Hidden, WrongPhase, reservation_not_found
from kubelend.core.models import ClusterId, Reservation, ReservationId
from kubelend.wire import bodies, conversion, validation


def check_cluster_id(named: str, cluster: ClusterId) -> None:
    """Checks that the cluster ID in a body is the one of the certificate."""
    if named != cluster:
        raise Forbidden(
            f"clusterID {named[:64]!r} is not the certificate's {cluster!r}",
            hint="send the common name of the certificate",
        )


def check_namespace_cluster(named: str, cluster: ClusterId, what: str = "clusterID") -> None:
    """Checks that a cluster ID in an object is the one of its cluster namespace."""
    if named != cluster:
        raise Forbidden(
            f"{what} {named[:64]!r} is not the namespace's cluster {cluster!r}",
            hint=f"write {cluster}, whose namespace this is",
        )


async def visible_to(broker: Broker, reservation: ReservationId, cluster: ClusterId) -> Reservation:
    """Returns the reservation to its requester and providers; to others it does not exist."""
    found = await broker.reservation(reservation)
    if cluster in streams.clusters_of(found):
        return found
    raise reservation_not_found(reservation, Hidden)


async def owned_by(broker: Broker, reservation: ReservationId, cluster: ClusterId) -> Reservation:
    """Returns the reservation to its requester, for a change."""
    broker.check_leader()
    found = await visible_to(broker, reservation, cluster)
    if cluster == found.requester:
        return found
    raise Forbidden(f"{found.id} belongs to {found.requester}", hint="ask its requester")


def unfinished(found: Reservation) -> ReservationId:
    """Returns the ID of an unfinished reservation; a finished one may be archived and is immutable."""
    if found.finished_at is not None:
        raise WrongPhase(
            f"{found.id} is {found.phase}", hint=transitions.next_phase_hint(found.phase)
        )
    return found.id


async def acknowledge_hold(
    broker: Broker,
    reservation: ReservationId,
    cluster: ClusterId,
    body: bodies.AcknowledgeRequest,
) -> Reservation:
    broker.check_leader()
    found = await visible_to(broker, reservation, cluster)
    held = None if body.held is None else conversion.to_hold_report(body.held)
    return await broker.acknowledge(unfinished(found), cluster, held)


async def refuse_hold(
    broker: Broker, reservation: ReservationId, cluster: ClusterId, reason: str
) -> Reservation:
    """Refuses a hold. Idempotent: a repeated call returns the current reservation."""
    broker.check_leader()
    found = await visible_to(broker, reservation, cluster)
    if commands.has_refused(found, cluster):
        return found
    return await broker.refuse(unfinished(found), cluster, validation.to_single_line(reason))


def instruction_body(instruction: Instruction, grant: str) -> bodies.Instruction:
    """Converts an instruction to its body."""
    found = instruction.reservation
    return bodies.Instruction(
        revision=found.revision,
        role=instruction.side.value,
        action=instruction.action.value,
        message=instruction.message,
        reservation=conversion.from_reservation(found),
        grant=grant,
    )
