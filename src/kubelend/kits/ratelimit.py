"""Rate limiting: a token bucket per caller, a throttle for log messages, and a coalescing timer."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Callable, Hashable
from functools import lru_cache

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

    def admit(self, key: str, cost: int = 1) -> None:
        """Takes tokens, or raises `RateLimited` with the time until there are enough."""
        if wait := self.take(key, cost):
            raise RateLimited(
                f"{key} exceeds {self._rate:g} requests per second",
                hint=f"wait {wait:.2f}s",
                retry_after=wait,
            )

    def take(self, key: str, cost: int = 1) -> float:
        """Takes tokens and returns 0; if there are too few, returns the seconds until there are enough.

        What costs more than a whole burst needs a full bucket, and leaves a debt.
        """
        if not self._rate:
            return 0.0
        now = self._clock()
        tokens, needed = self._tokens(key, now), min(cost, self._burst)
        if tokens < needed:
            return (needed - tokens) / self._rate
        self._buckets[key] = (tokens - cost, now)
        if len(self._buckets) > self._evict_above:
            self._evict_full(now)
        return 0.0

    def charge(self, key: str, cost: int) -> None:
        """Takes tokens for what was done already; the debt is at most a burst."""
        if self._rate and cost > 0:
            now = self._clock()
            tokens = self._tokens(key, now)
            self._buckets[key] = (min(tokens, max(tokens - cost, -self._burst)), now)

    def refund(self, key: str) -> None:
        """Returns a token."""
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


@lru_cache(maxsize=4096)
def rate_limit_key(remote: str) -> str:
    """Return the IPv4 address, or the /64 network of an IPv6 address, because one client usually has all of
    it.
    """
    try:
        address = ipaddress.ip_address(remote.partition("%")[0])
    except ValueError:
        return remote
    if address.version == 4:
        return remote
    return str(ipaddress.ip_network((int(address), 64), strict=False))


LOG_INTERVAL = 10.0
"""Seconds between two log lines with one key."""

MAX_LOG_KEYS = 4096
"""Maximum number of keys. Beyond it the oldest is evicted, and its next line is logged early."""


class LogThrottle:
    """Allows one log line per key and interval, and counts the suppressed ones."""

    def __init__(
        self, interval: float = LOG_INTERVAL, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval = interval
        self._clock = clock
        self._intervals: dict[Hashable, tuple[float, int]] = {}
        """End of the interval and number of suppressed lines, by key."""

    def suppressed(self, key: Hashable) -> int | None:
        """Return the number of lines suppressed since the last one; None if this line is suppressed too."""
        now = self._clock()
        until, count = self._intervals.get(key, (now, 0))
        if now < until:
            self._intervals[key] = (until, count + 1)
            return None
        # Removed first, so that the dictionary stays ordered by time and its first key is the oldest.
        self._intervals.pop(key, None)
        self._intervals[key] = (now + self._interval, 0)
        if len(self._intervals) > MAX_LOG_KEYS:
            del self._intervals[next(iter(self._intervals))]
        return count


class CoalescingTimer:
    """Runs a rare action immediately; batches frequent ones until the next tick."""

    def __init__(self, seconds: float, rate: int = 0) -> None:
        """`rate`: with fewer actions in a second, none is batched."""
        self._seconds = seconds
        self._rate = rate
        self._last = float("-inf")
        self._second, self._count, self._count_before = 0, 0, 0
        self._pending: list[Callable[[], None]] = []

    def schedule(self, action: Callable[[], None]) -> None:
        """Run the action now, or together with others within `seconds`."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        is_often = now - self._last < self._seconds and self._is_above_rate(now)
        self._last = now
        if not is_often:
            action()
            return
        if not self._pending:
            loop.call_later(self._seconds, self._fire)
        self._pending.append(action)

    def _is_above_rate(self, now: float) -> bool:
        """Counts the action; whether there are enough in this second or the one before."""
        if (passed := int(now) - self._second) > 0:
            self._count_before = self._count if passed == 1 else 0
            self._second, self._count = int(now), 0
        self._count += 1
        return max(self._count, self._count_before) > self._rate

    def _fire(self) -> None:
        waiting, self._pending = self._pending, []
        loop = asyncio.get_running_loop()
        for (
            action
        ) in waiting:  # via the loop, so that one failing action does not affect the others
            loop.call_soon(action)
