"""Rate limiting with one token bucket per caller."""

from __future__ import annotations

from collections.abc import Callable

from kubelend.core.errors import RateLimited

_EVICT_ABOVE = 10_000
"""Number of buckets at which full ones, which hold no information, are evicted.

If many remain, their number has to double before the next eviction, so that its amortized cost is constant.
"""


class RateLimiter:
    """Allows `rate` requests per second and caller, with bursts of `burst`; a rate of 0 is unlimited."""

    def __init__(self, rate: float, burst: int, clock: Callable[[], float]) -> None:
        self._rate = rate
        self._burst = max(burst, 1)
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}
        self._evict_above = _EVICT_ABOVE

    def admit(self, key: str) -> None:
        """Takes a token, or raises `RateLimited` with the time until the next one."""
        if not self._rate:
            return
        now = self._clock()
        tokens = self._tokens(key, now)
        if tokens < 1:
            wait = (1 - tokens) / self._rate
            raise RateLimited(
                f"{key} exceeds {self._rate:g} requests per second",
                hint=f"wait {wait:.2f}s",
                retry_after=wait,
            )
        self._buckets[key] = (tokens - 1, now)
        if len(self._buckets) > self._evict_above:
            self._evict_full(now)

    def refund(self, key: str) -> None:
        """Returns a token taken by `admit`."""
        if key in self._buckets:
            tokens, since = self._buckets[key]
            self._buckets[key] = (min(self._burst, tokens + 1), since)

    def _tokens(self, key: str, now: float) -> float:
        tokens, since = self._buckets.get(key, (self._burst, now))
        return min(self._burst, tokens + (now - since) * self._rate)

    def _evict_full(self, now: float) -> None:
        full = [name for name in self._buckets if self._tokens(name, now) >= self._burst]
        for name in full:
            del self._buckets[name]
        self._evict_above = max(_EVICT_ABOVE, 2 * len(self._buckets))
