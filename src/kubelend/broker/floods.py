"""Throttle for audit entries about rejections: the first ones in full, then a summary with a count.

Otherwise one client that is rejected a hundred times a second would fill the audit log. Authenticated
callers are counted separately. Unauthenticated ones can use any number of names and addresses, so they
share a limit, and beyond it are counted together.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from msgspec.structs import replace

from kubelend.core.journal import AuditEntry
from kubelend.core.roles import Role
from kubelend.kits.networks import rate_limit_key

THROTTLE_WINDOW = timedelta(minutes=1)
MAX_FULL_ENTRIES = 20
"""Entries of one kind that are written in full within a window."""

MAX_FULL_UNAUTHENTICATED = 100
"""The same for all unauthenticated callers together."""

MAX_KINDS, MAX_UNAUTHENTICATED_KINDS = 10_000, 100
"""Maximum number of kinds that are counted separately."""

_RejectionKind = tuple[str, ...]
_AUTHENTICATED_ROLES = frozenset(Role)
_OTHER_KINDS: _RejectionKind = ()


class AuditThrottle:
    """Counts recent rejections by caller, action and code."""

    def __init__(self) -> None:
        self._authenticated: dict[_RejectionKind, _ThrottleWindow] = {}
        self._unauthenticated: dict[_RejectionKind, _ThrottleWindow] = {}

    def admit(self, entry: AuditEntry) -> bool:
        """Returns whether to write this entry; otherwise it is counted for the summary."""
        if entry.actor.role in _AUTHENTICATED_ROLES:
            window = _throttle_window(
                self._authenticated, _rejection_kind(entry, entry.actor.name), entry, MAX_KINDS
            )
            return window.count(entry, window.written < MAX_FULL_ENTRIES)
        kind = _rejection_kind(entry, rate_limit_key(entry.actor.remote))
        window = _throttle_window(self._unauthenticated, kind, entry, MAX_UNAUTHENTICATED_KINDS)
        told = sum(window.written for window in self._unauthenticated.values())
        return window.count(
            entry, window.written < MAX_FULL_ENTRIES and told < MAX_FULL_UNAUTHENTICATED
        )

    def due_summaries(self, now: datetime) -> list[AuditEntry]:
        """Returns a summary entry for each kind whose window has ended."""
        return [
            summary
            for windows in (self._authenticated, self._unauthenticated)
            for kind in [kind for kind, window in windows.items() if window.until <= now]
            if (summary := windows.pop(kind).summary(now)) is not None
        ]

    def all_summaries(self, now: datetime) -> list[AuditEntry]:
        """Returns the summaries of all kinds, at shutdown."""
        windows = [*self._authenticated.values(), *self._unauthenticated.values()]
        self._authenticated, self._unauthenticated = {}, {}
        return [summary for window in windows if (summary := window.summary(now)) is not None]


class _ThrottleWindow:
    __slots__ = ("_counted", "_last", "until", "written")

    def __init__(self, until: datetime) -> None:
        self.until = until
        self.written = 0
        self._counted = 0
        self._last: AuditEntry | None = None

    def count(self, entry: AuditEntry, is_written: bool) -> bool:
        self.written += is_written
        self._counted += not is_written
        self._last = entry
        return is_written

    def summary(self, now: datetime) -> AuditEntry | None:
        if not self._counted or self._last is None:
            return None
        message = f"{self._counted} more within {THROTTLE_WINDOW.seconds} s, the last: {self._last.message}"
        return replace(self._last, at=now, message=message)


def _rejection_kind(entry: AuditEntry, who: str) -> _RejectionKind:
    return (who, entry.actor.role, entry.action, entry.code)


def _throttle_window(
    windows: dict[_RejectionKind, _ThrottleWindow],
    kind: _RejectionKind,
    entry: AuditEntry,
    most: int,
) -> _ThrottleWindow:
    window = windows.get(kind)
    if window is None:
        kind = kind if len(windows) < most else _OTHER_KINDS
        window = windows.setdefault(kind, _ThrottleWindow(entry.at + THROTTLE_WINDOW))
    return window
