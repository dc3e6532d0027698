"""Compares the objects of a cluster namespace with the ledger, and plans the writes. Pure.

Objects that agree with the ledger need no write, so the broker's own writes cause no further ones. What the
broker writes goes into the cache as the API server returned it, so that it never acts on its own changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from kubelend.broker import instructions, parties
from kubelend.broker.instructions import Action, Instruction, Side
from kubelend.controllers import marks
from kubelend.core.errors import KubelendError, Unavailable
from kubelend.core.models import ClusterId, RequestKey
from kubelend.core.models import Reservation as Record
from kubelend.stores import kube_objects, kube_projection
from kubelend.stores.kube_objects import Stored
from kubelend.wire import bodies, mailboxes, quantities
from kubelend.wire.broker_objects import (
    RESERVATION_FINALIZER,
    ClusterAdvertisement,
    Mailbox,
    Reservation,
)
from kubelend.wire.objects import (
    Metadata,
    ProviderInstruction,
    ProviderInstructionSpec,
    Question,
    Reply,
)

LIVE: Final = ("Pending", "Reserved", "Active")
OPEN: Final = frozenset({Action.USE, Action.WAIT, Action.HOLD})

Told = Reservation | ProviderInstruction


class Tell(NamedTuple):
    """Write this instruction into the object, or into a new one."""

    instruction: Instruction
    seen: Told | None


class Remove(NamedTuple):
    """The ledger no longer has the reservation of this object."""

    seen: Told


Step = Tell | Remove


def mirror(
    cluster: ClusterId,
    record: Record | None,
    own: Reservation | None,
    lent: ProviderInstruction | None,
) -> Iterator[Step]:
    """The writes that bring the objects of one reservation into agreement with the ledger."""
    parts = () if record is None else instructions.for_cluster(cluster, record)
    by_side = {part.side: part for part in parts}
    for obj, side in ((own, Side.REQUESTER), (lent, Side.PROVIDER)):
        part = by_side.get(side)
        if part is None:
            if obj is not None and is_ours(obj) and not marks.is_leaving(obj.metadata):
                yield Remove(obj)
        elif obj is None:
            if part.action in OPEN:  # a reservation that ended before it was shown is not shown
                yield Tell(part, None)
        elif not is_told(obj, part):
            yield Tell(part, obj)


def is_ours(seen: Told) -> bool:
    """Whether the broker or an agent made it; users delete their own objects."""
    if isinstance(seen, ProviderInstruction):
        return True
    return marks.is_own(seen.metadata) or mailboxes.KEY in seen.metadata.annotations


def is_told(seen: Told, part: Instruction) -> bool:
    """Ignores grants: each signature differs, for the same content."""
    response = instruction(seen)
    return response is not None and replace(response, grant="") == parties.told(part, "")


def instruction(seen: Told) -> bodies.Instruction | None:
    """The instruction in an object; None if there is none, or it cannot be decoded."""
    try:
        return mailboxes.instruction(reply(seen))
    except KubelendError:
        return None


# -- requests


def unanswered(seen: Told | ClusterAdvertisement | Mailbox) -> Question | None:
    """The pending request of an object; None if it was answered."""
    request = question(seen)
    response = reply(seen) or mailboxes.NOBODY
    if request is not None:
        return None if request.id == response.request_id else request
    match seen:
        case Reservation():
            if marks.is_own(seen.metadata):  # it only shows a reservation
                return None
            return Question("", "reserve") if seen.status.response is None else None
        case ClusterAdvertisement():
            is_new = seen.status.observed_generation != seen.metadata.generation
            return Question("", "publish") if is_new else None
    return None


def question(seen: Told | ClusterAdvertisement | Mailbox) -> Question | None:
    return seen.status.request if isinstance(seen, ProviderInstruction) else seen.spec.request


def reply(seen: Told | ClusterAdvertisement | Mailbox) -> Reply | None:
    return seen.spec.response if isinstance(seen, ProviderInstruction) else seen.status.response


def key_of(seen: Reservation) -> RequestKey:
    """The idempotency key of a request object."""
    given = seen.metadata.annotations.get(mailboxes.KEY)
    return RequestKey(f"namespace/{seen.metadata.uid}" if given is None else given)


def stands_for(seen: Reservation, record: Record) -> bool:
    """Whether it shows this reservation; if it shows none, whether it is the request for it."""
    response = instruction(seen)
    if response is not None:
        return response.reservation.id == record.id
    if marks.is_own(seen.metadata):
        return seen.metadata.name == mailboxes.mirror_name(record.id)
    return key_of(seen) == record.request.key and may_have_decided(seen)


def may_have_decided(seen: Reservation) -> bool:
    """Whether the request may have been executed, although no response says so.

    A broker may stop between commit and response, and a store that fails may have written after all. Any
    other error means that nothing was decided: then the key is that of another reservation.
    """
    if unanswered(seen) is not None:
        return True
    refusal = mailboxes.refusal(reply(seen))
    return refusal is None or isinstance(refusal, Unavailable)


def wished(seen: Reservation) -> str:
    """The verb that the object's conditions ask for; empty if none."""
    response = instruction(seen)
    if response is None:
        return ""
    phase = response.reservation.status.phase
    true = {condition.type for condition in seen.status.conditions if condition.status == "True"}
    if "RequesterReleased" in true and phase in LIVE:
        return "release"
    return "activate" if "RequesterActive" in true and phase == "Reserved" else ""


