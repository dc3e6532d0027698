"""Throttle for audit entries about rejections: the first ones in full, then a summary with a count.

Otherwise one client that is rejected a hundred times a second would fill the audit log. Authenticated
callers are counted separately. Unauthenticated ones can use any number of names and addresses, so they
share a limit, and beyond it are counted together.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from msgspec.structs import replace

from kubelend.core.journal import Entry
from kubelend.core.roles import Role
from kubelend.kits.networks import network

WINDOW = timedelta(minutes=1)
IN_FULL = 20
"""Entries of one kind that are written in full within a window."""

STRANGERS_IN_FULL = 100
"""The same for all unauthenticated callers together."""

MOST_KINDS, MOST_STRANGERS = 10_000, 100
"""Maximum number of kinds that are counted separately."""

_Kind = tuple[str, ...]
_NAMED = frozenset(Role)
_OTHERS: _Kind = ()


class Floods:
    """Counts recent rejections by caller, action and code."""

    def __init__(self) -> None:
        self._named: dict[_Kind, _Window] = {}
        self._strangers: dict[_Kind, _Window] = {}

    def admit(self, entry: Entry) -> bool:
        """Returns whether to write this entry; otherwise it is counted for the summary."""
        if entry.actor.role in _NAMED:
            window = _window(self._named, _kind(entry, entry.actor.name), entry, MOST_KINDS)
            return window.take(entry, window.told < IN_FULL)
        kind = _kind(entry, network(entry.actor.remote))
        window = _window(self._strangers, kind, entry, MOST_STRANGERS)
        told = sum(window.told for window in self._strangers.values())
        return window.take(entry, window.told < IN_FULL and told < STRANGERS_IN_FULL)

    def over(self, now: datetime) -> list[Entry]:
        """Returns a summary entry for each kind whose window has ended."""
        return [
            summary
            for windows in (self._named, self._strangers)
            for kind in [kind for kind, window in windows.items() if window.until <= now]
            if (summary := windows.pop(kind).summary(now)) is not None
        ]

    def all_over(self, now: datetime) -> list[Entry]:
        """Returns the summaries of all kinds, at shutdown."""
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

    def take(self, entry: Entry, is_written: bool) -> bool:
        self.told += is_written
        self._counted += not is_written
        self._last = entry
        return is_written

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
