"""The limit of open files (RLIMIT_NOFILE), and the number of connections it allows."""

from __future__ import annotations

import resource
from contextlib import suppress
from typing import NamedTuple

import structlog

RESERVED_FILES = 1024
"""File descriptors reserved for the store, the other listeners and the log."""

DEFAULT_MAX_CONNECTIONS = 16384
"""Default maximum of connections: 1 GB of memory, if all of them are in a handshake."""

MAX_OPEN_FILES = 2**20
"""Requested where no limit is set; the Linux default of `fs.nr_open`, above which setrlimit fails."""

log = structlog.get_logger("kubelend.broker")


class FileLimits(NamedTuple):
    """Soft and hard limit of open files (`ulimit -Sn`, `ulimit -Hn`)."""

    soft: int
    hard: int

    @property
    def target(self) -> int:
        """The soft limit to set."""
        hard = MAX_OPEN_FILES if self.hard == resource.RLIM_INFINITY else self.hard
        return self.soft if self.soft == resource.RLIM_INFINITY else max(self.soft, hard)


def file_limits() -> FileLimits:
    return FileLimits(*resource.getrlimit(resource.RLIMIT_NOFILE))


def raise_file_limit() -> FileLimits:
    """Raises the soft limit to the hard limit. The low default is for programs that use select()."""
    found = file_limits()
    if found.target != found.soft:
        # The system may refuse the hard limit; the old limit is kept then.
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (found.target, found.hard))
    now = file_limits()
    log.debug("Raised limit of open files", limit=now.soft, before=found.soft, hard=now.hard)
    return now


def connection_limit(wanted: int, files: int) -> int:
    """Returns the maximum number of connections: `wanted` (0 for the default), capped by the open files."""
    if files == resource.RLIM_INFINITY:
        return wanted or DEFAULT_MAX_CONNECTIONS
    room = max(files - RESERVED_FILES, files // 2, 1)
    return min(wanted or DEFAULT_MAX_CONNECTIONS, room)
