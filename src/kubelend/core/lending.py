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
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, date, datetime, time, timedelta, tzinfo
from functools import lru_cache
from itertools import chain
from typing import Final, NamedTuple
from zoneinfo import ZoneInfo

import msgspec

from kubelend.core.errors import InvalidInput
from kubelend.core.resources import NOTHING, Resources

NamePatterns = tuple[str, ...]
"""Names and shell patterns: `team-a`, `team-*`."""

_WILDCARDS: Final = frozenset("*?[")
MAX_PATTERNS: Final = 32
"""Maximum number of patterns in a list, besides names without wildcards. Compiling one takes up to a third of
a millisecond, in which the broker serves nobody else."""
MAX_PATTERN_LENGTH: Final = 64
"""Maximum length of a pattern, which is that of a cluster's name."""


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


class AccessLists(NamedTuple):
    """The allow and deny lists of a provider. Hashable, because many providers share one."""

    allow: tuple[NamePatterns, ...] = ()
    """A requester has to match each of these lists."""
    deny: NamePatterns = ()

    def allows(self, requester: str) -> bool:
        return all(matches_any(requester, names) for names in self.allow)

    def denies(self, requester: str) -> bool:
        return matches_any(requester, self.deny)


EVERYONE = AccessLists()


class EffectivePolicy(msgspec.Struct, frozen=True):
    """The effective policy of one provider."""

    access: AccessLists
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
        access=AccessLists(
            _both_lists(one.allow, other.allow), tuple(sorted({*one.deny, *other.deny}))
        ),
        keep_back=one.keep_back.elementwise_max(other.keep_back),
        max_lent=_smaller_caps(one.max_lent, other.max_lent),
        max_per_requester=_smaller_caps(one.max_per_requester, other.max_per_requester),
        hours=_both_lists(one.hours, other.hours),
    )


def matches_any(name: str, names: NamePatterns) -> bool:
    """Whether a name matches one of the names and patterns."""
    return _matcher(names)(name)


def check_name_patterns(names: NamePatterns, where: str) -> None:
    """Raises `InvalidInput` for a pattern that cannot match any name, and for too many or too long ones."""
    for name in names:
        if not name.strip() or not name.isprintable():
            raise InvalidInput(
                f"{where}: {name[:40]!r} is not a cluster name or pattern",
                hint="write a name such as team-*",
            )
    wild = _with_wildcards(names)
    if len(wild) > MAX_PATTERNS:
        raise InvalidInput(
            f"{where}: {len(wild)} patterns are more than {MAX_PATTERNS}",
            hint="write names without wildcards, or fewer patterns",
        )
    for pattern in wild:
        if len(pattern) > MAX_PATTERN_LENGTH or pattern[0] == " ":
            raise InvalidInput(
                f"{where}: {pattern[:40]!r} has more than {MAX_PATTERN_LENGTH} characters, or begins with"
                " a space"
            )
        try:
            _compile(pattern)
        except re.error as error:
            raise InvalidInput(f"{where}: {pattern[:40]!r} is not a pattern: {error}") from None


def compiled_patterns() -> int:
    """How many patterns this process has compiled, which is what is expensive about a policy."""
    return _compile.cache_info().misses


def _with_wildcards(names: NamePatterns) -> list[str]:
    return [name for name in dict.fromkeys(names) if not _WILDCARDS.isdisjoint(name)]


@lru_cache(maxsize=16384)
def _compile(pattern: str) -> Callable[[str], object]:
    return re.compile(fnmatch.translate(pattern)).match


@lru_cache(maxsize=4096)
def _matcher(names: NamePatterns) -> Callable[[str], bool]:
    """Matches exact names by lookup, and only patterns one by one: lists may be long."""
    exact = frozenset(names)  # patterns too: a cluster may be named `edge[1]`
    patterns = [_compile(pattern) for pattern in _with_wildcards(names)]
    return lambda name: name in exact or any(match(name) for match in patterns)


def _both_lists(one: NamePatterns, other: NamePatterns) -> tuple[NamePatterns, ...]:
    return tuple(dict.fromkeys(names for names in (one, other) if names))


