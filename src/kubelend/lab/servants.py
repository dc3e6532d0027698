"""Base class of the server processes, etcd and API servers, which can be stopped and restarted."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from kubelend.apps import interrupts
from kubelend.apps.programs import SupervisedProcess
from kubelend.core.errors import Unavailable


class ServerProcess(ABC):
    """A server process. Its data and address stay the same over a restart."""

    poll_seconds: ClassVar[float]
    """Seconds between two readiness checks."""
    stop_timeout: ClassVar[float]

    def __init__(self, title: str, log: Path) -> None:
        """`title` is used in error messages."""
        self._title = title
        self._log = log
        self._running: SupervisedProcess | None = None

    @abstractmethod
    def _command(self) -> list[str]: ...

    @abstractmethod
    def _is_ready(self) -> bool: ...

    @property
    def process(self) -> SupervisedProcess:
        if self._running is None:
            raise Unavailable(f"the {self._title} has not been started")
        return self._running

    def start(self) -> None:
        """Starts the process without waiting, so that several can start in parallel."""
        with interrupts.defer_signals():
            self._running = SupervisedProcess(self._title, self._log, self._command(), os.environ)

    def wait_until_ready(self) -> float:
        """Returns the seconds since it was started."""
        return self.process.wait_until(self._is_ready, self.poll_seconds)

    def restart(self) -> None:
        """Restarts the server. Watches end, and the new server has no cache of earlier events."""
        self.stop()
        self.start()
        self.wait_until_ready()

    def pause(self) -> None:
        """Suspends the process: connections stay open and calls block until `resume`."""
        self.process.pause()

    def resume(self) -> None:
        self.process.resume()

    def kill(self) -> None:
        """Ends the process with SIGKILL; the fastest way for a server without state."""
        if self._running is not None:
            self._running.kill()

    def stop(self) -> None:
        """Stops the process gracefully; does nothing if it was never started."""
        if self._running is not None:
            self._running.stop(self.stop_timeout)
