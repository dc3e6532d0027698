"""What is made of a directory's files, and made anew when they change: both sides of TLS follow so.

A server's contexts (`transports.tls`) and a client's connections (`transports.connections`) are told to
look (`refresh`) now and then. To look costs three calls of stat.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from kubelend.core.errors import InvalidSettings
from kubelend.kits import keyfiles

Made = TypeVar("Made")
Report = Callable[[InvalidSettings], None]

_TRIES = 5


class Following(Generic[Made]):
    """`current` is what `make` makes of the newest files that fit together.

    Files that do not, such as a certificate whose key is still being written, leave it as it is:
    `report` is told once why, and the next look tries again.
    """

    def __init__(
        self,
        directory: Path,
        make: Callable[[Path], Made],
        report: Report = lambda _: None,
        names: Sequence[str] = (keyfiles.CERTIFICATE, keyfiles.KEY, keyfiles.AUTHORITIES),
    ) -> None:
        self._paths = [directory / name for name in names]
        self._directory = directory
        self._make = make
        self._report = report
        self._reported = ""
        self._signature: _Signature = ()
        self.problem: InvalidSettings | None = None
        """Why the files that are there now are not what `current` was made of; None if they are."""
        self.current = self._first()

    def refresh(self, *, again: bool = False) -> bool:
        """Take up changed files; True if it did. With `again`, also if none has changed."""
        # Before the files are read: a change in between is then seen by the next look.
        signature = _signature(self._paths)
        if signature == self._signature and not again:
            self.problem = None
            return False
        try:
            self.current = self._make(self._directory)
        except InvalidSettings as error:
            self.problem = error
            self._report_once(error)
            return False
        self._signature = signature
        self._reported = ""
        self.problem = None
        return True

    def _first(self) -> Made:
        """There is nothing old to keep, so files that were exchanged while being read are read again."""
        for _ in range(_TRIES):
            self._signature = _signature(self._paths)
            try:
                return self._make(self._directory)
            except InvalidSettings:
                if _signature(self._paths) == self._signature:
                    raise
        return self._make(self._directory)

    def _report_once(self, error: InvalidSettings) -> None:
        if self._reported != str(error):
            self._reported = str(error)
            self._report(error)


_Signature = tuple[tuple[int, ...] | None, ...]


def _signature(paths: Sequence[Path]) -> _Signature:
    return tuple(map(_stat, paths))


def _stat(path: Path) -> tuple[int, ...] | None:
    # Follows links, and so sees Kubernetes exchange the ..data link behind a mounted secret. The
    # change time sees chmod.
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
