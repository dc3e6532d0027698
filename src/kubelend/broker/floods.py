"""Refusals that somebody brings about again and again: the first ones in full, then a count.

Without it, whoever is refused a hundred times a second would fill the journal of all the others.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from msgspec.structs import replace

from kubelend.core.journal import Entry

WINDOW = timedelta(minutes=1)
IN_FULL = 20
"""Entries of one kind that are told in full within a window."""

MOST_KINDS = 10_000

_Kind = tuple[str, str, str, str, str]


class Floods:
    """What was told lately, by who was refused what and why."""

    def __init__(self) -> None:
        self._kinds: dict[_Kind, _Window] = {}

    def admit(self, entry: Entry) -> bool:
        """Whether to tell of this one itself; if not, it is counted."""
        kind = (*_who(entry), entry.action, entry.code)
        window = self._kinds.get(kind)
        if window is None:
            if len(self._kinds) >= MOST_KINDS:
                return False  # nobody has so many names; a flood from many addresses has
            window = self._kinds[kind] = _Window(entry.at + WINDOW)
        window.count += 1
        window.last = entry
        return window.count <= IN_FULL

    def over(self, now: datetime) -> list[Entry]:
        """One entry for all that was only counted, of each kind whose window has ended."""
        ended = [kind for kind, window in self._kinds.items() if window.until <= now]
        return [
            summary for kind in ended if (summary := self._kinds.pop(kind).summary(now)) is not None
        ]


class _Window:
    __slots__ = ("count", "last", "until")

    def __init__(self, until: datetime) -> None:
        self.until = until
        self.count = 0
        self.last: Entry | None = None

    def summary(self, now: datetime) -> Entry | None:
        more = self.count - IN_FULL
        if more <= 0 or self.last is None:
            return None
        message = f"{more} more within {WINDOW.seconds} s, the last: {self.last.message}"
        return replace(self.last, at=now, message=message)


def _who(entry: Entry) -> tuple[str, str, str]:
    return entry.actor.name, entry.actor.role, entry.actor.remote
