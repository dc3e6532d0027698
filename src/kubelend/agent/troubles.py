"""Health of many peerings, reported as the health of one component.

`agent.peering` records one error per ReservationInstruction that cannot be connected, disconnected or
activated.
"""

from __future__ import annotations

from typing import Final

from kubelend.agent.standing import ComponentHealth

MAX_ERRORS_LISTED: Final = 3
"""How many errors are listed; the others are counted."""


class PeerHealth:
    """Collects the errors of single peerings (partial) and the error that affects all of them."""

    def __init__(self, health: ComponentHealth, component: str) -> None:
        self._health = health
        self._component = component
        self._errors: dict[str, str] = {}
        self._common_error = ""

    def set_error(self, key: str, error: str) -> None:
        # The first error stands until it is cleared: retries word the same failure differently.
        self._errors.setdefault(key, error)
        self._report()

    def clear(self, *keys: str) -> None:
        """Clear the errors of these."""
        for each in keys:
            self._errors.pop(each, None)
        self._report()

    def set_common_error(self, error: str) -> None:
        """Set the error that affects all peerings; empty if there is none."""
        self._common_error = error
        self._report()

    def _report(self) -> None:
        errors = [f"{what}: {problem}" for what, problem in sorted(self._errors.items())]
        more = (
            [f"and {len(errors) - MAX_ERRORS_LISTED} more"]
            if len(errors) > MAX_ERRORS_LISTED
            else []
        )
        self._health.report(
            self._component,
            "; ".join(filter(None, [self._common_error, *errors[:MAX_ERRORS_LISTED], *more])),
            is_partial=not self._common_error,
        )