def is_loose(seen: Reservation, cluster: ClusterId) -> bool:
    """Whether it could be deleted without a release: the namespace had no cluster label for a while."""
    if marks.holds_on(seen.metadata) or marks.is_leaving(seen.metadata):
        return False
    response = instruction(seen)
    if response is None or response.reservation.requester_id != cluster:
        return False
    return response.reservation.status.phase in LIVE


# -- objects and patches


def own_object(record: Record, namespace: str, *, in_full: bool = True) -> Stored:
    """The object that shows a reservation to its requester, who requested it elsewhere.

    Not of the type that is decoded: a record may have values that the CRD does not accept.
    """
    projection = kube_projection.shown(record)
    metadata = Metadata(
        mailboxes.mirror_name(record.id),
        namespace,
        finalizers=(RESERVATION_FINALIZER,),
        labels={kube_objects.MADE_BY: kube_objects.BROKER},
    )
    return Stored(metadata, (projection if in_full else kube_projection.plain(projection)).spec)


def own_status(
    seen: Reservation | Stored, record: Record, said: Reply, now: datetime
) -> dict[str, object]:
    return {
        **kube_projection.reservation_status(record),
        "observedGeneration": seen.metadata.generation,
        "lastUpdateTime": now,
        "response": mailboxes.reply(said),
    }


def refused_status(
    seen: Reservation, error: KubelendError, said: Reply, now: datetime
) -> dict[str, object]:
    """The status of a request that failed or is to be repeated."""
    return {
        "phase": None if error.retryable else "Failed",
        "message": str(error),
        "reason": error.code,
        "observedGeneration": seen.metadata.generation,
        "lastUpdateTime": now,
        "response": mailboxes.reply(said),
    }


def lent_object(part: Instruction, said: Reply, namespace: str) -> ProviderInstruction:
    record = part.reservation
    return ProviderInstruction(
        Metadata(
            mailboxes.instruction_name(record.id),
            namespace,
            labels={kube_objects.MADE_BY: kube_objects.BROKER},
        ),
        lent_spec(part, said),
    )


def lent_change(part: Instruction, said: Reply) -> dict[str, object]:
    """The merge patch of a spec, removing all fields that are not set."""
    spec: dict[str, object] = msgspec.to_builtins(lent_spec(part, said))
    spec.setdefault("expiresAt", None)
    return spec | {"response": mailboxes.reply(said)}


def lent_spec(part: Instruction, said: Reply) -> ProviderInstructionSpec:
    record = part.reservation
    return ProviderInstructionSpec(
        *quantities.requested(record.request.resources),
        reservation_name=record.id,
        message=part.message,
        expires_at=record.expires_at,
        requester_cluster_id=record.requester,
        response=said,
    )