def _smaller_caps(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {
        name: min(caps[name] for caps in (one, other) if name in caps)
        for name in sorted({*one, *other})
    }


SEARCH_DAYS: Final = 15
"""Days searched for the next change: hours repeat weekly, unless a clock change skips them."""

_DAY_NAMES: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_EVERY_DAY: Final = frozenset(range(7))
_OPENING_HOURS_TEXT: Final = re.compile(
    r"(?:(?P<days>[a-z]{3}(?:[-,][a-z]{3})*) )?"
    r"(?P<start>\d{1,2}:\d\d)-(?P<end>\d{1,2}:\d\d)"
    r"(?: (?P<zone>\S+))?",
    re.ASCII | re.IGNORECASE,
)
_OPENING_HOURS_HINT: Final = "write for example Mon-Fri 18:00-08:00 Europe/Rome"
_WHOLE_DAY: Final = 24 * 60


class OpeningWindow(NamedTuple):
    """A parsed text of opening hours."""

    days: frozenset[int]
    """Weekdays on which the window begins; Monday is 0."""
    start: int
    """Minutes since midnight."""
    end: int
    """More than the minutes of a day if it ends on the next day."""
    zone: tzinfo

    def is_open(self, at: datetime) -> bool:
        local = at.astimezone(self.zone)
        minute = local.hour * 60 + local.minute
        today, yesterday = local.weekday(), (local.weekday() - 1) % 7
        return (today in self.days and self.start <= minute < self.end) or (
            yesterday in self.days and minute < self.end - _WHOLE_DAY
        )

    def boundaries(self, day: date) -> Iterator[datetime]:
        """All times of a local day at which the window may open or close."""
        for minute in {self.start, self.end % _WHOLE_DAY}:
            wall = datetime.combine(day, time(*divmod(minute, 60)), self.zone)
            yield wall.astimezone(UTC)
            # The second occurrence, if clocks are set back.
            yield wall.replace(fold=1).astimezone(UTC)
        turned = _utc_offset_change(day, self.zone)
        if turned is not None:
            yield turned


class OpeningHours:
    """Several lists of opening hours, all of which have to be open.

    The texts have been validated before.
    """

    def __init__(self, lists: tuple[tuple[str, ...], ...]) -> None:
        self._lists = [[_parse_or_never_open(text) for text in texts] for texts in lists]

    def is_open(self, at: datetime) -> bool:
        return all(any(window.is_open(at) for window in windows) for windows in self._lists)

    def next_change(self, at: datetime) -> datetime | None:
        """The next time at which it opens or closes; None if not within `SEARCH_DAYS`."""
        return self._change_within(at, 1) or self._change_within(at, SEARCH_DAYS)

    def _change_within(self, at: datetime, days: int) -> datetime | None:
        now, last = self.is_open(at), at + timedelta(days=days)
        edges = {edge for edge in self._boundaries(at, days) if at < edge <= last}
        return next((edge for edge in sorted(edges) if self.is_open(edge) != now), None)

    def _boundaries(self, at: datetime, days: int) -> Iterator[datetime]:
        for window in chain.from_iterable(self._lists):
            # Local calendar days: steps of 24 hours would miss one when clocks are set forward.
            today = at.astimezone(window.zone).date()
            for ahead in range(days + 2):
                yield from window.boundaries(today + timedelta(days=ahead))


@lru_cache(maxsize=1024)
def parse_opening_hours(text: str) -> OpeningWindow:
    """Parses a text; raises `InvalidInput`."""
    match = _OPENING_HOURS_TEXT.fullmatch(text) if len(text) <= 160 else None
    if match is None:
        raise InvalidInput(
            f"{text[:80]!r} is not a valid opening-hours text", hint=_OPENING_HOURS_HINT
        )
    start = _parse_minutes(match["start"], text, _WHOLE_DAY - 1)
    end = _parse_minutes(match["end"], text, _WHOLE_DAY)
    if start == end:
        raise InvalidInput(
            f"{text[:80]!r} begins and ends at the same time",
            hint="write 00:00-24:00 for a whole day",
        )
    days = _EVERY_DAY if match["days"] is None else _parse_days(match["days"], text)
    zone = UTC if match["zone"] is None else _parse_zone(match["zone"], text)
    return OpeningWindow(days, start, end if end > start else end + _WHOLE_DAY, zone)


_NEVER_OPEN: Final = OpeningWindow(frozenset(), 0, 1, UTC)


def _parse_or_never_open(text: str) -> OpeningWindow:
    """A stored text may name a time zone that this host does not know: then it never opens."""
    try:
        return parse_opening_hours(text)
    except InvalidInput:
        return _NEVER_OPEN


def _parse_minutes(text: str, whole: str, most: int) -> int:
    hours, minutes = map(int, text.split(":"))
    if minutes > 59 or hours * 60 + minutes > most:
        raise InvalidInput(f"{whole[:80]!r}: {text} is not a time of day", hint=_OPENING_HOURS_HINT)
    return hours * 60 + minutes


def _parse_days(text: str, whole: str) -> frozenset[int]:
    found: set[int] = set()
    for part in text.lower().split(","):
        first, _, last = part.partition("-")
        if first not in _DAY_NAMES or (last or first) not in _DAY_NAMES:
            raise InvalidInput(
                f"{whole[:80]!r}: {part} is not a day or range of days",
                hint="write for example Mon-Fri,Sun",
            )
        begin, end = _DAY_NAMES.index(first), _DAY_NAMES.index(last or first)
        found.update((begin + step) % 7 for step in range((end - begin) % 7 + 1))
    return frozenset(found)


def _parse_zone(name: str, whole: str) -> tzinfo:
    if name.upper() in {"UTC", "Z"}:
        return UTC
    try:
        return ZoneInfo(name)
    except (ValueError, KeyError, OSError):
        raise InvalidInput(
            f"{whole[:80]!r}: {name} is not a known time zone", hint="write one such as Europe/Rome"
        ) from None


def _utc_offset_change(day: date, zone: tzinfo) -> datetime | None:
    """The time at which the UTC offset of a zone changes on a day; None on nearly all days."""
    early = datetime.combine(day, time(), zone).astimezone(UTC)
    late = early + timedelta(hours=26)
    if early.astimezone(zone).utcoffset() == late.astimezone(zone).utcoffset():
        return None
    before = early.astimezone(zone).utcoffset()
    while late - early > timedelta(seconds=1):
        middle = (early + (late - early) // 2).replace(microsecond=0)
        if middle.astimezone(zone).utcoffset() == before:
            early = middle
        else:
            late = middle
    return late
