"""Reloads an object made from the files of a directory when they change; a check costs three stat calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from kubelend.core.errors import InvalidSettings
from kubelend.kits import keyfiles

Loaded = TypeVar("Loaded")
ReportError = Callable[[InvalidSettings], None]

_LOAD_ATTEMPTS = 5


class FileReloader(Generic[Loaded]):
    """Holds in `current` what `make` returned for the latest consistent files.

    Inconsistent files, such as a certificate whose key is still being written, leave it unchanged: `report`
    is called once with the error, and the next `refresh` tries again.
    """

    def __init__(
        self,
        directory: Path,
        make: Callable[[Path], Loaded],
        report: ReportError = lambda _: None,
        names: Sequence[str] = (
            keyfiles.TLS_CERTIFICATE,
            keyfiles.TLS_KEY,
            keyfiles.CA_CERTIFICATES,
        ),
    ) -> None:
        self._paths = [directory / name for name in names]
        self._directory = directory
        self._make = make
        self._report = report
        self._reported = ""
        self._signature: _FileSignature = ()
        self.problem: InvalidSettings | None = None
        """Why the current files could not be loaded; None if they were."""
        self.current = self._load_first()

    def refresh(self, *, again: bool = False) -> bool:
        """Reloads changed files; True if it did. With `again`, also unchanged ones."""
        # Before the files are read: the next refresh detects a change in between.
        signature = _file_signature(self._paths)
        if signature == self._signature and not again:
            self.problem = None
            return False
        try:
            self.current = self._make(self._directory)
        except InvalidSettings as error:
            self.problem = error
            self._report_error_once(error)
            return False
        self._signature = signature
        self._reported = ""
        self.problem = None
        return True

    def _load_first(self) -> Loaded:
        """Loads the files; tries again if they changed while they were read."""
        for _ in range(_LOAD_ATTEMPTS):
            self._signature = _file_signature(self._paths)
            try:
                return self._make(self._directory)
            except InvalidSettings:
                if _file_signature(self._paths) == self._signature:
                    raise
        return self._make(self._directory)

    def _report_error_once(self, error: InvalidSettings) -> None:
        if self._reported != str(error):
            self._reported = str(error)
            self._report(error)


_FileSignature = tuple[tuple[int, ...] | None, ...]


def _file_signature(paths: Sequence[Path]) -> _FileSignature:
    return tuple(map(_file_stat, paths))


def _file_stat(path: Path) -> tuple[int, ...] | None:
    # Follows links, so it detects the switch of the ..data link of a mounted Secret; ctime detects chmod.
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
