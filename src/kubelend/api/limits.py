"""Rate limiting with one token bucket per caller."""

from __future__ import annotations

from collections.abc import Callable

from kubelend.core.errors import RateLimited

_FORGET_ABOVE = 10_000
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
        self._forget_above = _FORGET_ABOVE

    def admit(self, caller: str) -> None:
        """Takes a token, or raises `RateLimited` with the time until the next one."""
        if not self._rate:
            return
        now = self._clock()
        tokens = self._tokens(caller, now)
        if tokens < 1:
            wait = (1 - tokens) / self._rate
            raise RateLimited(
                f"{caller} exceeds {self._rate:g} requests per second",
                hint=f"wait {wait:.2f}s",
                retry_after=wait,
            )
        self._buckets[caller] = (tokens - 1, now)
        if len(self._buckets) > self._forget_above:
            self._forget(now)

    def give_back(self, caller: str) -> None:
        """Returns a token taken by `admit`."""
        if caller in self._buckets:
            tokens, since = self._buckets[caller]
            self._buckets[caller] = (min(self._burst, tokens + 1), since)

    def _tokens(self, caller: str, now: float) -> float:
        tokens, since = self._buckets.get(caller, (self._burst, now))
        return min(self._burst, tokens + (now - since) * self._rate)

    def _forget(self, now: float) -> None:
        full = [name for name in self._buckets if self._tokens(name, now) >= self._burst]
        for name in full:
            del self._buckets[name]
        self._forget_above = max(_FORGET_ABOVE, 2 * len(self._buckets))
