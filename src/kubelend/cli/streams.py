"""Standard output that may be lost: a reader which has had enough (`| head`), or a disk which is full.

What a command does counts for more than what it prints: it goes on, and is told when it flushes, as
`main` does at the end and a watch after each line.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path


class Lost(Exception):
    """The output cannot be written. No `OSError`: the parser would end the process in its own way."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(f"the output could not be written: {cause.strerror or cause}")
        self.is_unread = cause.errno == errno.EPIPE
        """Nobody reads it any more, which is no failure."""


class Output(io.TextIOWrapper):
    """Takes everything, and says when it is flushed that not everything was written."""

    cause: OSError | None = None

    def write(self, text: str) -> int:
        with self._kept():
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with self._kept():
            super().flush()
        if self.cause is not None:
            raise Lost(self.cause)

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.cause = self.cause or error
            # The rest goes nowhere: what is still in a buffer would fail again when the process ends.
            with Path(os.devnull).open("wb") as nowhere:
                os.dup2(nowhere.fileno(), self.fileno())


def install() -> None:
    """For the whole process, unless it was started without any output."""
    known = sys.stdout
    if isinstance(known, io.TextIOWrapper):
        sys.stdout = Output(
            known.buffer,
            encoding=known.encoding,
            errors=known.errors,
            line_buffering=known.line_buffering,
        )


def finish() -> None:
    """Write what is still in a buffer; `Lost` if not everything was written."""
    if isinstance(sys.stdout, Output):
        try:
            sys.stdout.flush()
        finally:
            # The interpreter flushes once more, and has nobody to tell.
            sys.stdout.cause = None
