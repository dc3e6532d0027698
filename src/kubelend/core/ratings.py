"""The display score of a cluster: the free share, from 0 to 100."""

from __future__ import annotations

from fractions import Fraction

from kubelend.core.resources import Resources

_DISPLAY_BANDS = ((90, "Excellent"), (70, "Good"), (50, "Moderate"))


def display_score(available: Resources, allocatable: Resources) -> Fraction:
    """Half for CPU and half for memory; zero if a cluster has none of either."""
    if not allocatable.cpu or not allocatable.memory:
        return Fraction(0)
    free = available.clamped()
    return Fraction(free.cpu * 50, allocatable.cpu) + Fraction(free.memory * 50, allocatable.memory)


def display_score_text(rating: Fraction) -> str:
    """Two decimals, as in the status of a ClusterAdvertisement."""
    hundredths = int(rating * 100 + Fraction(1, 2))
    return f"{hundredths // 100}.{hundredths % 100:02d}"


def display_band(rating: Fraction) -> str:
    """The band of a score: Excellent, Good, Moderate or Limited."""
    return next((name for floor, name in _DISPLAY_BANDS if rating >= floor), "Limited")
