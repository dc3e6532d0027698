"""The resources that this provider holds for reservations: admission, the table of holds, and its
objects.

Checking free capacity and recording a hold happen without an `await` in between: of two reservations
that arrive together for the last capacity, the second one sees the first. Builders are pure.
`agent.provider` is the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime

from kubelend.agent import acceptance, provisions
from kubelend.core.inventory import Hold, Inventory
from kubelend.core.lending import LendingPolicy
from kubelend.wire import bodies


class HoldTable:
    """Holds by reservation ID, mirrored into the inventory so that pods of a requester do not count
    as this cluster's own. With `enforce`, a hold is only recorded if there is capacity for it.
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
        self._policy = policy
        self._on_change = on_change
        self._holds: dict[str, Hold] = {}
        self.is_enforced = enforce

    def __contains__(self, reservation: str) -> bool:
        return reservation in self._holds

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._holds))

    @property
    def can_decide(self) -> bool:
        """Whether capacity can be judged: with enforcement only after the first measurement."""
        return self._inventory.is_synced or not self.is_enforced

    def try_hold(self, reservation: bodies.Reservation, now: datetime) -> str:
        """Record a hold if it is admissible. Returns the refusal reason, empty if held."""
        hold = provisions.hold_from_reservation(reservation)
        asked = acceptance.HoldRequest(
            hold.requester, hold.resources, reservation.status.reserved_at or now
        )
        refusal = acceptance.refusal_reason(asked, self._capacity_without(reservation.id))
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

    def _capacity_without(self, reservation: str) -> acceptance.Capacity:
        others = [hold for name, hold in self._holds.items() if name != reservation]
        free = self._inventory.free(without=reservation) if self.is_enforced else None
        return acceptance.Capacity(self._policy, free, others)
