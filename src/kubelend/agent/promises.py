"""What this cluster has promised to others, taken or declined in one stretch.

Between the look at what is free and the hold there is no `await`: of two reservations that come in one
moment for the last of the capacity, the second sees the first. Called by `agent.providing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime

from kubelend.agent import acceptance, provisions
from kubelend.core.inventory import Hold, Inventory
from kubelend.core.lending import LendingPolicy
from kubelend.wire import bodies


class Promises:
    """By the reservation's ID. Each is a hold in the inventory, so that the pods of its requester do not
    count as this cluster's own. With `enforce` none is made for which there is no room.
    """

    def __init__(
        self,
        inventory: Inventory,
        policy: LendingPolicy | None,
        *,
        enforce: bool,
        on_holds: Callable[[], None],
    ) -> None:
        """`on_holds` is called after every change of the inventory's holds."""
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
        """Before anybody has looked what is free, there is nothing to decide by."""
        return self._inventory.is_measured or not self.are_enforced

    def consider(self, reservation: bodies.Reservation, now: datetime) -> str:
        """Make the promise, or say why not."""
        hold = provisions.hold_of(reservation)
        asked = acceptance.Question(
            hold.requester, hold.resources, reservation.status.reserved_at or now
        )
        refusal = acceptance.refusal(asked, self._means(reservation.id))
        if not refusal:
            self.make(reservation.id, hold)
        return refusal

    def make(self, reservation: str, hold: Hold) -> None:
        """It is promised, whatever is free."""
        if self._made.get(reservation) != hold:
            self._made[reservation] = hold
            self._inventory.put_hold(reservation, hold)
            self._on_holds()

    def drop(self, reservation: str) -> None:
        """Nobody counts on it any longer."""
        if self._made.pop(reservation, None) is not None:
            self._inventory.drop_hold(reservation)
            self._on_holds()

    def _means(self, reservation: str) -> acceptance.Means:
        others = [hold for name, hold in self._made.items() if name != reservation]
        free = self._inventory.free(without=reservation) if self.are_enforced else None
        return acceptance.Means(self._policy, free, others)
