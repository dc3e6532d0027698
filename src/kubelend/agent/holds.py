"""Holds of the provider: their admission, the hold table, and the ProviderInstruction of each hold.

Admission checks the lending policy and the free capacity. The broker has applied the same rules, but to
an advertisement that may be half a minute old. The result is a refusal reason that the requester may read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Final

from msgspec.structs import replace

from kubelend.agent import conditions
from kubelend.core import lending, resources
from kubelend.core.inventory import Hold, Inventory
from kubelend.core.lending import LendingPolicy
from kubelend.core.resources import NOTHING, Resources
from kubelend.wire import bodies, quantities
from kubelend.wire.objects import (
    Condition,
    Metadata,
    ProviderInstruction,
    ProviderInstructionSpec,
    ProviderInstructionStatus,
    merge_conditions,
)


def refusal_reasons(
    wanted: Hold, at: datetime, policy: LendingPolicy, free: Resources | None, lent: Sequence[Hold]
) -> Iterator[str]:
    """Why a reservation is not admissible, for people; nothing if it is.

    `at` is when the broker placed it, `free` what is neither used nor held (None if capacity is not
    enforced), and `lent` the holds of other reservations.
    """
    requester = wanted.requester
    if lending.matches_any(requester, policy.deny):
        yield f"this cluster does not lend to {requester}"
    if policy.allow and not lending.matches_any(requester, policy.allow):
        yield f"{requester} is not in this cluster's list of allowed requesters"
    if policy.hours and not lending.OpeningHours((policy.hours,)).is_open(at):
        yield f"outside this cluster's lending hours: {', '.join(policy.hours)}"
    if free is not None:
        yield from _free_capacity_refusals(wanted.resources, free, policy.keep_back)
    yield from _cap_refusals(wanted.resources, lent, policy.max_lent, "")
    to_requester = [hold for hold in lent if hold.requester == requester]
    caps = policy.max_per_requester
    yield from _cap_refusals(wanted.resources, to_requester, caps, f" to {requester}")


def _free_capacity_refusals(
    wanted: Resources, free: Resources, keep_back: Resources
) -> Iterator[str]:
    if not wanted.fits_in(free):
        yield f"requested {wanted.describe()}, but only {_amounts_of(wanted, free)} is free"
    elif not wanted.fits_in(free - keep_back):
        yield (
            f"requested {wanted.describe()}, but of {_amounts_of(wanted, free)} free "
            f"this cluster keeps back {_amounts_of(wanted, keep_back)}"
        )


def _cap_refusals(
    wanted: Resources, lent: Iterable[Hold], caps: Mapping[str, int], to_requester: str
) -> Iterator[str]:
    total = sum((hold.resources for hold in lent), start=NOTHING)
    for name, most in caps.items():
        amount = wanted.amount(name)
        if amount and total.amount(name) + amount > most:
            yield (
                f"requested {resources.format_amount(name, amount)} {name}, but this cluster lends at most "
                f"{resources.format_amount(name, most)}{to_requester}, "
                f"of which {resources.format_amount(name, total.amount(name))} is lent"
            )


def _amounts_of(wanted: Resources, there: Resources) -> str:
    """The free amounts of the requested resources only."""
    return Resources.of({name: max(there.amount(name), 0) for name, _ in wanted.items()}).describe()


class HoldTable:
    """Holds by reservation ID, also in the inventory: pods of a requester do not count as the cluster's own.

    With `enforce`, a hold is only recorded if there is capacity for it.
    """

    def __init__(
        self,
        inventory: Inventory,
        policy: LendingPolicy | None,
        *,
        enforce: bool,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called after every change of the inventory's holds."""
        self._inventory = inventory
        self._policy = policy or lending.NO_POLICY
        self._on_change = on_change
        self._holds: dict[str, Hold] = {}
        self.is_enforced = enforce

    def __contains__(self, reservation: str) -> bool:
        return reservation in self._holds

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._holds))

    @property
    def can_decide(self) -> bool:
        """Whether capacity can be checked: with enforcement only after the first measurement."""
        return self._inventory.is_synced or not self.is_enforced

    @property
    def excess(self) -> Resources:
        """What is used and held beyond the capacity of the cluster."""
        free = self._inventory.free() if self._inventory.is_synced else NOTHING
        return (NOTHING - free).clamped()

    def try_hold(self, reservation: bodies.Reservation, now: datetime) -> str:
        """Record a hold if it is admissible. Returns the refusal reason, empty if held."""
        hold = hold_from_reservation(reservation)
        others = [each for name, each in self._holds.items() if name != reservation.id]
        free = self._inventory.free(without=reservation.id) if self.is_enforced else None
        at = reservation.status.reserved_at or now
        refusal = next(refusal_reasons(hold, at, self._policy, free, others), "")
        if not refusal:
            self.put(reservation.id, hold)
        return refusal

    def put(self, reservation: str, hold: Hold) -> None:
        """Record a hold without checking capacity."""
        if self._holds.get(reservation) != hold:
            self._holds[reservation] = hold
            self._inventory.put_hold(reservation, hold)
            self._on_change()

    def drop(self, reservation: str) -> None:
        if self._holds.pop(reservation, None) is not None:
            self._inventory.delete_hold(reservation)
            self._on_change()


