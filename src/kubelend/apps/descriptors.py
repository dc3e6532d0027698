"""How many files the process may have open, and how many connections that is enough for."""

from __future__ import annotations

import resource
from contextlib import suppress
from typing import NamedTuple

import structlog

RESERVE = 1024
"""Files kept back from the connections of the REST interface: the store's, the other ports', the log's."""

MOST = 16384
"""Connections by default, where files allow more: 1 GB, if all of them have begun a handshake."""

UNLIMITED = 2**20
"""What to ask for where no limit is set: more than Linux gives by default is refused."""

log = structlog.get_logger("kubelend.broker")


class Files(NamedTuple):
    """The limits on open files, as `ulimit -Sn` and `ulimit -Hn` show them."""

    soft: int
    hard: int

    @property
    def wanted(self) -> int:
        """What the soft limit should be."""
        hard = UNLIMITED if self.hard == resource.RLIM_INFINITY else self.hard
        return self.soft if self.soft == resource.RLIM_INFINITY else max(self.soft, hard)


def limits() -> Files:
    return Files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def raise_limit() -> Files:
    """Take what the system allows. The low default is for programs that still call select()."""
    found = limits()
    if found.wanted != found.soft:
        # The system may allow less than it says; then the old limit stays.
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (found.wanted, found.hard))
    now = limits()
    log.info("open files", limit=now.soft, before=found.soft, hard=now.hard)
    return now


def connections(wanted: int, files: int) -> int:
    """How many to keep; `wanted` 0 leaves it to us. Never more than there are files for."""
    if files == resource.RLIM_INFINITY:
        return wanted or MOST
    room = max(files - RESERVE, files // 2, 1)
    return min(wanted or MOST, room)
