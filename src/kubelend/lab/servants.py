"""A server of a lab that can be started, stopped and started again: etcd, and each API server."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from kubelend.apps import interrupts
from kubelend.apps.programs import Program
from kubelend.core.errors import Unavailable


class Servant(ABC):
    """Its data and address stay the same when it is started again; what it says is in `log`."""

    poll: ClassVar[float]
    """Seconds between two looks whether it is ready."""
    stops_within: ClassVar[float]

    def __init__(self, title: str, log: Path) -> None:
        """`title` is what a person calls it."""
        self._title = title
        self._log = log
        self._running: Program | None = None

    @abstractmethod
    def _command(self) -> list[str]: ...

    @abstractmethod
    def _is_ready(self) -> bool: ...

    @property
    def process(self) -> Program:
        if self._running is None:
            raise Unavailable(f"the {self._title} was not started")
        return self._running

    def start(self) -> None:
        """Does not wait: many can start at once."""
        with interrupts.put_off():
            self._running = Program(self._title, self._log, self._command(), os.environ)

    def wait_until_ready(self) -> float:
        """Gives the seconds since it was started."""
        return self.process.wait_until(self._is_ready, self.poll)

    def restart(self) -> None:
        """Watches end, and begin anew against a server that remembers no earlier events."""
        self.stop()
        self.start()
        self.wait_until_ready()

    def pause(self) -> None:
        """It keeps its connections, and every call waits until `resume`."""
        self.process.pause()

    def resume(self) -> None:
        self.process.resume()

    def kill(self) -> None:
        """As a power cut would. What keeps nothing itself is ended soonest by this."""
        if self._running is not None:
            self._running.kill()

    def stop(self) -> None:
        """Let it finish. One that was never started has."""
        if self._running is not None:
            self._running.stop(self.stops_within)
