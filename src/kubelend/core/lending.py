"""Lending policies and opening hours.

A provider advertises a policy and an administrator may set another; the stricter of both applies in
every point. The fleet stores the effective policy in columns; see `PolicyColumns`.

Opening hours are written `Mon-Fri 18:00-08:00 Europe/Rome`. Days default to every day and the zone
to UTC. Hours over midnight belong to the day on which they begin. Local wall-clock time applies:
hours skipped by a change to daylight saving time do not occur, and repeated hours occur twice.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import msgspec

from kubelend.core.errors import InvalidInput
from kubelend.core.resources import NOTHING, Resources

NamePatterns = tuple[str, ...]
"""Names and shell patterns: `team-a`, `team-*`."""


class LendingPolicy(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a provider lends, to whom, and when. An empty field does not limit."""

    allow: NamePatterns = ()
    """Requesters that may borrow; everyone if empty."""
    deny: NamePatterns = ()
    """Requesters that may not borrow, even if in `allow`."""
    keep_back: Resources = NOTHING
    """Resources that stay free for the provider, in addition to those its pods use."""
    max_lent: dict[str, int] = {}
    """The most lent in total, by resource; zero lends none."""
    max_per_requester: dict[str, int] = {}
    """The most lent to each requester, by resource."""
    hours: tuple[str, ...] = ()
    """When new reservations may start, each `Mon-Fri 18:00-08:00 Europe/Rome`; always if empty."""


NO_POLICY = LendingPolicy()


class Access(NamedTuple):
    """The allow and deny lists of a provider. Hashable, because many providers share one."""

    allow: tuple[NamePatterns, ...] = ()
    """A requester has to match each of these lists."""
    deny: NamePatterns = ()

    def allows(self, requester: str) -> bool:
        return all(matches_any(requester, names) for names in self.allow)

    def denies(self, requester: str) -> bool:
        return matches_any(requester, self.deny)


EVERYONE = Access()


class EffectivePolicy(msgspec.Struct, frozen=True):
    """The effective policy of one provider."""

    access: Access
    keep_back: Resources
    max_lent: dict[str, int]
    max_per_requester: dict[str, int]
    hours: tuple[tuple[str, ...], ...]
    """Each of these lists has to be open."""

    def lendable(self, available: Resources, reserved: Resources) -> Resources:
        """The part of the available resources that may be lent, given what is reserved; never negative."""
        rest = dict((available - self.keep_back).clamped().items())
        for name, most in self.max_lent.items():
            if name in rest:
                rest[name] = min(rest[name], max(most - reserved.amount(name), 0))
        return Resources.of(rest)


def effective_policy(
    advertised: LendingPolicy | None, administrative: LendingPolicy | None
) -> EffectivePolicy | None:
    """Combines a provider's own policy with the administrator's; None if nothing is limited."""
    if advertised is None and administrative is None:
        return None
    one, other = advertised or NO_POLICY, administrative or NO_POLICY
    if one == other == NO_POLICY:
        return None
    return EffectivePolicy(
        access=Access(_both_lists(one.allow, other.allow), tuple(sorted({*one.deny, *other.deny}))),
        keep_back=one.keep_back.elementwise_max(other.keep_back),
        max_lent=_smaller_caps(one.max_lent, other.max_lent),
        max_per_requester=_smaller_caps(one.max_per_requester, other.max_per_requester),
        hours=_both_lists(one.hours, other.hours),
    )


def matches_any(name: str, names: NamePatterns) -> bool:
    """Whether a name matches one of the names and patterns."""
    return _matcher(names).matches(name)


def check_name_patterns(names: NamePatterns, where: str) -> None:
    """Raises `InvalidInput` for a pattern that cannot match any name."""
    for name in names:
        if not name.strip() or not name.isprintable():
            raise InvalidInput(
                f"{where}: {name[:40]!r} is not a cluster name or pattern",
                hint="write a name such as team-*",
            )
        try:
            re.compile(fnmatch.translate(name))
        except re.error as problem:
            raise InvalidInput(f"{where}: {name[:40]!r} is not a pattern: {problem}") from None


class _Matcher:
    """Matches exact names by lookup, and only patterns one by one: lists may be long."""

    def __init__(self, names: NamePatterns) -> None:
        patterns = [name for name in names if not _WILDCARDS.isdisjoint(name)]
        self._exact = frozenset(names)
        """Patterns too: a cluster may be named `edge[1]`."""
        self._patterns = [re.compile(fnmatch.translate(pattern)).match for pattern in patterns]

    def matches(self, name: str) -> bool:
        return name in self._exact or any(match(name) for match in self._patterns)


_WILDCARDS = frozenset("*?[")
_matcher = lru_cache(maxsize=4096)(_Matcher)


def _both_lists(one: NamePatterns, other: NamePatterns) -> tuple[NamePatterns, ...]:
    return tuple(dict.fromkeys(names for names in (one, other) if names))


def _smaller_caps(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {
        name: min(caps[name] for caps in (one, other) if name in caps)
        for name in sorted({*one, *other})
    }
