"""Health of many peerings, reported as the health of one component.

`agent.peering` records one error per ReservationInstruction that cannot be connected, disconnected or
activated.
"""

from __future__ import annotations

from typing import Final

from kubelend.agent.standing import Standing

MOST_TOLD: Final = 3
"""How many errors are listed; the others are counted."""


class Troubles:
    """Collects the errors of single peerings (partial) and the error that affects all of them."""

    def __init__(self, standing: Standing, part: str) -> None:
        self._standing = standing
        self._part = part
        self._known: dict[str, str] = {}
        self._whole = ""

    def begin(self, what: str, problem: str) -> None:
        # The first error stands until it is cleared: retries word the same failure differently.
        self._known.setdefault(what, problem)
        self._report()

    def end(self, *what: str) -> None:
        """Clear the errors of these."""
        for each in what:
            self._known.pop(each, None)
        self._report()

    def concern_all(self, problem: str) -> None:
        """Set the error that affects all peerings; empty if there is none."""
        self._whole = problem
        self._report()

    def _report(self) -> None:
        errors = [f"{what}: {problem}" for what, problem in sorted(self._known.items())]
        more = [f"and {len(errors) - MOST_TOLD} more"] if len(errors) > MOST_TOLD else []
        self._standing.report(
            self._part,
            "; ".join(filter(None, [self._whole, *errors[:MOST_TOLD], *more])),
            is_partial=not self._whole,
        )
