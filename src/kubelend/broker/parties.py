"""A reservation in the hands of a cluster that it concerns: whose it is, and what each side may do with it.

The same for every way of calling: the REST handlers (`kubelend.api`) use it for callers that are clusters,
and so does the communicator that needs no network.
"""

from __future__ import annotations

from kubelend.broker import instructions
from kubelend.broker.instructions import Instruction
from kubelend.broker.service import Broker
from kubelend.core import commands, transitions
from kubelend.core.errors import Forbidden, Hidden, WrongPhase, no_reservation
from kubelend.core.models import ClusterId, Reservation, ReservationId
from kubelend.wire import bodies, conversion, texts


def check_speaker(named: str, cluster: ClusterId) -> None:
    """A cluster speaks only for itself: its certificate names it, and what it sends has to agree."""
    if named != cluster:
        raise Forbidden(
            f"clusterID {named[:64]!r} is not the certificate's {cluster!r}",
            hint="send the common name of the certificate",
        )


def check_owner(named: str, cluster: ClusterId, what: str = "clusterID") -> None:
    """The same for what is said in a mailbox: its label names the cluster."""
    if named != cluster:
        raise Forbidden(
            f"{what} {named[:64]!r} is not the namespace's {cluster!r}",
            hint=f"write {cluster}",
        )


async def visible(broker: Broker, reservation: ReservationId, cluster: ClusterId) -> Reservation:
    """The reservation, for those it concerns. To others it does not exist."""
    found = await broker.reservation(reservation)
    if cluster in instructions.concerned(found):
        return found
    raise no_reservation(reservation, Hidden)


async def owned(broker: Broker, reservation: ReservationId, cluster: ClusterId) -> Reservation:
    """The reservation, for its requester, who means to change it."""
    broker.check_leading()
    found = await visible(broker, reservation, cluster)
    if cluster == found.requester:
        return found
    raise Forbidden(f"{found.id} belongs to {found.requester}", hint="ask its requester")


def ongoing(found: Reservation) -> ReservationId:
    """The ID of one that has not ended. What has may be in the archive, where nothing changes."""
    if found.finished_at is not None:
        raise WrongPhase(f"{found.id} is {found.phase}", hint=transitions.next_step(found.phase))
    return found.id


async def acknowledge(
    broker: Broker, reservation: ReservationId, cluster: ClusterId
) -> Reservation:
    broker.check_leading()
    found = await visible(broker, reservation, cluster)
    return await broker.acknowledge(ongoing(found), cluster)


async def refuse(
    broker: Broker, reservation: ReservationId, cluster: ClusterId, why: str
) -> Reservation:
    """Said again, because the first answer was lost: the answer is what became of it."""
    broker.check_leading()
    found = await visible(broker, reservation, cluster)
    if commands.has_refused(found, cluster):
        return found
    return await broker.refuse(ongoing(found), cluster, texts.in_one_line(why))


def told(instruction: Instruction, grant: str) -> bodies.Instruction:
    """An instruction as it goes out."""
    found = instruction.reservation
    return bodies.Instruction(
        revision=found.revision,
        role=instruction.side.value,
        action=instruction.action.value,
        message=instruction.message,
        reservation=conversion.from_reservation(found),
        grant=grant,
    )
