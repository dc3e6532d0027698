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


class Promises:
    """Holds by reservation ID, mirrored into the inventory so that pods of a requester do not count
    as this cluster's own. With `enforce`, a hold is only recorded if there is capacity for it.
    """

    def __init__(
        self,
        inventory: Inventory,
        policy: LendingPolicy | None,
        *,
        enforce: bool,
        on_holds: Callable[[], None],
    ) -> None:
        """`on_change` is called after every change of the inventory's holds."""
        self._inventory = inventory
        self._policy = policy
        self._on_holds = on_holds
        self._made: dict[str, Hold] = {}
        self.are_enforced = enforce

    def __contains__(self, reservation: str) -> bool:
        return reservation in self._made

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._made))

    @property
    def may_be_made(self) -> bool:
        """Whether capacity can be judged: with enforcement only after the first measurement."""
        return self._inventory.is_measured or not self.are_enforced

    def consider(self, reservation: bodies.Reservation, now: datetime) -> str:
        """Record a hold if it is admissible. Returns the refusal reason, empty if held."""
        hold = provisions.hold_of(reservation)
        asked = acceptance.Question(
            hold.requester, hold.resources, reservation.status.reserved_at or now
        )
        refusal = acceptance.refusal(asked, self._means(reservation.id))
        if not refusal:
            self.make(reservation.id, hold)
        return refusal

    def make(self, reservation: str, hold: Hold) -> None:
        """Record a hold without checking capacity."""
        if self._made.get(reservation) != hold:
            self._made[reservation] = hold
            self._inventory.put_hold(reservation, hold)
            self._on_holds()

    def drop(self, reservation: str) -> None:
        if self._made.pop(reservation, None) is not None:
            self._inventory.drop_hold(reservation)
            self._on_holds()

    def _means(self, reservation: str) -> acceptance.Means:
        others = [hold for name, hold in self._made.items() if name != reservation]
        free = self._inventory.free(without=reservation) if self.are_enforced else None
        return acceptance.Means(self._policy, free, others)
