"""Limits by cluster, and the effective lending policy of each provider."""

from __future__ import annotations

from collections.abc import Mapping

from kubelend.core import lending
from kubelend.core.events import Change, Erased
from kubelend.core.lending import Lending
from kubelend.core.limits import Limits
from kubelend.core.models import Cluster, ClusterId


class Rulebook:
    """Administrators' limits and effective policies by cluster."""

    def __init__(self) -> None:
        self._limits: dict[ClusterId, Limits] = {}
        self._lendings: dict[ClusterId, Lending] = {}

    @property
    def limits(self) -> Mapping[ClusterId, Limits]:
        return self._limits

    def lending(self, provider: ClusterId) -> Lending | None:
        """The effective policy of a provider; None if nothing is limited."""
        return self._lendings.get(provider)

    def put(self, limits: Limits) -> Change:
        if limits.policy is None and limits.quota is None:
            self._limits.pop(limits.cluster, None)
            return Erased("limits", limits.cluster)
        self._limits[limits.cluster] = limits
        return limits

    def judge(self, provider: Cluster) -> Lending | None:
        """Recomputes the effective policy of a provider."""
        limits = self._limits.get(provider.id)
        ordered = None if limits is None else limits.policy
        holds = lending.stricter(provider.advertisement.policy, ordered)
        if holds is None:
            self._lendings.pop(provider.id, None)
        else:
            self._lendings[provider.id] = holds
        return holds

    def drop(self, provider: ClusterId) -> None:
        """Removes a deleted provider; the limits set by administrators stay."""
        self._lendings.pop(provider, None)