HELD: Final = "Held"
WITHDRAWN: Final = "Withdrawn"
REFUSED: Final = "Refused"

_NAME_SUFFIX: Final = "-provider"


def provider_instruction_name(reservation: str) -> str:
    return f"{reservation}{_NAME_SUFFIX}"


def reservation_of_instruction(found: ProviderInstruction) -> str:
    """Empty if the name is not one that the agent gives."""
    name = found.metadata.name
    return name.removesuffix(_NAME_SUFFIX) if name.endswith(_NAME_SUFFIX) else ""


def hold_from_reservation(reservation: bodies.Reservation) -> Hold:
    """What to hold, and for which requester."""
    amounts = quantities.parse_requested(reservation.requested_resources, "requestedResources")
    return Hold(reservation.requester_id, amounts)


def hold_from_instruction(found: ProviderInstruction) -> Hold:
    """The hold that an object describes; `InvalidInput` if its spec was edited to something invalid."""
    spec = found.spec
    return Hold(spec.requester_cluster_id, quantities.parse_requested(spec.amounts, "spec"))


def provider_instruction(reservation: bodies.Reservation, namespace: str) -> ProviderInstruction:
    """The object for a reservation, without a status."""
    hold = hold_from_reservation(reservation)
    spec = ProviderInstructionSpec(
        *quantities.requested_fields(hold.resources),
        reservation_name=reservation.id,
        requester_cluster_id=hold.requester,
        message=f"Hold {hold.resources.describe()} for requester {hold.requester}",
        expires_at=reservation.status.expires_at,
        cost=reservation.cost,
    )
    return ProviderInstruction(Metadata(provider_instruction_name(reservation.id), namespace), spec)


def is_instruction_finished(found: ProviderInstruction) -> bool:
    """Whether the object is only retained for people to read."""
    return found.status.phase in (WITHDRAWN, REFUSED)


def held_status(*, is_enforced: bool) -> ProviderInstructionStatus:
    """Counts as held either way. Without enforcement the capacity was not checked."""
    message = (
        "Resources held" if is_enforced else "Recorded without a capacity check: enforcement is off"
    )
    return ProviderInstructionStatus(enforced=is_enforced, phase=HELD, message=message)


HELD_CONDITION: Final = "Held"
NOT_CONFIGURED: Final = "NotConfigured"
OVERCOMMITTED: Final = "Overcommitted"


def held_condition(status: str, reason: str, message: str) -> Condition:
    """Whether the scheduler keeps all of it free for the requester's pods, or they use it."""
    return Condition(HELD_CONDITION, status, reason, message)


def counted_condition(excess: Resources) -> Condition:
    """The condition without placeholders; `excess` is what is used and lent beyond the capacity."""
    if excess:
        message = f"Pods of this cluster use {excess.describe()} of the resources that it has lent"
        return held_condition("False", OVERCOMMITTED, message)
    message = "The agent runs with --hold=none: pods of this cluster can use the resources"
    return held_condition("False", NOT_CONFIGURED, message)


MAX_MESSAGE_LENGTH: Final = 512
"""In characters; limited by the REST API."""


def hold_report(known: Condition | None) -> bodies.HoldReport | None:
    """What the broker is told of the condition Held; None as long as that is undecided."""
    if known is None or known.status == "Unknown" or known.reason in (WITHDRAWN, REFUSED):
        return None
    message = known.message[:MAX_MESSAGE_LENGTH]
    return bodies.HoldReport(known.status == "True", known.reason, message)


def find_held_condition(found: ProviderInstruction) -> Condition | None:
    return conditions.find(found.status.conditions, HELD_CONDITION)


def with_held_condition(
    found: ProviderInstruction, condition: Condition, now: datetime
) -> ProviderInstructionStatus:
    """The status with this condition; unchanged once the hold has ended."""
    if found.status.phase != HELD:
        return found.status
    condition = replace(condition, observed_generation=found.metadata.generation)
    merged = merge_conditions(found.status.conditions, [condition], now)
    return replace(found.status, conditions=merged)


def conditions_of(
    found: ProviderInstruction,
    status: ProviderInstructionStatus,
    now: datetime,
    counted: Condition | None,
) -> tuple[Condition, ...]:
    """The conditions with a new status; as long as it is held, `counted` or what placeholders report."""
    if status.phase != HELD:
        ended = held_condition("False", status.phase, status.message)
        known = find_held_condition(found)
        return merge_conditions(found.status.conditions, [ended] if known else [], now)
    if counted is None:
        return found.status.conditions
    return merge_conditions(found.status.conditions, [counted], now)


def finished_status(phase: str, message: str, now: datetime) -> ProviderInstructionStatus:
    return ProviderInstructionStatus(phase=phase, message=message, finished_at=now)


def withdrawal_reason(reservation: bodies.Reservation | None, cluster: str) -> str:
    """Why a cluster no longer holds a reservation."""
    if reservation is None:
        return "Reservation not found on the broker"
    if reservation.target_cluster_id != cluster and cluster in reservation.previous_cluster_ids:
        return f"Moved to cluster {reservation.target_cluster_id}"
    return reservation.status.message or f"Reservation is {reservation.status.phase}"
