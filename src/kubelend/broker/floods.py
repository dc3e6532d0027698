"""Refusals that somebody brings about again and again: the first ones in full, then a count.

Without it, whoever is refused a hundred times a second would fill the journal of all the others. Callers
with a certificate are counted each by itself. Strangers have as many names and addresses as they like, so
they share a bound, and those that nobody can tell apart any more are counted together: none is lost.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from msgspec.structs import replace

from kubelend.core.journal import Entry
from kubelend.core.roles import Role
from kubelend.kits.networks import network

WINDOW = timedelta(minutes=1)
IN_FULL = 20
"""Entries of one kind that are told in full within a window."""

STRANGERS_IN_FULL = 100
"""The same for all strangers together."""

MOST_KINDS, MOST_STRANGERS = 10_000, 100
"""Kinds that are counted apart."""

_Kind = tuple[str, ...]
_NAMED = frozenset(Role)
_OTHERS: _Kind = ()


class Floods:
    """What was told lately, by who was refused what and why."""

    def __init__(self) -> None:
        self._named: dict[_Kind, _Window] = {}
        self._strangers: dict[_Kind, _Window] = {}

    def admit(self, entry: Entry) -> bool:
        """Whether to tell of this one itself; if not, it is counted."""
        if entry.actor.role in _NAMED:
            window = _window(self._named, _kind(entry, entry.actor.name), entry, MOST_KINDS)
            return window.take(entry, window.told < IN_FULL)
        kind = _kind(entry, network(entry.actor.remote))
        window = _window(self._strangers, kind, entry, MOST_STRANGERS)
        told = sum(window.told for window in self._strangers.values())
        return window.take(entry, window.told < IN_FULL and told < STRANGERS_IN_FULL)

    def over(self, now: datetime) -> list[Entry]:
        """One entry for all that was only counted, of each kind whose window has ended."""
        return [
            summary
            for windows in (self._named, self._strangers)
            for kind in [kind for kind, window in windows.items() if window.until <= now]
            if (summary := windows.pop(kind).summary(now)) is not None
        ]

    def all_over(self, now: datetime) -> list[Entry]:
        """The same of every kind: nothing is told any more."""
        windows = [*self._named.values(), *self._strangers.values()]
        self._named, self._strangers = {}, {}
        return [summary for window in windows if (summary := window.summary(now)) is not None]


class _Window:
    __slots__ = ("_counted", "_last", "told", "until")

    def __init__(self, until: datetime) -> None:
        self.until = until
        self.told = 0
        self._counted = 0
        self._last: Entry | None = None

    def take(self, entry: Entry, tell: bool) -> bool:
        self.told += tell
        self._counted += not tell
        self._last = entry
        return tell

    def summary(self, now: datetime) -> Entry | None:
        if not self._counted or self._last is None:
            return None
        message = f"{self._counted} more within {WINDOW.seconds} s, the last: {self._last.message}"
        return replace(self._last, at=now, message=message)


def _kind(entry: Entry, who: str) -> _Kind:
    return (who, entry.actor.role, entry.action, entry.code)


def _window(windows: dict[_Kind, _Window], kind: _Kind, entry: Entry, most: int) -> _Window:
    window = windows.get(kind)
    if window is None:
        kind = kind if len(windows) < most else _OTHERS
        window = windows.setdefault(kind, _Window(entry.at + WINDOW))
    return window
