"""Lent amounts per requester, for providers with a cap per requester."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kubelend.core.models import ClusterId, Reservation
from kubelend.core.resources import NOTHING, Resources


class LentByRequester:
    """Sums of live reservations by requester and provider. Only the ledger changes them."""

    def __init__(self) -> None:
        self.tracked: set[ClusterId] = set()
        """Providers with a cap per requester."""
        self._by_requester: dict[ClusterId, dict[ClusterId, Resources]] = {}

    def for_requester(self, requester: ClusterId) -> Mapping[ClusterId, Resources]:
        return self._by_requester.get(requester, {})

    def track(self, provider: ClusterId, lent: Iterable[Reservation]) -> None:
        """Starts tracking a provider with its current reservations."""
        if provider in self.tracked:
            return
        self.tracked.add(provider)
        for reservation in lent:
            self.add(provider, reservation)

    def untrack(self, provider: ClusterId) -> None:
        if provider not in self.tracked:
            return
        self.tracked.remove(provider)
        for requester, loans in list(self._by_requester.items()):
            loans.pop(provider, None)
            if not loans:
                del self._by_requester[requester]

    def add(self, provider: ClusterId, reservation: Reservation) -> None:
        if provider in self.tracked:
            loans = self._by_requester.setdefault(reservation.requester, {})
            loans[provider] = loans.get(provider, NOTHING) + reservation.request.resources

    def remove(self, provider: ClusterId, reservation: Reservation) -> None:
        if provider not in self.tracked:
            return
        loans = self._by_requester[reservation.requester]
        loans[provider] -= reservation.request.resources
        if not loans[provider]:
            del loans[provider]
        if not loans:
            del self._by_requester[reservation.requester]
