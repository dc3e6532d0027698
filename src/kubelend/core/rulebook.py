"""Limits by cluster, and the effective lending policy of each provider."""

from __future__ import annotations

from collections.abc import Mapping

from kubelend.core import lending
from kubelend.core.events import Change, RecordDeleted
from kubelend.core.lending import EffectivePolicy
from kubelend.core.limits import Limits
from kubelend.core.models import Cluster, ClusterId


class LimitIndex:
    """Administrators' limits and effective policies by cluster."""

    def __init__(self) -> None:
        self._limits: dict[ClusterId, Limits] = {}
        self._effective_policies: dict[ClusterId, EffectivePolicy] = {}

    @property
    def limits(self) -> Mapping[ClusterId, Limits]:
        return self._limits

    def effective_policy(self, provider: ClusterId) -> EffectivePolicy | None:
        """The effective policy of a provider; None if nothing is limited."""
        return self._effective_policies.get(provider)

    def put(self, limits: Limits) -> Change:
        if limits.policy is None and limits.quota is None:
            self._limits.pop(limits.cluster, None)
            return RecordDeleted("limits", limits.cluster)
        self._limits[limits.cluster] = limits
        return limits

    def recompute(self, provider: Cluster) -> EffectivePolicy | None:
        """Recomputes the effective policy of a provider."""
        limits = self._limits.get(provider.id)
        ordered = None if limits is None else limits.policy
        holds = lending.effective_policy(provider.advertisement.policy, ordered)
        if holds is None:
            self._effective_policies.pop(provider.id, None)
        else:
            self._effective_policies[provider.id] = holds
        return holds

    def remove_provider(self, provider: ClusterId) -> None:
        """Removes a deleted provider; the limits set by administrators stay."""
        self._effective_policies.pop(provider, None)
