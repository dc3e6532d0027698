"""A program that runs beside us, and never longer than we want it to.

`apps.children` starts our own processes with it, and the lab those of Kubernetes.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from kubelend.core.errors import Unavailable

READY_WITHIN = 60.0
_STOPPED_WITHIN = 30.0


class Program:
    """A running process, whose errors go to a file."""

    lines_told: ClassVar[int] = 5
    """How much of that file says why it did not start."""

    def __init__(
        self, name: str, log: Path, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """`name` is what a person calls it."""
        self.name = name
        self.log = log
        self.started_at = time.perf_counter()
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stream,
                env=environment,
                # A group of its own: Ctrl-C at the terminal is for us, and we stop it in good order.
                process_group=0,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_until(self, is_ready: Callable[[], bool], poll: float) -> float:
        """Look every `poll` seconds; gives the seconds since the process was started."""
        while not is_ready():
            waited = time.perf_counter() - self.started_at
            if not self.is_running or waited > READY_WITHIN:
                raise Unavailable(f"the {self.name} did not start", hint=self.last_words())
            time.sleep(poll)
        return time.perf_counter() - self.started_at

    def pause(self) -> None:
        """It keeps its connections and answers nothing, like one that is short of CPU or disk."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        """Tell it to finish, and do not wait for that."""
        if self.is_running:
            self._process.terminate()
            # One that is paused would not hear it.
            self.resume()

    def stop(self, within: float = _STOPPED_WITHIN) -> int:
        """Let it finish, and wait for that; gives its exit code. Stopping again does nothing."""
        self.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(within)
        finally:
            if self.is_running:
                self._process.kill()
        return self._process.wait()

    def kill(self) -> None:
        """As a power cut would."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return "\n".join(lines[-self.lines_told :]) or "it said nothing"
