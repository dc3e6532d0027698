"""A supervised child process with its log in a file.

`ChildProcess` starts brokers and agents with it, `envtest.servers` starts etcd and API servers.
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

READY_TIMEOUT = 60.0
_STOP_TIMEOUT = 30.0


class SupervisedProcess:
    """A running process whose stderr is written to a file."""

    error_lines: ClassVar[int] = 5
    """Number of last log lines that an error message contains."""

    def __init__(
        self, name: str, log: Path, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """`name` is used in error messages."""
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
                # Its own process group: Ctrl-C reaches only us, and we stop it gracefully.
                process_group=0,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_until(self, is_ready: Callable[[], bool], poll: float) -> float:
        """Polls every `poll` seconds; returns the seconds since the process was started."""
        while not is_ready():
            waited = time.perf_counter() - self.started_at
            if not self.is_running or waited > READY_TIMEOUT:
                raise Unavailable(f"the {self.name} did not start", hint=self.log_tail())
            time.sleep(poll)
        return time.perf_counter() - self.started_at

    def pause(self) -> None:
        """Suspends the process: it keeps its connections and does not respond."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        """Sends SIGTERM without waiting."""
        if self.is_running:
            self._process.terminate()
            # A suspended process would not handle the signal.
            self.resume()

    def stop(self, timeout: float = _STOP_TIMEOUT) -> int:
        """Terminates the process, by force after `within` seconds; returns its exit code. Idempotent."""
        self.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout)
        finally:
            if self.is_running:
                self._process.kill()
        return self._process.wait()

    def kill(self) -> None:
        """Ends the process with SIGKILL."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return "\n".join(lines[-self.error_lines :]) or "its log is empty"
