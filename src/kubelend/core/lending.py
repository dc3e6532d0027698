"""To whom a provider lends, how much and when: what it says itself, what an administrator says for it,
and what holds of both.

The stricter of the two wins in every point. The fleet folds the outcome into its columns; see `bounds`.
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

Names = tuple[str, ...]
"""Names and shell patterns: `team-a`, `team-*`."""


class LendingPolicy(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What a provider lends, to whom, and when. What is not said is not limited."""

    allow: Names = ()
    """Requesters that it lends to; to everyone if empty."""
    deny: Names = ()
    """Requesters that it does not lend to, whatever `allow` says."""
    keep_back: Resources = NOTHING
    """What stays free for itself, beside what its own pods have."""
    max_lent: dict[str, int] = {}
    """The most that is lent in total, by resource; zero lends none of it."""
    max_per_requester: dict[str, int] = {}
    """The same for each requester."""
    hours: tuple[str, ...] = ()
    """When new reservations may start, each as `Mon-Fri 18:00-08:00 Europe/Rome`; always if empty."""


NO_POLICY = LendingPolicy()


class Access(NamedTuple):
    """To whom a provider lends. Hashable, because many providers share one."""

    allow: tuple[Names, ...] = ()
    """Every one of these lists has to name a requester."""
    deny: Names = ()

    def allows(self, requester: str) -> bool:
        return all(matches(requester, names) for names in self.allow)

    def denies(self, requester: str) -> bool:
        return matches(requester, self.deny)


EVERYONE = Access()


class Lending(msgspec.Struct, frozen=True):
    """What holds for one provider."""

    access: Access
    keep_back: Resources
    max_lent: dict[str, int]
    max_per_requester: dict[str, int]
    hours: tuple[tuple[str, ...], ...]
    """Every one of these lists has to be open."""

    def lendable(self, available: Resources, reserved: Resources) -> Resources:
        """What of the available may be lent, while so much is lent already; never below zero."""
        rest = dict((available - self.keep_back).clamped().items())
        for name, most in self.max_lent.items():
            if name in rest:
                rest[name] = min(rest[name], max(most - reserved.amount(name), 0))
        return Resources.of(rest)


def stricter(advertised: LendingPolicy | None, ordered: LendingPolicy | None) -> Lending | None:
    """What holds of a provider's own policy and the administrator's; None if nothing is limited."""
    if advertised is None and ordered is None:
        return None
    one, other = advertised or NO_POLICY, ordered or NO_POLICY
    if one == other == NO_POLICY:
        return None
    return Lending(
        access=Access(_both(one.allow, other.allow), tuple(sorted({*one.deny, *other.deny}))),
        keep_back=one.keep_back.larger(other.keep_back),
        max_lent=_smaller(one.max_lent, other.max_lent),
        max_per_requester=_smaller(one.max_per_requester, other.max_per_requester),
        hours=_both(one.hours, other.hours),
    )


def matches(name: str, names: Names) -> bool:
    """Whether a name is among names and patterns."""
    return _matcher(names).matches(name)


def check_names(names: Names, where: str) -> None:
    """Refuse what can match no name, before anything depends on it."""
    for name in names:
        if not name.strip() or not name.isprintable():
            raise InvalidInput(
                f"{where}: {name[:40]!r} names no cluster", hint="write a name such as team-*"
            )
        try:
            re.compile(fnmatch.translate(name))
        except re.error as problem:
            raise InvalidInput(f"{where}: {name[:40]!r} is no pattern: {problem}") from None


class _Matcher:
    """Names by look-up, and only patterns one by one: lists may be long."""

    def __init__(self, names: Names) -> None:
        patterns = [name for name in names if not _WILD.isdisjoint(name)]
        self._exact = frozenset(names)
        """All of them: a cluster may be called `edge[1]`, and means itself by that."""
        self._patterns = [re.compile(fnmatch.translate(pattern)).match for pattern in patterns]

    def matches(self, name: str) -> bool:
        return name in self._exact or any(match(name) for match in self._patterns)


_WILD = frozenset("*?[")
_matcher = lru_cache(maxsize=4096)(_Matcher)


def _both(one: Names, other: Names) -> tuple[Names, ...]:
    return tuple(dict.fromkeys(names for names in (one, other) if names))


def _smaller(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {
        name: min(caps[name] for caps in (one, other) if name in caps)
        for name in sorted({*one, *other})
    }
